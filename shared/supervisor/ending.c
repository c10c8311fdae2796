/* Ends everything that an activation left running, and finds out what could not be ended.

   The proof is the kernel's: whoever waits here is the subreaper of all that the harness started, so wait()
   saying ECHILD means that no descendant is left. What the scans of /proc miss, this does not. */
#include "activation.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PIDS_MOST 4194304 /* PID_MAX_LIMIT of 64-bit kernels */
#define FREEZE_ROUNDS 64
#define LONGEST_PAUSE_MS 50

enum { FROZEN = 1, WAS_STOPPED = 2, STRUCK = 4, REFUSED = 8 };

/* What was done to whom, by pid; only the pages of pids that occur are ever resident. */
struct trace {
    uint32_t start, flags;
};

static struct trace *traces;
static struct table table;

static struct trace *trace_of(const struct process *process) {
    static struct trace none;
    uint32_t start = (uint32_t)process->identity.start;

    if (!traces) {
        traces = mmap(NULL, PIDS_MOST * sizeof *traces, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (traces == MAP_FAILED)
            traces = NULL;
    }
    struct trace *trace = traces && process->identity.pid < PIDS_MOST ? &traces[process->identity.pid] : &none;
    if (trace == &none || trace->start != start)
        *trace = (struct trace){.start = start};
    return trace;
}

void reap(struct activation *activation) {
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (pid == activation->worker.pid && !activation->worker_ended) {
            activation->worker_status = status;
            activation->worker_ended = true;
        } else {
            activation->reaped++;
        }
    }
}

static bool no_child_is_left(void) {
    siginfo_t ended;

    return waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) && errno == ECHILD;
}

static bool is_same(struct identity one, struct identity other) {
    return one.pid == other.pid && one.start == other.start;
}

static int by_pid(const void *key, const void *entry) {
    return ((const struct identity *)key)->pid - ((const struct identity *)entry)->pid;
}

static bool was_there_before(const struct activation *activation, struct identity identity) {
    struct identity *found = activation->baseline_count
                                 ? bsearch(&identity, activation->baseline, activation->baseline_count,
                                           sizeof identity, by_pid)
                                 : NULL;

    return found && is_same(*found, identity);
}

static bool is_own(const struct activation *activation, struct identity identity) {
    return identity.pid == getpid() || is_same(identity, activation->guardian) ||
           is_same(identity, activation->supervisor);
}

static void mark_by_marker(const struct activation *activation, pid_t root) {
    for (size_t i = 0; i < table.count; i++) {
        struct process *process = &table.list[i];
        if (process->ours || process->kernel || is_own(activation, process->identity) ||
            was_there_before(activation, process->identity))
            continue;
        if (carries_marker(process->identity.pid, activation->marker))
            process->ours = process->marked = true;
    }
    table_mark(&table, root);
}

/* Who is there now, who of them is ours, and who of ours may live. */
static bool survey(const struct activation *activation, pid_t root, bool by_marker) {
    if (!table_scan(&table))
        return false;
    table_mark(&table, root);
    if (by_marker)
        mark_by_marker(activation, root);
    choose_survivors(&table, activation, root);
    return true;
}

/* A zombie below a survivor is its parent's to reap, and no longer does anything. */
static bool must_go(const struct process *process) {
    struct process *parent;

    if (!process->ours || process->kept)
        return false;
    parent = process->zombie ? table_find(&table, process->parent) : NULL;
    return !(parent && parent->kept);
}

/* Stops all of ours before any is killed: a tree that holds still cannot answer a death with new processes, and
   shows who holds which socket. Those that cannot be stopped are met again by the killing. */
static void freeze(pid_t root, int64_t until_ms) {
    for (int round = 0; round < FREEZE_ROUNDS && monotonic_ms() < until_ms; round++) {
        bool found = false;
        if (!table_scan(&table))
            return;
        table_mark(&table, root);
        for (size_t i = 0; i < table.count; i++) {
            struct process *process = &table.list[i];
            struct trace *trace = trace_of(process);
            if (!process->ours || process->zombie || trace->flags & FROZEN)
                continue;
            trace->flags |= FROZEN | (process->state == 'T' ? WAS_STOPPED : 0);
            signal_process(process->identity, SIGSTOP);
            found = true;
        }
        if (!found)
            return;
    }
}

