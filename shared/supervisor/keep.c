/* keep: the first process of a box; every other process of the box is below it.
 *
 * It adopts and reaps orphans, starts `exec`s for whoever connects to the socket that it was given, keeps the relay
 * alive, and ends with everything below it on TERM or when the box expires. As PID 1 its end is the end of the box.
 *
 *   keep [folder=MODE:PATH ...] [uid=N] [gid=N] [expires=UNIX_SECONDS] [listen=FD] [boot=TEXT] [relay=PORT:SOCKET]
 *
 * A connection gives the write ends of stdout and stderr with its first byte, and is the exec's stdin from then on. */
#include "box.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { KILL_BUDGET_MS = 10000, RELAY_PAUSE_MS = 1000 };

struct keeper {
    long uid, gid, expires;
    int listener, relay_port;
    const char *boot, *relay_socket;
    pid_t relay;
    int64_t relay_started_ms;
};

static struct keeper keeper = {.uid = -1, .gid = -1, .listener = -1, .boot = ""};

/* MODE:PATH, a folder that is made where it is missing. */
static int open_folder(char *told) {
    char *path = strchr(told, ':');
    if (!path++) return -1;
    if (mkdir(path, 0700) < 0 && errno != EEXIST) return -1;
    return chmod(path, (mode_t)strtol(told, NULL, 8));
}

static int read_options(int argc, char **argv) {
    for (int i = 0; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value++) return -1;
        if (strncmp(argv[i], "uid=", 4) == 0) keeper.uid = atol(value);
        else if (strncmp(argv[i], "gid=", 4) == 0) keeper.gid = atol(value);
        else if (strncmp(argv[i], "expires=", 8) == 0) keeper.expires = atol(value);
        else if (strncmp(argv[i], "listen=", 7) == 0) keeper.listener = atoi(value);
        else if (strncmp(argv[i], "boot=", 5) == 0) keeper.boot = value;
        else if (strncmp(argv[i], "folder=", 7) == 0) {
            if (open_folder(value) < 0) return -1;
        } else if (strncmp(argv[i], "relay=", 6) == 0) {
            keeper.relay_port = atoi(value);
            keeper.relay_socket = strchr(value, ':') ? strchr(value, ':') + 1 : NULL;
            if (!keeper.relay_socket) return -1;
        } else return -1;
    }
    return 0;
}

static int become_user(void) {
    if (keeper.gid >= 0 && (setgroups(0, NULL) < 0 || setresgid((gid_t)keeper.gid, (gid_t)keeper.gid, (gid_t)keeper.gid) < 0))
        return -1;
    if (keeper.uid >= 0 && setresuid((uid_t)keeper.uid, (uid_t)keeper.uid, (uid_t)keeper.uid) < 0) return -1;
    return 0;
}

static void child_signals(void) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* The supervisor's own `relay`, as another process of this very program. */
static void become_relay(void) {
    char port[16];
    snprintf(port, sizeof port, "%d", keeper.relay_port);
    execl("/proc/self/exe", "paddock-supervisor", "relay", port, keeper.relay_socket, (char *)NULL);
    _exit(127);
}

static void start_relay(void) {
    if (!keeper.relay_socket) return;
    pid_t pid = fork();
    if (pid == 0) {
        child_signals();
        become_relay();
    }
    keeper.relay = pid;
    keeper.relay_started_ms = monotonic_ms();
}

static int receive(int connection, int streams[2]) {
    char byte, room[CMSG_SPACE(2 * sizeof(int))];
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct timeval patience = {5, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != 1) return -1;
    struct cmsghdr *told = CMSG_FIRSTHDR(&message);
    if (!told || told->cmsg_type != SCM_RIGHTS || told->cmsg_len != CMSG_LEN(2 * sizeof(int))) return -1;
    memcpy(streams, CMSG_DATA(told), 2 * sizeof(int));
    struct timeval forever = {0, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &forever, sizeof forever);
    return 0;
}

/* In a process of its own from the first byte on, so that a silent caller holds nobody up. */
static void serve(int connection) {
    int streams[2];
    child_signals();
    close(keeper.listener);
    if (receive(connection, streams) < 0) _exit(EXIT_FAILED);
    dup2(connection, 0);
    dup2(streams[0], 1);
    dup2(streams[1], 2);
    if (connection > 2) close(connection);
    if (streams[0] > 2) close(streams[0]);
    if (streams[1] > 2) close(streams[1]);
    _exit(run_once(keeper.boot));
}

static void on_ended(pid_t pid, int status) {
    (void)status;
    if (pid == keeper.relay) keeper.relay = 0;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) on_ended(pid, status);
}

/* Milliseconds until the relay that ended may start again; -1 when it runs, or when there is none. */
static int relay_due_ms(void) {
    if (!keeper.relay_socket || keeper.relay > 0) return -1;
    int64_t left = keeper.relay_started_ms + RELAY_PAUSE_MS - monotonic_ms();
    return left > 0 ? (int)left : 0;
}

static void accept_one(void) {
    int connection = accept4(keeper.listener, NULL, NULL, SOCK_CLOEXEC);
    if (connection < 0) return;
    if (fork() == 0) serve(connection);
    close(connection);
}

static int expires_in_ms(void) {
    if (!keeper.expires) return -1;
    long left = keeper.expires - (long)time(NULL);
    return left <= 0 ? 0 : left > 3600 ? 3600000 : (int)(left * 1000);
}

static void watch(int signals) {
    for (;;) {
        struct pollfd watched[2] = {{signals, POLLIN, 0}, {keeper.listener, POLLIN, 0}};
        if (relay_due_ms() == 0) start_relay();
        int left_ms = expires_in_ms(), relay_ms = relay_due_ms();
        if (left_ms == 0) return;
        poll(watched, 2, relay_ms >= 0 && (left_ms < 0 || relay_ms < left_ms) ? relay_ms : left_ms);
        struct signalfd_siginfo told;
        while (read(signals, &told, sizeof told) > 0)
            if (told.ssi_signo != SIGCHLD) return;
        reap();
        if (watched[1].revents) accept_one();
    }
}

int command_keep(int argc, char **argv) {
    sigset_t watched;
    if (read_options(argc - 1, argv + 1) < 0) return EXIT_USAGE;
    if (become_user() < 0) return fail("keep: cannot become user %ld: %s", keeper.uid, strerror(errno));
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigaddset(&watched, SIGTERM);
    sigaddset(&watched, SIGINT);
    sigprocmask(SIG_BLOCK, &watched, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int signals = signalfd(-1, &watched, SFD_NONBLOCK | SFD_CLOEXEC);
    if (keeper.listener >= 0) fcntl(keeper.listener, F_SETFD, FD_CLOEXEC);
    start_relay();
    watch(signals);
    if (keeper.listener >= 0) close(keeper.listener);
    if (getpid() == 1) return EXIT_DONE; /* the kernel ends the rest of the box with its first process */
    return kill_descendants(KILL_BUDGET_MS, NULL) ? EXIT_DONE : EXIT_UNPROVEN;
}
