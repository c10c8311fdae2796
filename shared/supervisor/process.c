/* Reads /proc and signals single processes. See process.h. */
#include "process.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_pidfd_send_signal /* the same on every architecture */
#define SYS_pidfd_send_signal 424
#define SYS_pidfd_open 434
#endif
#define PF_KTHREAD 0x00200000

static ssize_t read_proc(pid_t pid, const char *name, char *buffer, size_t room) {
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, buffer, room - 1);
    close(fd);
    if (length >= 0)
        buffer[length] = '\0';
    return length;
}

bool process_read(pid_t pid, struct process *process) {
    char line[1024], *name, *rest;
    unsigned flags;
    int parent, group, threads;

    *process = (struct process){.identity.pid = pid};
    if (read_proc(pid, "stat", line, sizeof line) <= 0)
        return false;
    name = strchr(line, '(');
    rest = strrchr(line, ')'); /* the last one: a name may hold brackets */
    if (!name || !rest)
        return false;
    *rest = '\0';
    snprintf(process->comm, sizeof process->comm, "%s", name + 1);
    if (sscanf(rest + 2, "%c %d %d %*d %*d %*d %u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d %*d %llu",
               &process->state, &parent, &group, &flags, &threads, &process->identity.start) != 6)
        return false;
    process->zombie = process->state == 'Z' && threads <= 1;
    process->parent = parent;
    process->group = group;
    process->kernel = flags & PF_KTHREAD;
    return true;
}

struct identity identity_of(pid_t pid) {
    struct process process;

    return process_read(pid, &process) ? process.identity : (struct identity){0};
}

bool process_is(struct identity identity) {
    return identity.pid > 0 && identity_of(identity.pid).start == identity.start;
}

/* Pages straight from the kernel: what is not used is not resident, and a grown table is moved, not copied. */
static bool table_grow(struct table *table) {
    size_t room = table->room ? table->room * 2 : 512;
    size_t bytes = room * sizeof *table->list;
    void *list = table->list ? mremap(table->list, table->room * sizeof *table->list, bytes, MREMAP_MAYMOVE)
                             : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (list == MAP_FAILED)
        return false;
    table->list = list;
    table->room = room;
    return true;
}

/* The kernel lists by rising pid, and never leaves out a process that exists throughout. */
bool table_scan(struct table *table) {
    DIR *entries = opendir("/proc");
    struct dirent *entry;

    table->count = 0;
    if (!entries)
        return false;
    while ((entry = readdir(entries))) {
        if (!isdigit((unsigned char)entry->d_name[0]))
            continue;
        if (table->count == table->room && !table_grow(table)) {
            closedir(entries);
            return false;
        }
        if (process_read(atoi(entry->d_name), &table->list[table->count]))
            table->count++;
    }
    closedir(entries);
    return table->count > 0; /* this process at least, else /proc is not what it should be */
}

struct process *table_find(struct table *table, pid_t pid) {
    size_t low = 0, high = table->count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->list[middle].identity.pid < pid)
            low = middle + 1;
        else
            high = middle;
    }
    return low < table->count && table->list[low].identity.pid == pid ? &table->list[low] : NULL;
}

/* Until nothing changes: a child's pid is mostly above its parent's, so one pass and one more do. */
void table_mark(struct table *table, pid_t root) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < table->count; i++) {
            struct process *process = &table->list[i], *parent;
            if (process->ours || process->identity.pid == root)
                continue;
            parent = process->parent == root ? NULL : table_find(table, process->parent);
            if (process->parent != root && !(parent && parent->ours))
                continue;
            process->ours = changed = true;
        }
    }
}

/* One variable of the environment that the program was started with is exactly `marker`. */
bool carries_marker(pid_t pid, const char *marker) {
    static char block[16384];
    char path[64];
    size_t length = strlen(marker) + 1, kept = 0;
    ssize_t got;
    bool found = false;

    snprintf(path, sizeof path, "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    block[kept++] = '\0'; /* so that the first variable, too, stands behind a zero byte */
    while (!found && (got = read(fd, block + kept, sizeof block - kept)) > 0) {
        size_t filled = kept + (size_t)got;
        for (char *at = block; !found && (at = memchr(at, '\0', filled - (size_t)(at - block))); at++)
            found = filled - (size_t)(at - block) > length && !memcmp(at + 1, marker, length);
        kept = filled < length + 1 ? filled : length + 1; /* the marker may stand across two blocks */
        memmove(block, block + filled - kept, kept);
    }
    close(fd);
    return found;
}

/* By pidfd the kernel itself sees to it that the signal reaches this process. Where pidfds are blocked the
   pid is used after one more look at the start time, and a reuse within those microseconds is possible. */
int signal_process(struct identity identity, int signal) {
    if (identity.pid <= 1)
        return ESRCH;
    int fd = (int)syscall(SYS_pidfd_open, identity.pid, 0);
    int problem = errno;
    bool same = process_is(identity);

    if (fd < 0 && problem == ESRCH)
        return ESRCH;
    if (fd >= 0) {
        problem = !same ? ESRCH : syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0) == 0 ? 0 : errno;
        close(fd);
        if (problem != ENOSYS && problem != EPERM)
            return problem;
    }
    if (!same)
        return ESRCH;
    return kill(identity.pid, signal) == 0 ? 0 : errno;
}
