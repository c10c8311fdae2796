/* What /proc tells about processes, and how one of them, and no other, is sent a signal. */
#ifndef PADDOCK_PROCESS_H
#define PADDOCK_PROCESS_H

#include "supervisor.h"

#define NONCE_DIGITS 32
#define MARKER_ROOM (sizeof MARKER + 1 + NONCE_DIGITS)

/* A pid alone may belong to another process by the time it is used; with the start time it is one process. */
struct identity {
    pid_t pid;
    unsigned long long start; /* clock ticks after boot */
};

struct process {
    struct identity identity;
    pid_t parent, group;
    char state;
    bool zombie; /* wholly: state Z alone says only that the first thread has ended */
    bool kernel;
    bool ours;   /* below the supervisor, or carrying its marker, or below what carries it */
    bool marked; /* found by the marker alone */
    bool kept;   /* the policy for what is left running lets it live */
    char comm[16];
};

struct table {
    struct process *list; /* by rising pid */
    size_t count, room;
};

bool process_read(pid_t pid, struct process *process);
bool process_is(struct identity identity); /* still there, a zombie included */
struct identity identity_of(pid_t pid);    /* pid 0 where there is none */
bool table_scan(struct table *table);      /* false: no /proc, or no memory */
struct process *table_find(struct table *table, pid_t pid);
void table_mark(struct table *table, pid_t root); /* sets `ours` below `root` and below what is ours already */
bool carries_marker(pid_t pid, const char *marker);
int signal_process(struct identity identity, int signal); /* 0 or an errno; ESRCH when it is gone */

#endif
