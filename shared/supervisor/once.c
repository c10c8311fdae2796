/* once: one command in the foreground.
 *
 * stdin carries the request, then frames of the command's input, and stays open until the end: when it closes
 * early, whoever asked is gone and the command is ended with all that it started. stdout and stderr are the
 * command's own. The end is told behind both: \0PDK<nonce>\0 on stdout, \0PDK<nonce> <how it ended>\0 on stderr.
 * A command that ends by itself may leave processes behind; at its time limit nothing of it stays alive.
 *
 * Numbers are big-endian, 32 bits: the request's size, then its fields, each ended by \0; a frame's size, then its
 * bytes; a frame of size 0 ends the input. */
#include "box.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { REQUEST_MAX = 8 << 20, FRAME_MAX = 64 << 10, KILL_BUDGET_MS = 10000 };

struct request {
    char *nonce, *boot, *cwd;
    int cwd_optional;
    long timeout_ms;
    char **argv, **env;
};

struct run {
    int signals, input; /* signalfd; write end of the command's stdin, -1 once closed */
    char frame[FRAME_MAX];
    size_t size, at;    /* bytes of the frame held, and how many of them were passed on */
    size_t missing;     /* bytes of the current frame that have not come yet */
    char head[4];       /* the next frame's size, as far as it has come */
    size_t head_got;
    int input_ended;
};

static pid_t main_pid;
static int main_ended, main_status;

static void on_reaped(pid_t pid, int status) {
    if (pid == main_pid) main_ended = 1, main_status = status;
}

