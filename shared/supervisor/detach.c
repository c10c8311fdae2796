/* detach: starts a program that outlives who asked, in a session of its own, and tells its pid.

   Whoever asked has no child to reap; the descriptors that it passed on stay open in the program. */
#include "box.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int command_detach(int argc, char **argv) {
    pid_t pid = fork();

    (void)argc;
    if (pid < 0)
        return fail("cannot start %s: %s", argv[1], strerror(errno));
    if (pid == 0) {
        setsid();
        dup2(STDERR_FILENO, STDOUT_FILENO); /* the pipe on which the pid is told ends with us */
        execv(argv[1], argv + 1);
        _exit(fail("cannot start %s: %s", argv[1], strerror(errno)));
    }
    printf("%d\n", (int)pid);
    return EXIT_DONE;
}
