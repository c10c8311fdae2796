/* The two processes that stay: the supervisor, which runs one harness and ends it, and above it the guardian, which
   does the ending when the harness kills its supervisor.

   Both are subreapers, in sessions of their own, without the standard streams of the command that started them, and
   closed to debuggers of the same user. */
#include "activation.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICK_MS 200      /* how soon a stop is seen that came as an uploaded file alone */
#define GRACE_TICK_MS 20
#define SAVE_TRIES 150   /* of a receipt, one a tick: a full disk may get room again */

struct events {
    int signals, deadline; /* file descriptors */
    bool terminated, expired;
};

static void become_daemon(void) {
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_DUMPABLE, 0);
    close_standard_streams();
}

/* The harness's working directory may have to be unmounted or deleted while we live. */
static void leave_directory(void) {
    int ignored = chdir("/");

    (void)ignored;
}

static bool open_events(struct events *events, int64_t deadline_ms) {
    struct itimerspec due = {.it_value = {deadline_ms / 1000, (deadline_ms % 1000) * 1000000}};
    sigset_t awaited;

    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGINT);
    sigaddset(&awaited, SIGHUP);
    *events = (struct events){.signals = signalfd(-1, &awaited, SFD_CLOEXEC | SFD_NONBLOCK),
                              .deadline = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)};
    return events->signals >= 0 && events->deadline >= 0 &&
           timerfd_settime(events->deadline, 0, &due, NULL) == 0; /* all zero, no deadline, leaves it unarmed */
}

/* One turn of whatever goes on: waits for an event, at most `timeout_ms`, and takes in all that have come. */
static void attend(struct activation *activation, struct events *events, int timeout_ms) {
    struct signalfd_siginfo came;
    uint64_t expirations;
    struct pollfd polled[] = {{events->signals, POLLIN, 0},
                              {events->deadline, POLLIN, 0},
                              {activation->streams[0].pipe, POLLIN, 0},
                              {activation->streams[1].pipe, POLLIN, 0}};

    poll(polled, sizeof polled / sizeof polled[0], timeout_ms);
    while (read(events->signals, &came, sizeof came) == sizeof came)
        events->terminated |= came.ssi_signo != SIGCHLD;
    if (read(events->deadline, &expirations, sizeof expirations) == sizeof expirations)
        events->expired = true;
    streams_pump(activation, 0);
    streams_pump(activation, 1);
    reap(activation);
}

/* Until the harness ends or has to end; gives the reason. */
static const char *watch(struct activation *activation, struct events *events) {
    for (;;) {
        attend(activation, events, TICK_MS);
        if (activation->worker_ended)
            return "exit";
        if (events->expired)
            return "deadline";
        if (folder_has(&activation->folder, "stop"))
            return "stop";
        if (events->terminated)
            return "signal";
        if (!folder_has(&activation->folder, "started")) /* never removed by us: somebody deletes the folder */
            return "folder_removed";
    }
}

static bool group_lives(const struct activation *activation) {
    static struct table table;
    bool lives = false;

    if (!activation->worker_ended)
        return true;
    table_scan(&table);
    for (size_t i = 0; i < table.count; i++)
        lives |= table.list[i].group == activation->worker.pid && !table.list[i].zombie;
    return lives;
}

/* TERM to the harness's own group and a grace. The group's number cannot have been taken by others: the harness
   is not reaped yet. CONT, so that one who was stopped can hear it. */
static void terminate(struct activation *activation, struct events *events) {
    int64_t until_ms = monotonic_ms() + activation->request.grace_ms;

    kill(-activation->worker.pid, SIGTERM);
    kill(-activation->worker.pid, SIGCONT);
    while (group_lives(activation) && monotonic_ms() < until_ms)
        attend(activation, events, GRACE_TICK_MS);
}

static void save_receipt(struct activation *activation) {
    for (int tries = 0; !receipt_write(activation) && tries < SAVE_TRIES; tries++)
        pause_ms(TICK_MS);
}

/* Ends what is left, and says how it ended. */
static void conclude(struct activation *activation, const char *state, const char *reason) {
    activation->state = state;
    activation->reason = reason;
    end_tree(activation, getpid());
    streams_finish(activation);
    if (!activation->ended_ms)
        activation->ended_ms = unix_ms();
    int64_t oom_kills = count_oom_kills();
    activation->oom_kill_delta = oom_kills < 0 || activation->oom_kills < 0 ? -1 : oom_kills - activation->oom_kills;
    activation->clean = activation->all_gone && strcmp(state, "lost");
}

static bool refuse(struct activation *activation, const char *problem) {
    activation->error = errno ? errno : EIO;
    snprintf(activation->problem, sizeof activation->problem, "%s", problem);
    return false;
}