static void thaw(void) {
    for (size_t i = 0; i < table.count; i++) {
        struct trace *trace = trace_of(&table.list[i]);
        if (table.list[i].kept && trace->flags & FROZEN && !(trace->flags & WAS_STOPPED))
            signal_process(table.list[i].identity, SIGCONT);
    }
}

static bool strike(struct activation *activation, const struct process *process) {
    struct trace *trace = trace_of(process);
    int problem = signal_process(process->identity, SIGKILL);

    if (problem == EPERM && !(trace->flags & REFUSED)) {
        trace->flags |= REFUSED;
        activation->eperm++;
    }
    if (problem || process->zombie || trace->flags & STRUCK)
        return false;
    trace->flags |= STRUCK;
    activation->killed++;
    activation->marker_killed += process->marked;
    list_process(activation, KILLED, process);
    return true;
}

/* How many of ours are still there; `fresh` tells whether one of them was met for the first time. */
static size_t strike_all(struct activation *activation, bool *fresh) {
    size_t there = 0;

    *fresh = false;
    for (size_t i = 0; i < table.count; i++) {
        if (!must_go(&table.list[i]))
            continue;
        there++;
        *fresh |= strike(activation, &table.list[i]);
    }
    return there;
}

static void await_child(int64_t pause) {
    struct timespec limit = {0, pause * 1000000};
    sigset_t child;

    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigtimedwait(&child, NULL, &limit);
}

static bool any_kept(void) {
    for (size_t i = 0; i < table.count; i++)
        if (table.list[i].kept)
            return true;
    return false;
}

/* First below the root, then also by the marker what has left the tree, then once more until both find nothing. */
static bool strike_until_gone(struct activation *activation, pid_t root, int64_t until_ms) {
    int64_t pause = 1;
    bool by_marker = false, fresh = false;

    do {
        reap(activation);
        if (survey(activation, root, by_marker) && strike_all(activation, &fresh) == 0 &&
            (any_kept() || no_child_is_left())) {
            if (by_marker)
                return true;
            by_marker = true;
            continue;
        }
        pause = fresh ? 1 : pause * 2 < LONGEST_PAUSE_MS ? pause * 2 : LONGEST_PAUSE_MS;
        await_child(pause);
    } while (monotonic_ms() < until_ms);
    return false;
}

void list_process(struct activation *activation, enum list list, const struct process *process) {
    char path[32];
    struct stat owner;
    unsigned most = list == SURVIVORS ? SURVIVORS_MOST : LISTED_MOST;

    if (activation->counts[list]++ >= most)
        return;
    snprintf(path, sizeof path, "/proc/%d", (int)process->identity.pid);
    struct listed *listed = &activation->lists[list][activation->counts[list] - 1];
    listed->process = *process;
    listed->uid = stat(path, &owner) == 0 ? owner.st_uid : (uid_t)-1;
}

static bool is_this_program(pid_t pid) {
    char path[32];
    struct stat theirs, own;

    snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    return stat(path, &theirs) == 0 && stat("/proc/self/exe", &own) == 0 && theirs.st_ino == own.st_ino &&
           theirs.st_dev == own.st_dev;
}

/* New since the launch, not ours, and not entered from outside (those have no parent in a container): what the
   harness may have handed to a daemon that was there before. It is told, and left alone. */
static bool is_unaccounted(const struct activation *activation, const struct process *process) {
    return !process->ours && !process->kernel && !process->zombie && process->parent != 0 &&
           !is_own(activation, process->identity) && !was_there_before(activation, process->identity) &&
           !is_this_program(process->identity.pid);
}

static void account(struct activation *activation) {
    for (size_t i = 0; i < table.count; i++) {
        struct process *process = &table.list[i];
        if (process->kept)
            list_process(activation, SURVIVORS, process);
        else if (must_go(process))
            list_process(activation, REMAINING, process);
        else if (is_unaccounted(activation, process))
            list_process(activation, UNACCOUNTED, process);
    }
}

/* `root` is whose descendants are meant: the process that runs this, or -1 where only the marker is left. */
void end_tree(struct activation *activation, pid_t root) {
    int64_t until_ms = monotonic_ms() + activation->request.kill_ms;

    reap(activation);
    freeze(root, until_ms);
    activation->all_gone = strike_until_gone(activation, root, until_ms);
    thaw();
    account(activation);
    activation->tree_known = root > 0;
    activation->tree_empty = root > 0 && no_child_is_left();
}
