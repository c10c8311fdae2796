/* The declared policy for what a harness leaves running: everything goes, services live on, or all live on.

   The harness's own process group always goes. A service is a detached process that holds a listening socket
   (TCP or Unix); its detached ancestors and its own descendants live with it, since a server without its
   helpers is none. Not seen as a service: what listens on UDP only, or in a network namespace of its own, or
   whose descriptors this user may not look at. */
#include "activation.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SOCKETS_MOST 4096
#define TCP_LISTEN 0x0A
#define ACCEPTS 0x10000 /* __SO_ACCEPTCON */

static unsigned long listening[SOCKETS_MOST]; /* inodes */
static size_t listening_count;

static void add_listening(const char *path, bool (*parse)(const char *line, unsigned long *inode)) {
    char line[512];
    unsigned long inode;
    FILE *lines = fopen(path, "re");

    while (lines && listening_count < SOCKETS_MOST && fgets(line, sizeof line, lines))
        if (parse(line, &inode))
            listening[listening_count++] = inode;
    if (lines)
        fclose(lines);
}

static bool parse_tcp(const char *line, unsigned long *inode) {
    unsigned state;

    return sscanf(line, " %*d: %*s %*s %x %*s %*s %*s %*d %*d %lu", &state, inode) == 2 && state == TCP_LISTEN;
}

static bool parse_unix(const char *line, unsigned long *inode) {
    unsigned flags;

    return sscanf(line, "%*[^:]: %*x %*x %x %*x %*x %lu", &flags, inode) == 2 && flags & ACCEPTS;
}

static int by_value(const void *one, const void *other) {
    unsigned long a = *(const unsigned long *)one, b = *(const unsigned long *)other;

    return (a > b) - (a < b);
}

static bool holds_listening_socket(pid_t pid) {
    char path[32], target[64];
    unsigned long inode;
    bool found = false;
    struct dirent *entry;

    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *entries = opendir(path);
    while (entries && !found && (entry = readdir(entries))) {
        ssize_t length = readlinkat(dirfd(entries), entry->d_name, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        found = sscanf(target, "socket:[%lu]", &inode) == 1 &&
                bsearch(&inode, listening, listening_count, sizeof inode, by_value);
    }
    if (entries)
        closedir(entries);
    return found;
}

static bool may_live(const struct process *process, pid_t harness_group) {
    return process->ours && !process->zombie && process->group != harness_group;
}

static void keep_ancestors(struct table *table, struct process *service, pid_t harness_group, pid_t root) {
    struct process *at = service;

    while (at->parent != root && (at = table_find(table, at->parent)) && at->ours)
        if (may_live(at, harness_group))
            at->kept = true;
}

/* `kept` is set on services only when this begins, and a child's pid is mostly above its parent's. */
static void keep_descendants(struct table *table, pid_t harness_group) {
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < table->count; i++) {
            struct process *process = &table->list[i], *parent;
            if (process->kept || !may_live(process, harness_group))
                continue;
            parent = table_find(table, process->parent);
            if (parent && parent->kept)
                process->kept = changed = true;
        }
    }
}

static void keep_services(struct table *table, pid_t harness_group, pid_t root) {
    listening_count = 0;
    add_listening("/proc/net/tcp", parse_tcp);
    add_listening("/proc/net/tcp6", parse_tcp);
    add_listening("/proc/net/unix", parse_unix);
    qsort(listening, listening_count, sizeof listening[0], by_value);
    for (size_t i = 0; i < table->count; i++) {
        struct process *process = &table->list[i];
        process->kept = may_live(process, harness_group) && holds_listening_socket(process->identity.pid);
    }
    keep_descendants(table, harness_group);
    for (size_t i = 0; i < table->count; i++)
        if (table->list[i].kept)
            keep_ancestors(table, &table->list[i], harness_group, root);
}

void choose_survivors(struct table *table, const struct activation *activation, pid_t root) {
    pid_t harness_group = activation->worker.pid;

    if (activation->request.policy == KEEP_SERVICES)
        keep_services(table, harness_group, root);
    for (size_t i = 0; activation->request.policy == KEEP_ALL && i < table->count; i++)
        table->list[i].kept = may_live(&table->list[i], harness_group);
}
