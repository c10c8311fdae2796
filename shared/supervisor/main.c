/* paddock-supervisor: one static program that runs, ends and accounts for a harness inside a sandbox. It needs
   /proc and nothing of the image: no libc, no shell, no coreutils.

   FOLDER is the folder of one activation and is never reused; FENCE is the caller's fence number. The folder
   keeps the highest and refuses lower ones with exit status 3. Exit statuses stand in supervisor.h.

     prepare FOLDER FENCE             make the folder (0700) before files are put into it
     run     FOLDER FENCE             launch what the frame on stdin says (frame.c), at most once; answers when
                                      the harness runs, or why it does not
     status  FOLDER FENCE             how it stands now
     wait    FOLDER FENCE WAIT_MS     as status, but only when it has ended or WAIT_MS have passed
     stop    FOLDER FENCE WAIT_MS [sweep]   end it, or see to it that it never starts
     sweep   FOLDER FENCE             kill what carries the marker of an activation whose supervisor is gone
     verify  FOLDER FENCE             look again whether anything is left beside the receipt's survivors
     remove  FOLDER FENCE             delete the folder of an ended activation; later launches find nothing

   These answer with three lines on stdout: {"v":1,"state":...,"live":...,"fence":...}, then state.json or
   null, then receipt.json or null, byte for byte. `verify` adds the processes that are left, or null.

     put PATH MODE SIZE [UID:GID]     exactly SIZE bytes from stdin into a file, which is then renamed into place
     get PATH [OFFSET [LENGTH]]       a regular file, or a part of it, to stdout
     unpack PATH [UID:GID]            a tar stream from stdin into a directory
     pack PATH                        a file or directory as a tar stream to stdout, named by its last part
     init                             be PID 1: reap, and end at once on TERM
     relay PORT SOCKET [detach]       127.0.0.1:PORT to a Unix socket; prints `ready`, or returns once it listens

     once                             one command in the foreground, asked for and answered over stdio (once.c)
     keep [NAME=VALUE ...]            be the first process of a box without an engine, and start `once` in it (keep.c)
     detach PROGRAM [ARGUMENT ...]    start a program that outlives this one, and tell its pid (detach.c)
     reach ADDRESS PORT WAIT_MS       send stdin to an address, and give its answer (reach.c)
     check [PATH ...]                 who runs this, and what each path is (look.c)
     mkdir UID GID MODE PATH          make what is missing of a path

   `fenced FOLDER FENCE COMMAND ...` before put, get, unpack or pack asks the folder's fence first. */
#include "supervisor.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct command {
    const char *name, *arguments;
    int least, most; /* arguments, without the name */
    int (*run)(int argc, char **argv);
};

static const struct command commands[] = {
    {"prepare", "FOLDER FENCE", 2, 2, command_prepare},
    {"run", "FOLDER FENCE", 2, 2, command_run},
    {"status", "FOLDER FENCE", 2, 2, command_status},
    {"wait", "FOLDER FENCE WAIT_MS", 3, 3, command_wait},
    {"stop", "FOLDER FENCE WAIT_MS [sweep]", 3, 4, command_stop},
    {"sweep", "FOLDER FENCE", 2, 2, command_sweep},
    {"verify", "FOLDER FENCE", 2, 2, command_verify},
    {"remove", "FOLDER FENCE", 2, 2, command_remove},
    {"put", "PATH MODE SIZE [UID:GID]", 3, 4, command_put},
    {"get", "PATH [OFFSET [LENGTH]]", 1, 3, command_get},
    {"unpack", "PATH [UID:GID]", 1, 2, command_unpack},
    {"pack", "PATH", 1, 1, command_pack},
    {"relay", "PORT SOCKET [detach]", 2, 3, command_relay},
    {"once", "", 0, 0, command_once},
    {"keep", "[NAME=VALUE ...]", 0, 16, command_keep},
    {"detach", "PROGRAM [ARGUMENT ...]", 1, 1024, command_detach},
    {"reach", "ADDRESS PORT WAIT_MS", 3, 3, command_reach},
    {"check", "[PATH ...]", 0, 64, command_check},
    {"mkdir", "UID GID MODE PATH", 4, 4, command_mkdir},
    {"init", "", 0, 0, command_init},
};
#define COMMANDS (sizeof commands / sizeof commands[0])

static int usage(const struct command *command) {
    if (command) {
        fail("usage: %s %s", command->name, command->arguments);
        return EXIT_USAGE;
    }
    fail("usage: one of these commands");
    for (size_t i = 0; i < COMMANDS; i++)
        dprintf(STDERR_FILENO, "  %s %s\n", commands[i].name, commands[i].arguments);
    return EXIT_USAGE;
}

static int dispatch(int argc, char **argv) {
    for (size_t i = 0; argc > 0 && i < COMMANDS; i++) {
        if (strcmp(argv[0], commands[i].name))
            continue;
        if (argc - 1 < commands[i].least || argc - 1 > commands[i].most)
            return usage(&commands[i]);
        int status = commands[i].run(argc, argv);
        return status == EXIT_USAGE ? usage(&commands[i]) : status;
    }
    return usage(NULL);
}

static int dispatch_fenced(int argc, char **argv) {
    struct folder folder;
    uint64_t fence;
    int lock;

    if (argc < 3 || !parse_number(argv[1], UINT64_MAX, &fence))
        return usage(NULL);
    if (folder_open(&folder, argv[0], false) != FOLDER_OPEN)
        return fail("there is no folder %s whose fence could be asked", argv[0]);
    int status = fence_enter(&folder, fence, &lock);
    if (status != EXIT_DONE)
        return status;
    close(lock);
    return dispatch(argc - 2, argv + 2);
}

int main(int argc, char **argv) {
    umask(0);
    signal(SIGPIPE, SIG_IGN);
    occupy_standard_streams();
    if (argc > 1 && !strcmp(argv[1], "fenced"))
        return dispatch_fenced(argc - 2, argv + 2);
    return dispatch(argc - 1, argv + 1);
}
