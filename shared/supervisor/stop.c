/* `stop`, `sweep` and `verify`: end an activation from outside, and look again afterwards. Nothing here forks, so a
   full pids limit cannot hinder it. */
#include "activation.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define URGE_MS 500 /* how often a supervisor that has not ended is told again */
#define SWEEP_MS 10000

static struct answer answer; /* large, and there is one per process */

/* Root must not be led by a forged state.json to signal others: what it signals has to be this very program. For
   other users the kernel decides, and hides a supervisor's program from them. */
static bool may_signal(struct identity identity) {
    char path[32];
    struct stat theirs, own;

    if (geteuid() != 0)
        return true;
    snprintf(path, sizeof path, "/proc/%d/exe", (int)identity.pid);
    return stat(path, &theirs) == 0 && stat("/proc/self/exe", &own) == 0 && theirs.st_ino == own.st_ino &&
           theirs.st_dev == own.st_dev;
}

/* One of the two that stay, as state.json names it; pid 0 where it names none. */
static struct identity named_process(const char *name) {
    char pattern[32];
    struct identity identity;

    snprintf(pattern, sizeof pattern, "\"%s\":{", name);
    const char *found = strstr(answer.detail, pattern);
    if (found && sscanf(found + strlen(pattern), "\"pid\":%d,\"start\":%llu", &identity.pid, &identity.start) == 2 &&
        process_is(identity) && may_signal(identity))
        return identity;
    return (struct identity){0};
}

/* The file alone would be seen, too, but only at the supervisor's next look. Both are made to go on first: the
   harness may have stopped them. */
static void urge(void) {
    struct identity supervisor = named_process("supervisor");

    signal_process(named_process("guardian"), SIGCONT);
    signal_process(supervisor, SIGCONT);
    signal_process(supervisor, SIGTERM);
}

/* The lock tells, and the processes, too: a harness may have deleted the lock's file. */
static bool may_still_end(void) {
    return !strcmp(answer.receipt, "null") &&
           (answer.live || named_process("supervisor").pid || named_process("guardian").pid);
}

static void stop_running(struct folder *folder, int64_t wait_ms) {
    int64_t until_ms = monotonic_ms() + wait_ms, left_ms = wait_ms;

    observe(&answer, folder, FOLDER_OPEN);
    for (; may_still_end() && left_ms >= 0; left_ms = until_ms - monotonic_ms()) {
        urge();
        if (!answer.live)
            pause_ms(1);
        await_end(folder, &answer, left_ms < URGE_MS ? left_ms : URGE_MS);
        if (left_ms == 0)
            return;
    }
}