static uint32_t number(const char *bytes) {
    const unsigned char *b = (const unsigned char *)bytes;
    return (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
}

static int read_exact(int fd, char *into, size_t size) {
    while (size) {
        ssize_t got = read(fd, into, size);
        if (got > 0) {
            into += got, size -= (size_t)got;
        } else if (got == 0 || errno != EINTR) {
            return -1;
        }
    }
    return 0;
}

static char *next_field(char **at, char *end) {
    char *field = *at, *stop = field < end ? memchr(field, 0, (size_t)(end - field)) : NULL;
    if (!stop) return NULL;
    *at = stop + 1;
    return field;
}

static char **field_list(char **at, char *end) {
    char *told = next_field(at, end);
    long count = told ? strtol(told, NULL, 10) : -1;
    if (count < 0 || count > REQUEST_MAX / 2) return NULL;
    char **list = calloc((size_t)count + 1, sizeof *list);
    for (long i = 0; list && i < count; i++)
        if (!(list[i] = next_field(at, end))) return NULL;
    return list;
}

static int read_request(struct request *into) {
    char head[4];
    if (read_exact(0, head, 4) < 0) return -1;
    uint32_t size = number(head);
    char *bytes = size <= REQUEST_MAX ? malloc(size) : NULL;
    if (!bytes || read_exact(0, bytes, size) < 0) return -1;
    char *at = bytes, *end = bytes + size, *timeout, *optional;
    if (!(into->nonce = next_field(&at, end)) || !(into->boot = next_field(&at, end))) return -1;
    if (!(timeout = next_field(&at, end)) || !(into->cwd = next_field(&at, end))) return -1;
    if (!(optional = next_field(&at, end))) return -1;
    into->timeout_ms = strtol(timeout, NULL, 10);
    into->cwd_optional = optional[0] == '1';
    if (!(into->argv = field_list(&at, end)) || !into->argv[0]) return -1;
    return (into->env = field_list(&at, end)) ? 0 : -1;
}

/* How often the box's memory limit has killed; -1 when the kernel does not tell. */
static long oom_kills(void) {
    static const char *const places[] = {"/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char text[512];
        int fd = open(places[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0) continue;
        ssize_t got = read(fd, text, sizeof text - 1);
        close(fd);
        text[got > 0 ? got : 0] = 0;
        char *found = strstr(text, "oom_kill ");
        if (found) return strtol(found + strlen("oom_kill "), NULL, 10);
    }
    return -1;
}

static void tell_end(const struct request *request, const char *boot, const char *kind, int value, long oom_before) {
    char text[512];
    long oom_after = oom_kills();
    long oom = oom_before < 0 || oom_after < 0 ? -1 : oom_after - oom_before;
    int size = snprintf(text, sizeof text, "%cPDK%s%c", 0, request->nonce, 0);
    write_all(1, text, (size_t)size);
    size = snprintf(text, sizeof text, "%cPDK%s %s %d %ld %s%c", 0, request->nonce, kind, value, oom, boot, 0);
    write_all(2, text, (size_t)size);
}

/* What went wrong between fork and exec, through a pipe that a successful exec closes. */
struct refusal {
    char stage; /* 'c' change of folder, 'x' exec */
    int error;
};

static void refuse(int report, char stage) {
    struct refusal refusal = {stage, errno};
    write_all(report, &refusal, sizeof refusal);
    _exit(127);
}

static void become(const struct request *request, int input, int report) {
    signal(SIGPIPE, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    umask(022);
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(input, 0);
    for (char **entry = request->env; *entry; entry++) putenv(*entry);
    if (request->cwd[0] && chdir(request->cwd) < 0 && !(request->cwd_optional && chdir("/") == 0)) refuse(report, 'c');
    execvp(request->argv[0], request->argv);
    refuse(report, 'x');
}

/* The command's pid, or -1 with `refusal` filled in. */
static pid_t start(const struct request *request, struct run *run, struct refusal *refusal) {
    int input[2], report[2];
    *refusal = (struct refusal){'f', 0};
    if (pipe2(input, O_CLOEXEC) < 0 || pipe2(report, O_CLOEXEC) < 0) return refusal->error = errno, -1;
    pid_t pid = fork();
    if (pid < 0) return refusal->error = errno, -1;
    if (pid == 0) become(request, input[0], report[1]);
    close(input[0]);
    close(report[1]);
    fcntl(input[1], F_SETFL, O_NONBLOCK);
    run->input = input[1];
    ssize_t told = read(report[0], refusal, sizeof *refusal);
    close(report[0]);
    if (told == (ssize_t)sizeof *refusal) return waitpid(pid, NULL, 0), -1;
    return pid;
}

static void close_input(struct run *run) {
    if (run->input >= 0) close(run->input);
    run->input = -1;
}

/* Takes what came on stdin; 0 when whoever asked is gone. */
static int take(struct run *run) {
    if (run->missing == 0) {
        ssize_t got = read(0, run->head + run->head_got, sizeof run->head - run->head_got);
        if (got <= 0) return got < 0 && (errno == EINTR || errno == EAGAIN);
        run->head_got += (size_t)got;
        if (run->head_got < sizeof run->head) return 1;
        run->head_got = 0;
        run->missing = number(run->head);
        if (run->missing == 0) run->input_ended = 1;
        return 1;
    }
    size_t room = run->missing < sizeof run->frame ? run->missing : sizeof run->frame;
    ssize_t got = read(0, run->frame, room);
    if (got <= 0) return got < 0 && (errno == EINTR || errno == EAGAIN);
    run->size = (size_t)got, run->at = 0;
    run->missing -= (size_t)got;
    return 1;
}

static void pass_on(struct run *run) {
    if (run->at < run->size && run->input >= 0) {
        ssize_t put = write(run->input, run->frame + run->at, run->size - run->at);
        if (put > 0) run->at += (size_t)put;
        if (put < 0 && errno != EAGAIN && errno != EINTR) close_input(run);
    }
    if (run->input < 0) run->at = run->size; /* the command reads no more: the rest is dropped */
    if (run->input_ended && run->at == run->size) close_input(run);
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) on_reaped(pid, status);
}

/* Serves the command until it ends ("exit"), its time is over ("timeout") or nobody waits any more ("left"). */
static const char *serve(struct run *run, long timeout_ms) {
    int64_t end = monotonic_ms() + timeout_ms;
    for (;;) {
        int holding = run->at < run->size;
        struct pollfd watched[3] = {
            {run->signals, POLLIN, 0},
            {0, holding ? 0 : POLLIN, 0},
            {holding ? run->input : -1, POLLOUT, 0},
        };
        int64_t left = end - monotonic_ms();
        if (left <= 0) return "timeout";
        if (poll(watched, 3, left > 1000000 ? 1000000 : (int)left) < 0 && errno != EINTR) return "left";
        if (watched[0].revents) {
            struct signalfd_siginfo told;
            while (read(run->signals, &told, sizeof told) > 0) continue;
            reap();
            if (main_ended) return "exit";
        }
        int closed = holding && (watched[1].revents & (POLLHUP | POLLERR));
        if (closed || (watched[1].revents && !take(run))) return "left";
        pass_on(run);
    }
}

static void tell_refusal(const struct request *request, const char *boot, struct refusal refusal, long oom) {
    const char *kind = refusal.stage == 'c' ? "cwd" : refusal.stage == 'x' ? "exec" : "fork";
    tell_end(request, boot, kind, refusal.error, oom);
}

static int run_request(const struct request *request, const char *boot) {
    static struct run run;
    struct refusal refusal;
    sigset_t watched;
    long oom = oom_kills();
    if (request->boot[0] && strcmp(request->boot, boot) != 0) return tell_end(request, boot, "replaced", 0, oom), 0;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    run.signals = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
    main_pid = start(request, &run, &refusal);
    if (main_pid < 0) return tell_refusal(request, boot, refusal, oom), 0;
    const char *ended = serve(&run, request->timeout_ms);
    if (strcmp(ended, "exit") != 0) {
        bool gone = kill_descendants(KILL_BUDGET_MS, on_reaped);
        tell_end(request, boot, gone ? ended : "unkillable", 0, oom);
    } else if (WIFSIGNALED(main_status)) {
        tell_end(request, boot, "signal", WTERMSIG(main_status), oom);
    } else {
        tell_end(request, boot, "exit", WEXITSTATUS(main_status), oom);
    }
    return 0;
}

int run_once(const char *boot) {
    struct request request;
    if (read_request(&request) < 0) {
        fail("once: no whole request came on stdin");
        return EXIT_USAGE;
    }
    return run_request(&request, boot);
}

int command_once(int argc, char **argv) {
    char boot[128];
    (void)argc, (void)argv;
    boot_name(boot, sizeof boot);
    return run_once(boot);
}