static int open_stdin(const struct activation *activation) {
    int fd = openat(activation->folder.fd, "stdin", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    int empty[2];

    if (fd >= 0 || errno != ENOENT || pipe2(empty, O_CLOEXEC))
        return fd;
    close(empty[1]); /* no need for a /dev/null in the image */
    return empty[0];
}

/* One output's pipe: ours does not block, the harness's does, and belongs to it, so that it may open /dev/stdout. */
static int open_pipe(const struct activation *activation, struct stream *stream) {
    int ends[2];

    if (pipe2(ends, O_CLOEXEC))
        return -1;
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    fcntl(ends[0], F_SETPIPE_SZ, PIPE_BYTES);
    if (activation->request.as_user && fchown(ends[1], activation->request.uid, activation->request.gid) && errno != EPERM)
        return -1;
    stream->pipe = ends[0];
    return ends[1];
}

static bool start_harness(struct activation *activation) {
    int standard[3] = {open_stdin(activation), open_pipe(activation, &activation->streams[0]),
                       open_pipe(activation, &activation->streams[1])};

    if (standard[0] < 0 || standard[1] < 0 || standard[2] < 0)
        return refuse(activation, "cannot open the harness's standard streams");
    activation->started_ms = unix_ms();
    bool launched = launch(activation, standard);
    for (int i = 0; i < 3; i++)
        close(standard[i]);
    return launched;
}

/* TERM may have come before there was a handler: it was blocked from the first instruction on, and is pending. */
static bool stop_came_first(const struct activation *activation) {
    sigset_t pending;

    return folder_has((struct folder *)&activation->folder, "stop") ||
           (sigpending(&pending) == 0 && sigismember(&pending, SIGTERM) == 1);
}

static void tell(const struct activation *activation, int answer, const char *state) {
    print_lines(answer, state, true, activation->fence, activation->state_text, activation->receipt_text);
}

/* Up to the running harness, or to the receipt that says why there is none. */
static bool begin(struct activation *activation, struct events *events) {
    activation->oom_kills = count_oom_kills();
    receipt_set_aside(activation);
    if (activation->error) /* of the guardian's preparations */
        return false;
    if (!open_events(events, activation->request.deadline_ms))
        return refuse(activation, "cannot await signals and a deadline");
    if (!state_write(activation, "starting"))
        return refuse(activation, "cannot write state.json");
    if (stop_came_first(activation)) {
        conclude(activation, "fenced", "stop");
        return false;
    }
    if (!start_harness(activation))
        return false;
    state_write(activation, "running");
    return true;
}

/* Stays for the survivors of a policy that keeps some: empties their pipes, so that they never wait or die of
   writing, and reaps them. The activation is over: its folder and lock are let go. Signals stay blocked: a stop
   may have sent one more before it saw the receipt. It ends with the last survivor. */
static void take_care(struct activation *activation) {
    struct pollfd pipes[] = {{activation->streams[0].pipe, POLLIN, 0}, {activation->streams[1].pipe, POLLIN, 0}};
    static char discarded[65536];

    if (getppid() == activation->guardian.pid)
        kill(activation->guardian.pid, SIGKILL);
    close(activation->live);
    close(activation->folder.fd);
    for (bool any = true; any;) {
        poll(pipes, 2, TICK_MS);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        any = waitpid(-1, NULL, WNOHANG) == 0;
        for (int i = 0; i < 2; i++) {
            if (pipes[i].fd >= 0 && read(pipes[i].fd, discarded, sizeof discarded) == 0)
                pipes[i].fd = -1;
            any |= pipes[i].fd >= 0;
        }
    }
}

/* From the running harness to its receipt. */
static void see_through(struct activation *activation, struct events *events) {
    const char *reason = watch(activation, events);
    bool natural = !strcmp(reason, "exit");

    if (!natural) {
        state_write(activation, "stopping");
        terminate(activation, events);
    }
    conclude(activation, natural ? "exited" : !strcmp(reason, "deadline") ? "deadline" : "stopped", reason);
    save_receipt(activation);
}

static void supervise(struct activation *activation, int answer) {
    struct events events;

    become_daemon();
    activation->supervisor = identity_of(getpid());
    if (begin(activation, &events)) {
        leave_directory();
        tell(activation, answer, "running");
        close(answer);
        see_through(activation, &events);
    } else {
        if (!activation->state)
            conclude(activation, "launch_failed", "launch");
        activation->never_ran = true;
        receipt_write(activation); /* once: the answer tells it, too */
        tell(activation, answer, activation->state);
    }
    if (activation->counts[SURVIVORS])
        take_care(activation);
    _exit(activation->clean && activation->receipt_written ? EXIT_DONE : EXIT_UNPROVEN);
}

/* Until the supervisor has ended. One that the harness has stopped goes on at once: else no deadline would come. */
static void watch_over(pid_t supervisor) {
    int status;

    for (;;) {
        pid_t pid = waitpid(supervisor, &status, WUNTRACED);
        if (pid == supervisor && WIFSTOPPED(status))
            kill(supervisor, SIGCONT);
        else if (pid == supervisor || errno != EINTR)
            return;
    }
}

void guard(struct activation *activation, int answer) {
    become_daemon();
    activation->guardian = identity_of(getpid());
    if (!baseline_write(activation))
        refuse(activation, "cannot list the processes in /proc, or write the list");
    pid_t supervisor = fork();
    if (supervisor == 0)
        supervise(activation, answer);
    close(answer);
    leave_directory();
    if (supervisor > 0)
        watch_over(supervisor);
    else
        refuse(activation, "cannot fork the supervisor");
    if (activation->receipt_written || activation->never_ran)
        _exit(EXIT_DONE);
    activation->request.policy = DRAIN; /* nobody grades what is left of this */
    conclude(activation, supervisor > 0 ? "lost" : "launch_failed", supervisor > 0 ? "supervisor_killed" : "launch");
    save_receipt(activation);
    _exit(EXIT_UNPROVEN);
}
