/* What the files of the supervisor share. main.c lists the commands and what they answer. */
#ifndef PADDOCK_SUPERVISOR_H
#define PADDOCK_SUPERVISOR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum exit_status {
    EXIT_DONE = 0,     /* what was asked for is done; of stop, wait, sweep, verify: and the cleanup is proven */
    EXIT_FAILED = 1,   /* it did not work; a sentence on stderr says why */
    EXIT_USAGE = 2,    /* the command line is wrong */
    EXIT_FENCED = 3,   /* a caller with a higher fence number was here before */
    EXIT_UNPROVEN = 4, /* an answer stands on stdout, and it is no proof of a cleanup */
    EXIT_TAKEN = 5,    /* relay: something listens on the port already */
};

#define MARKER "PADDOCK_SUPERVISOR"
#define RECEIPT_ROOM 131072 /* bytes that are set aside on the disk for a receipt, and its largest size */

/* ---- text.c: sentences for people, numbers, JSON, time ---- */

struct text {
    char *at;
    size_t length, room;
    bool full; /* something did not fit and was left out */
};

void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
void text_add_string(struct text *text, const char *string); /* as a JSON string with its quotes */
int fail(const char *format, ...) __attribute__((format(printf, 1, 2))); /* gives EXIT_FAILED */
bool parse_number(const char *digits, uint64_t limit, uint64_t *number);
void occupy_standard_streams(void);
void close_standard_streams(void);
int64_t monotonic_ms(void);
int64_t unix_ms(void);
void pause_ms(int64_t duration_ms);
bool parse_owner(const char *words, uid_t *uid, gid_t *gid); /* UID:GID */
bool write_all(int fd, const void *bytes, size_t length);

/* ---- folder.c: the folder of one activation ---- */

struct folder {
    const char *path;
    int fd;
};

enum presence { FOLDER_ABSENT, FOLDER_CLOSED, FOLDER_OPEN };

enum presence folder_open(struct folder *folder, const char *path, bool create); /* errno where it is absent */
int fence_enter(struct folder *folder, uint64_t fence, int *lock); /* an exit status; `lock` ends with its close() */
uint64_t fence_read(struct folder *folder);
bool folder_has(struct folder *folder, const char *name);
bool folder_claim(struct folder *folder, const char *name); /* true for the one caller who made the file */
ssize_t folder_read(struct folder *folder, const char *name, char *buffer, size_t room);
bool folder_write(struct folder *folder, const char *name, const char *bytes, size_t length);
bool lock_within(int fd, int64_t wait_ms);
bool folder_remove(struct folder *folder);
int remove_below(int fd); /* empties a directory; 0 or -1 with errno */
bool make_parents(char *path);

/* ---- answer.c: how an activation stands ---- */

struct answer {
    char state[16];
    bool live, clean;
    uint64_t fence;
    char detail[4096];          /* state.json, or "null" */
    char receipt[RECEIPT_ROOM]; /* receipt.json, or "null" */
};

void observe(struct answer *answer, struct folder *folder, enum presence presence);
void print_lines(int fd, const char *state, bool live, uint64_t fence, const char *detail, const char *receipt);
int print_answer(const struct answer *answer);
bool folder_is_live(struct folder *folder);
bool folder_is_released(struct folder *folder);
void await_end(struct folder *folder, struct answer *answer, int64_t wait_ms);

/* commands.c: opens the folder of argv[1] and passes its fence, argv[2]; an absent folder is EXIT_DONE, too. */
int folder_enter(char **argv, bool create, struct folder *folder, enum presence *presence, int *lock);

/* ---- the commands, each in the file of its concern; argv[0] is the command's own name ---- */

int command_prepare(int argc, char **argv);
int command_run(int argc, char **argv);
int command_wait(int argc, char **argv);
int command_stop(int argc, char **argv);
int command_sweep(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_status(int argc, char **argv);
int command_remove(int argc, char **argv);
int command_put(int argc, char **argv);
int command_get(int argc, char **argv);
int command_unpack(int argc, char **argv);
int command_pack(int argc, char **argv);
int command_relay(int argc, char **argv);
int command_once(int argc, char **argv);
int command_keep(int argc, char **argv);
int command_detach(int argc, char **argv);
int command_reach(int argc, char **argv);
int command_check(int argc, char **argv);
int command_mkdir(int argc, char **argv);
int command_init(int argc, char **argv);

#endif
