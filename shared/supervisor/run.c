/* `run`: claim the launch, fork what stays, and pass on the answer.

   The fence of the launch: this takes `live`, creates `started`, and only then looks for `stop`; `stop` creates
   `stop` and only then looks for `started`. So at least one of the two sees the other, in any order. */
#include "activation.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

#define LIVE_WAIT_MS 1000 /* a look at the lock holds it for an instant */
#define ANSWER_WAIT_MS 60000
#define ANSWER_ROOM (RECEIPT_ROOM + 8192)

enum claim { WON, TAKEN, FAILED };

static struct answer answer; /* large, and there is one per process */

/* Shared with the two that stay; what is not written to costs no memory. */
static struct activation *new_activation(void) {
    unsigned char random[NONCE_DIGITS / 2];
    struct activation *activation =
        mmap(NULL, sizeof *activation, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (activation == MAP_FAILED || getrandom(random, sizeof random, 0) != sizeof random)
        return NULL;
    for (size_t i = 0; i < sizeof random; i++)
        sprintf(activation->nonce + 2 * i, "%02x", random[i]);
    snprintf(activation->marker, sizeof activation->marker, MARKER "=%s", activation->nonce);
    activation->oom_kills = activation->oom_kill_delta = -1;
    activation->receipt_file = activation->live = -1;
    activation->request = (struct request){.grace_ms = 5000, .kill_ms = 10000, .head_bytes = 64 << 20, .tail_bytes = 1 << 20};
    for (int i = 0; i < 2; i++)
        activation->streams[i].pipe = activation->streams[i].file = -1;
    return activation;
}

static void block_signals(void) {
    sigset_t blocked;

    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigaddset(&blocked, SIGTERM);
    sigaddset(&blocked, SIGINT);
    sigaddset(&blocked, SIGHUP);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
}

static enum claim claim_launch(struct activation *activation) {
    struct folder *folder = &activation->folder;

    if (folder_has(folder, "started"))
        return TAKEN;
    activation->live = openat(folder->fd, "live", O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (activation->live < 0)
        return FAILED;
    if (!lock_within(activation->live, LIVE_WAIT_MS))
        return TAKEN;
    if (folder_claim(folder, "started"))
        return WON;
    return errno == EEXIST ? TAKEN : FAILED;
}

/* Opens the folder, passes its fence and claims the launch under the fence's lock. A folder that is not there counts
   as taken: a launch that comes after the close finds none, and there is nothing to start (SB-13). */
static int enter(struct activation *activation, char **argv, enum presence *presence, enum claim *claim) {
    int lock;

    if (!frame_read(&activation->request))
        return EXIT_FAILED;
    *claim = TAKEN;
    int status = folder_enter(argv, false, &activation->folder, presence, &lock);
    if (status != EXIT_DONE || *presence != FOLDER_OPEN)
        return status;
    activation->fence = fence_read(&activation->folder);
    *claim = claim_launch(activation);
    if (*claim == FAILED)
        status = fail("cannot claim the launch in %s, so nothing was launched: %s", argv[1], strerror(errno));
    close(lock);
    return status;
}

/* Ended before there was a supervisor. The text is the answer also when it could not be saved. */
static size_t conclude_here(struct activation *activation, const char *state, const char *reason, char *text) {
    activation->state = state;
    activation->reason = reason;
    activation->clean = true; /* nothing of it was ever started */
    receipt_write(activation);
    return (size_t)snprintf(text, ANSWER_ROOM, "{\"v\":1,\"state\":\"%s\",\"live\":false,\"fence\":%llu}\nnull\n%s", state,
                            (unsigned long long)activation->fence, activation->receipt_text);
}

static size_t fail_here(struct activation *activation, const char *problem, char *text) {
    activation->error = errno;
    snprintf(activation->problem, sizeof activation->problem, "%s", problem);
    return conclude_here(activation, "launch_failed", "launch", text);
}

/* What the supervisor says once the harness runs or cannot; empty when it died before. */
static size_t read_answer(int from, char *text) {
    struct pollfd polled = {from, POLLIN, 0};
    size_t length = 0;
    ssize_t got = 1;

    while (got > 0 && length < ANSWER_ROOM && poll(&polled, 1, ANSWER_WAIT_MS) > 0) {
        got = read(from, text + length, ANSWER_ROOM - length);
        length += got > 0 ? (size_t)got : 0;
    }
    return length;
}

/* Forks the guardian, which forks the supervisor, and gives the length of the answer in `text`. */
static size_t start(struct activation *activation, char *text) {
    int report[2];
    pid_t guardian;

    if (folder_has(&activation->folder, "stop"))
        return conclude_here(activation, "fenced", "stop", text);
    if (!streams_open(activation))
        return fail_here(activation, "cannot open the files for the output", text);
    if (pipe2(report, O_CLOEXEC) || (guardian = fork()) < 0)
        return fail_here(activation, "cannot fork the guardian", text);
    if (guardian == 0)
        guard(activation, report[1]);
    close(report[1]);
    close(activation->live);
    return read_answer(report[0], text);
}

int command_run(int argc, char **argv) {
    static char text[ANSWER_ROOM];
    enum claim claim;

    (void)argc;
    prctl(PR_SET_DUMPABLE, 0); /* before the key is read */
    block_signals();
    struct activation *activation = new_activation();
    if (!activation)
        return fail("there is no memory for an activation");
    enum presence presence;
    int status = enter(activation, argv, &presence, &claim);
    if (status != EXIT_DONE)
        return status;
    size_t length = claim == WON ? start(activation, text) : 0;
    if (length)
        return write_all(STDOUT_FILENO, text, length) ? EXIT_DONE : EXIT_FAILED;
    observe(&answer, &activation->folder, presence);
    print_answer(&answer);
    return EXIT_DONE;
}
