/* How an activation stands, read from its folder, and how that is told. It changes nothing. */
#include "supervisor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#define LONGEST_PAUSE_MS 20
#define RELEASE_WAIT_MS 5000

/* The lock belongs to the supervisor and its guardian; the kernel frees it when both have ended. */
bool folder_is_live(struct folder *folder) {
    int fd = openat(folder->fd, "live", O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);

    if (fd < 0)
        return false;
    bool free = flock(fd, LOCK_SH | LOCK_NB) == 0;
    close(fd);
    return !free;
}

/* One line of JSON as it stands in the file, or `null`: what is half written or damaged is as good as absent. */
static void read_line(struct folder *folder, const char *name, char *line, size_t room) {
    ssize_t length = folder_read(folder, name, line, room);

    while (length > 0 && line[length - 1] == '\n')
        line[--length] = '\0';
    if (length < 2 || line[0] != '{' || line[length - 1] != '}' || strchr(line, '\n'))
        snprintf(line, room, "null");
}

static bool read_receipt(struct answer *answer) {
    char confirmed[8] = "";

    if (sscanf(answer->receipt, "{\"v\":1,\"state\":\"%15[a-z_]\",\"cleanup_confirmed\":%7[a-z]", answer->state,
               confirmed) != 2)
        return false;
    answer->clean = !strcmp(confirmed, "true");
    return true;
}

void observe(struct answer *answer, struct folder *folder, enum presence presence) {
    *answer = (struct answer){.detail = "null", .receipt = "null"};
    strcpy(answer->state, presence == FOLDER_CLOSED ? "closed" : "absent");
    if (presence != FOLDER_OPEN)
        return;
    /* In this order: a supervisor that ends meanwhile has left its receipt before it frees the lock. */
    bool started = folder_has(folder, "started");
    read_line(folder, "state.json", answer->detail, sizeof answer->detail);
    started |= strcmp(answer->detail, "null") != 0; /* where a harness deletes what it finds */
    answer->live = folder_is_live(folder);
    read_line(folder, "receipt.json", answer->receipt, sizeof answer->receipt);
    answer->fence = fence_read(folder);
    if (read_receipt(answer))
        return;
    if (started && !answer->live)
        strcpy(answer->state, "lost");
    else if (!started)
        strcpy(answer->state, folder_has(folder, "stop") ? "fenced" : "absent");
    else if (sscanf(answer->detail, "{\"v\":1,\"state\":\"%15[a-z_]\"", answer->state) != 1)
        strcpy(answer->state, "starting");
}

void print_lines(int fd, const char *state, bool live, uint64_t fence, const char *detail, const char *receipt) {
    const char *lines[] = {detail, receipt};

    dprintf(fd, "{\"v\":1,\"state\":\"%s\",\"live\":%s,\"fence\":%" PRIu64 "}\n", state, live ? "true" : "false", fence);
    for (int i = 0; i < 2; i++) {
        size_t length = strcspn(lines[i], "\n");
        write_all(fd, length ? lines[i] : "null", length ? length : 4);
        write_all(fd, "\n", 1);
    }
}

int print_answer(const struct answer *answer) {
    print_lines(STDOUT_FILENO, answer->state, answer->live, answer->fence, answer->detail, answer->receipt);
    return answer->clean ? EXIT_DONE : EXIT_UNPROVEN;
}

static bool has_ended(const struct answer *answer) {
    return strcmp(answer->receipt, "null") || !answer->live;
}

void await_end(struct folder *folder, struct answer *answer, int64_t wait_ms) {
    int64_t until_ms = monotonic_ms() + wait_ms, pause = 1;

    for (observe(answer, folder, FOLDER_OPEN); !has_ended(answer); observe(answer, folder, FOLDER_OPEN)) {
        int64_t left_ms = until_ms - monotonic_ms();
        if (left_ms <= 0)
            return;
        pause_ms(pause < left_ms ? pause : left_ms);
        pause = pause < LONGEST_PAUSE_MS ? pause + 1 : LONGEST_PAUSE_MS;
    }
}

/* Behind its receipt a supervisor has only to exit. */
bool folder_is_released(struct folder *folder) {
    int64_t until_ms = monotonic_ms() + (folder_has(folder, "receipt.json") ? RELEASE_WAIT_MS : 0);

    while (folder_is_live(folder)) {
        if (monotonic_ms() >= until_ms)
            return false;
        pause_ms(1);
    }
    return true;
}