static struct activation *new_ending(struct folder *folder) {
    struct activation *activation =
        mmap(NULL, sizeof *activation, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (activation == MAP_FAILED)
        return NULL;
    activation->folder = *folder;
    activation->receipt_file = -1;
    activation->oom_kill_delta = -1;
    activation->request.kill_ms = SWEEP_MS;
    return activation;
}

/* Printed from memory: the answer does not depend on whether it could be saved. */
static int conclude_from_outside(struct activation *activation, struct folder *folder) {
    receipt_write(activation);
    observe(&answer, folder, FOLDER_OPEN);
    print_lines(STDOUT_FILENO, activation->state, answer.live, answer.fence, answer.detail, activation->receipt_text);
    return activation->clean ? EXIT_DONE : EXIT_UNPROVEN;
}

static int fence_off(struct folder *folder) {
    struct activation *activation = new_ending(folder);

    if (!activation)
        return fail("there is no memory for a receipt");
    activation->state = "fenced";
    activation->reason = "stop";
    activation->clean = true;
    return conclude_from_outside(activation, folder);
}

/* Only the marker is left to go by: nobody here is the parent of what the dead supervisor had started. */
static int sweep(struct folder *folder) {
    struct activation *activation = new_ending(folder);

    if (!activation)
        return fail("there is no memory for a sweep");
    activation->state = "lost";
    activation->reason = "sweep";
    if (baseline_read(activation))
        end_tree(activation, -1);
    if (strcmp(answer.receipt, "null") == 0)
        return conclude_from_outside(activation, folder);
    print_answer(&answer);
    return activation->all_gone && answer.clean ? EXIT_DONE : EXIT_UNPROVEN;
}

int command_stop(int argc, char **argv) {
    struct folder folder;
    enum presence presence;
    uint64_t wait_ms;
    int lock;

    if (!parse_number(argv[3], INT32_MAX, &wait_ms) || (argc > 4 && strcmp(argv[4], "sweep")))
        return EXIT_USAGE;
    int status = folder_enter(argv, true, &folder, &presence, &lock);
    if (status != EXIT_DONE)
        return status;
    observe(&answer, &folder, presence);
    if (presence != FOLDER_OPEN || strcmp(answer.receipt, "null"))
        return print_answer(&answer);
    if (!folder_claim(&folder, "stop") && errno != EEXIST)
        fail("cannot leave a tombstone in %s, so only a running supervisor is told: %s", folder.path, strerror(errno));
    close(lock);
    if (!folder_has(&folder, "started") && !strcmp(answer.detail, "null"))
        return folder_has(&folder, "stop") ? fence_off(&folder) : EXIT_FAILED;
    stop_running(&folder, (int64_t)wait_ms);
    if (argc > 4 && !may_still_end() && !strcmp(answer.receipt, "null"))
        return sweep(&folder);
    return print_answer(&answer);
}

int command_sweep(int argc, char **argv) {
    struct folder folder;
    enum presence presence;
    int lock;
    int status = folder_enter(argv, false, &folder, &presence, &lock);

    (void)argc;
    if (status != EXIT_DONE)
        return status;
    observe(&answer, &folder, presence);
    bool ended = !strcmp(answer.state, "lost") || strcmp(answer.receipt, "null");
    if (presence != FOLDER_OPEN || !ended || !folder_is_released(&folder) || may_still_end())
        return print_answer(&answer);
    return sweep(&folder);
}

/* The receipt's survivors that are still there may stay, and so may what they have started since. */
static void keep_survivors(struct table *table) {
    const char *at = strstr(answer.receipt, "\"survivors\":["), *end = strstr(answer.receipt, ",\"kills_count\":");
    struct identity identity;

    while (at && end && (at = strstr(at, "{\"pid\":")) && at < end) {
        struct process *process;
        if (sscanf(at, "{\"pid\":%d,\"start\":%llu", &identity.pid, &identity.start) == 2 &&
            (process = table_find(table, identity.pid)) && process->identity.start == identity.start)
            process->kept = process->ours = true;
        at++;
    }
}

/* What carries the marker and is neither a survivor nor below one, as a line of JSON; gives how many there are. */
static size_t print_left(struct table *table, const struct activation *activation) {
    static char room[RECEIPT_ROOM];
    struct text text = {.at = room, .room = sizeof room - 4};
    size_t left = 0;

    text_add(&text, "[");
    for (size_t i = 0; i < table->count; i++) {
        struct process *process = &table->list[i];
        if (process->ours || !carries_marker(process->identity.pid, activation->marker))
            continue;
        text_add(&text, "%s{\"pid\":%d,\"start\":%llu,\"comm\":", left++ && left < LISTED_MOST ? "," : "",
                 (int)process->identity.pid, process->identity.start);
        text_add_string(&text, process->comm);
        text_add(&text, "}");
    }
    text_add(&text, "]\n");
    write_all(STDOUT_FILENO, text.at, text.length);
    return left;
}

int command_verify(int argc, char **argv) {
    struct folder folder;
    struct table table = {0};
    enum presence presence;
    int lock;
    int status = folder_enter(argv, false, &folder, &presence, &lock);

    (void)argc;
    if (status != EXIT_DONE)
        return status;
    observe(&answer, &folder, presence);
    print_answer(&answer);
    if (!strcmp(answer.state, "fenced"))
        return write_all(STDOUT_FILENO, "[]\n", 3) && answer.clean ? EXIT_DONE : EXIT_UNPROVEN;
    struct activation *activation = presence == FOLDER_OPEN ? new_ending(&folder) : NULL;
    if (!activation || !baseline_read(activation) || !table_scan(&table)) {
        write_all(STDOUT_FILENO, "null\n", 5);
        return EXIT_UNPROVEN;
    }
    keep_survivors(&table);
    table_mark(&table, -1);
    size_t left = print_left(&table, activation);
    return answer.clean && left == 0 ? EXIT_DONE : EXIT_UNPROVEN;
}
