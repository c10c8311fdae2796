/* Ending a process tree with the kernel's word for it. */
#include "box.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

struct process {
    pid_t pid, parent;
    unsigned long long start;
    int ours;
};

struct table {
    struct process *rows;
    size_t count, room;
};

/* Parent and start time from /proc/PID/stat; the name in it may hold blanks and brackets. */
static int read_process(pid_t pid, struct process *into) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return -1;
    text[got] = 0;
    char *rest = strrchr(text, ')');
    int parent;
    unsigned long long start;
    const char *fields = " %*c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
    if (!rest || sscanf(rest + 1, fields, &parent, &start) != 2) return -1;
    *into = (struct process){pid, parent, start, 0};
    return 0;
}

void boot_name(char *into, size_t size) {
    char id[64] = "?";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t got = read(fd, id, 36);
        id[got > 0 ? got : 0] = 0;
        close(fd);
    }
    struct process first = {0};
    read_process(1, &first);
    snprintf(into, size, "%s.%llu", id, first.start);
}

static int read_all(struct table *table) {
    DIR *proc = opendir("/proc");
    if (!proc) return -1;
    table->count = 0;
    struct dirent *entry;
    while ((entry = readdir(proc))) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        if (table->count == table->room) {
            size_t room = table->room ? 2 * table->room : 256;
            struct process *rows = realloc(table->rows, room * sizeof *rows);
            if (!rows) break;
            table->rows = rows, table->room = room;
        }
        if (read_process(atoi(entry->d_name), &table->rows[table->count]) == 0) table->count++;
    }
    closedir(proc);
    return 0;
}

static int by_pid(const void *one, const void *other) {
    pid_t a = ((const struct process *)one)->pid, b = ((const struct process *)other)->pid;
    return (a > b) - (a < b);
}

static void mark_descendants(struct table *table, pid_t root) {
    qsort(table->rows, table->count, sizeof *table->rows, by_pid);
    for (int changed = 1; changed;) {
        changed = 0;
        for (size_t i = 0; i < table->count; i++) {
            struct process *row = &table->rows[i], key = {.pid = row->parent};
            if (row->ours || row->pid == root) continue;
            struct process *parent = bsearch(&key, table->rows, table->count, sizeof key, by_pid);
            if (row->parent == root || (parent && parent->ours)) row->ours = changed = 1;
        }
    }
}

/* Signals a process only while it is the one that was seen: pids are used again. */
static void signal_process(const struct process *seen, int signal) {
    struct process now;
    int fd = (int)syscall(SYS_pidfd_open, seen->pid, 0), no_pidfd = fd < 0 && errno != ESRCH;
    int same = read_process(seen->pid, &now) == 0 && now.start == seen->start;
    if (same && no_pidfd) kill(seen->pid, signal);
    if (fd < 0) return;
    if (same && syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0) < 0 && errno != ESRCH) kill(seen->pid, signal);
    close(fd);
}

static void signal_descendants(struct table *table, int signal) {
    if (read_all(table) < 0) return;
    mark_descendants(table, getpid());
    for (size_t i = 0; i < table->count; i++)
        if (table->rows[i].ours) signal_process(&table->rows[i], signal);
}

/* True when the kernel knows no child any more. */
static bool reap_all(void (*ended)(pid_t, int)) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid > 0) {
            if (ended) ended(pid, status);
        } else if (pid == 0) {
            return false;
        } else if (errno != EINTR) {
            return errno == ECHILD;
        }
    }
}

bool kill_descendants(int64_t budget_ms, void (*ended)(pid_t, int)) {
    struct table table = {0};
    int64_t end = monotonic_ms() + budget_ms;
    bool gone;
    while (!(gone = reap_all(ended)) && monotonic_ms() < end) {
        signal_descendants(&table, SIGSTOP); /* first, so that a storm of forks stands still */
        signal_descendants(&table, SIGKILL);
        pause_ms(1);
    }
    free(table.rows);
    return gone;
}
