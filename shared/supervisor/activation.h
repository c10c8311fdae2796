/* One activation: what is asked for, what happened. It lies in memory that the guardian and the supervisor share,
   so that either can write the receipt. */
#ifndef PADDOCK_ACTIVATION_H
#define PADDOCK_ACTIVATION_H

#include "process.h"

#define ID_ROOM 129
#define KEY_BYTES 32
#define GROUPS_MOST 64
#define PIPE_BYTES 1048576   /* asked for; the kernel may give less to an unprivileged user */
#define LISTED_MOST 64    /* entries of a list in the receipt; the counts beside the lists go on */
#define SURVIVORS_MOST 256

enum policy { DRAIN, KEEP_SERVICES, KEEP_ALL };

/* The frame (frame.c). */
struct request {
    char id[ID_ROOM];
    unsigned char *key; /* NULL: none. In memory of its own, so that a forked harness can wipe its copy */
    int64_t deadline_ms; /* 0: none */
    int64_t grace_ms, kill_ms;
    enum policy policy;
    bool as_user, inherit_environment, no_new_privileges;
    uid_t uid;
    gid_t gid;
    gid_t groups[GROUPS_MOST];
    size_t group_count;
    bool oom_asked;
    int oom_score_adj;
    uint64_t head_bytes, tail_bytes; /* of each output stream */
    const char *working_directory;   /* NULL: where the command was started */
    char **arguments, **environment; /* each ended with NULL */
    size_t argument_count, variable_count;
};

/* One output of the harness: its first bytes go to the file as they come, its last ones into a ring in memory. */
struct stream {
    int pipe, file;      /* -1: closed */
    uint64_t total, head; /* bytes that came; bytes that stand in the file before the gap */
    uint64_t tail;       /* bytes behind the gap, once the stream is finished */
    char *ring;
    uint64_t ringed;     /* bytes that ever went into the ring */
    int error;           /* the first errno of writing to the file */
};

enum list { KILLED, REMAINING, UNACCOUNTED, SURVIVORS, LISTS };

struct listed {
    struct process process;
    uid_t uid;
};

struct activation {
    struct request request;
    struct folder folder;
    uint64_t fence;
    int live; /* holds the lock */
    char nonce[NONCE_DIGITS + 1];
    char marker[MARKER_ROOM];
    struct identity guardian, supervisor, worker;
    int64_t started_ms, ended_ms; /* Unix time; 0: never started */
    bool worker_ended;
    int worker_status;    /* as wait() gives it */
    bool oom_score_set;
    int64_t oom_kills;    /* at the launch; -1: the cgroup does not tell */
    int64_t oom_kill_delta;
    int error;            /* errno of a failed launch */
    char problem[256];
    const char *state, *reason;
    bool tree_known, tree_empty, all_gone, clean;
    unsigned killed, reaped, marker_killed, eperm;
    unsigned counts[LISTS];
    struct listed lists[LISTS][SURVIVORS_MOST];
    struct identity *baseline;
    size_t baseline_count;
    struct stream streams[2];
    int receipt_file;     /* space is set aside in it; -1: there was none */
    bool receipt_written, never_ran;
    char receipt_text[RECEIPT_ROOM], state_text[2048];
};

/* frame.c */
bool frame_read(struct request *request); /* says on stderr what is wrong */

/* launch.c */
bool launch(struct activation *activation, const int standard_streams[3]); /* false: `error` and `problem` say why */

/* output.c */
bool streams_open(struct activation *activation);
void streams_pump(struct activation *activation, int which);
void streams_finish(struct activation *activation);

/* ending.c */
void list_process(struct activation *activation, enum list list, const struct process *process);
void reap(struct activation *activation);
void end_tree(struct activation *activation, pid_t root);

/* baseline.c */
bool baseline_write(struct activation *activation);
bool baseline_read(struct activation *activation);

/* survivors.c */
void choose_survivors(struct table *table, const struct activation *activation, pid_t root);

/* receipt.c */
int64_t count_oom_kills(void); /* -1: the cgroup does not tell */
void receipt_set_aside(struct activation *activation);
bool receipt_write(struct activation *activation);
bool state_write(struct activation *activation, const char *state);

/* supervise.c */
void guard(struct activation *activation, int answer) __attribute__((noreturn));

#endif
