/* The receipt, state.json and what the kernel tells for them. protocol.py reads what is written here. */
#include "activation.h"
#include "sha256.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define TEMPORARY "receipt.tmp"

static int64_t oom_kills_in(const char *path) {
    char text[4096];
    int64_t count = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = '\0';
    char *line = strstr(text, "oom_kill ");
    if (line)
        sscanf(line, "oom_kill %" SCNd64, &count);
    return count;
}

/* Of this cgroup, where it shows at all: v2 and v1, seen from inside a container or from the machine. */
int64_t count_oom_kills(void) {
    static const char *const places[] = {"/sys/fs/cgroup%s/memory.events", "/sys/fs/cgroup/memory%s/memory.oom_control"};
    char line[1024], path[1200];
    int64_t count = -1;
    FILE *groups = fopen("/proc/self/cgroup", "re");

    while (count < 0 && groups && fgets(line, sizeof line, groups)) {
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = '\0';
        group[strcspn(group, "\n")] = '\0';
        bool v2 = !strcmp(controllers + 1, "");
        if (!v2 && !strstr(controllers + 1, "memory"))
            continue;
        snprintf(path, sizeof path, places[v2 ? 0 : 1], !strcmp(group, "/") ? "" : group);
        count = oom_kills_in(path);
    }
    if (groups)
        fclose(groups);
    for (size_t i = 0; count < 0 && i < 2; i++) {
        snprintf(path, sizeof path, places[i], "");
        count = oom_kills_in(path);
    }
    return count;
}

static void add_identity(struct text *text, const char *name, struct identity identity) {
    if (identity.pid)
        text_add(text, ",\"%s\":{\"pid\":%d,\"start\":%llu}", name, (int)identity.pid, identity.start);
    else
        text_add(text, ",\"%s\":null", name);
}

static void add_number(struct text *text, const char *name, bool known, int64_t number) {
    if (known)
        text_add(text, ",\"%s\":%" PRId64, name, number);
    else
        text_add(text, ",\"%s\":null", name);
}

static void add_time(struct text *text, const char *name, int64_t ms) {
    if (ms)
        text_add(text, ",\"%s\":%" PRId64 ".%03d", name, ms / 1000, (int)(ms % 1000));
    else
        text_add(text, ",\"%s\":null", name);
}

static void add_list(struct text *text, const struct activation *activation, const char *name, enum list list) {
    unsigned most = list == SURVIVORS ? SURVIVORS_MOST : LISTED_MOST;

    text_add(text, ",\"%s_count\":%u,\"%s\":[", name, activation->counts[list], name);
    for (unsigned i = 0; i < activation->counts[list] && i < most; i++) {
        const struct listed *listed = &activation->lists[list][i];
        text_add(text, "%s{\"pid\":%d,\"start\":%llu,\"uid\":%d,\"comm\":", i ? "," : "",
                 (int)listed->process.identity.pid, listed->process.identity.start, (int)listed->uid);
        text_add_string(text, listed->process.comm);
        text_add(text, "}");
    }
    text_add(text, "]");
}

static void add_stream(struct text *text, const char *name, const struct stream *stream) {
    text_add(text, ",\"%s\":{\"total\":%" PRIu64 ",\"head\":%" PRIu64 ",\"tail\":%" PRIu64 ",\"errno\":%d}", name,
             stream->total, stream->head, stream->tail, stream->error);
}

static void add_worker(struct text *text, const struct activation *activation) {
    int status = activation->worker_status;
    bool ended = activation->worker_ended && !activation->error; /* else it never became the harness */

    add_identity(text, "worker", activation->worker);
    add_number(text, "exit_code", ended && WIFEXITED(status), WEXITSTATUS(status));
    add_number(text, "signal", ended && WIFSIGNALED(status), WTERMSIG(status));
    add_number(text, "errno", activation->error != 0, activation->error);
    text_add(text, ",\"problem\":");
    text_add_string(text, activation->problem);
    add_time(text, "started_at", activation->started_ms);
    add_time(text, "ended_at", activation->ended_ms);
    add_number(text, "oom_score_adj", activation->oom_score_set, activation->request.oom_score_adj);
    add_number(text, "oom_kill_delta", activation->oom_kill_delta >= 0, activation->oom_kill_delta);
}

static void add_cleanup(struct text *text, const struct activation *activation) {
    const char *empty = activation->tree_empty ? "true" : "false";

    text_add(text, ",\"tree_empty\":%s", activation->tree_known ? empty : "null");
    text_add(text, ",\"killed\":%u,\"reaped\":%u,\"marker_killed\":%u,\"eperm\":%u", activation->killed,
             activation->reaped, activation->marker_killed, activation->eperm);
    add_list(text, activation, "remaining", REMAINING);
    add_list(text, activation, "unaccounted", UNACCOUNTED);
    add_list(text, activation, "survivors", SURVIVORS);
    add_list(text, activation, "kills", KILLED);
}

/* Over the bytes before it, exactly as they stand: nothing has to be parsed to check it. */
static void add_signature(struct text *text, const unsigned char *key) {
    unsigned char digest[DIGEST_BYTES];

    if (!key) {
        text_add(text, ",\"mac\":null}\n");
        return;
    }
    hmac_sha256(key, text->at, text->length, digest);
    text_add(text, ",\"mac\":\"");
    for (int i = 0; i < DIGEST_BYTES; i++)
        text_add(text, "%02x", digest[i]);
    text_add(text, "\"}\n");
}

/* State and confirmation come first: they decide, and answer.c finds them without a parser. */
static void make_receipt(struct activation *activation, struct text *text) {
    static const char *const policies[] = {"drain", "keep_services", "keep_all"};
    bool timed_out = !strcmp(activation->state, "deadline");

    text_add(text, "{\"v\":1,\"state\":\"%s\",\"cleanup_confirmed\":%s,\"timed_out\":%s,\"reason\":\"%s\"",
             activation->state, activation->clean ? "true" : "false", timed_out ? "true" : "false",
             activation->reason);
    text_add(text, ",\"id\":\"%s\",\"nonce\":\"%s\",\"uid\":%d,\"policy\":\"%s\"", activation->request.id,
             activation->nonce, (int)geteuid(), policies[activation->request.policy]);
    add_identity(text, "supervisor", activation->supervisor);
    add_worker(text, activation);
    add_stream(text, "stdout", &activation->streams[0]);
    add_stream(text, "stderr", &activation->streams[1]);
    add_cleanup(text, activation);
    add_signature(text, activation->request.key);
}

/* Before the launch: a disk that the harness fills cannot keep the receipt from being written. */
void receipt_set_aside(struct activation *activation) {
    int fd = openat(activation->folder.fd, TEMPORARY, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);

    if (fd >= 0 && posix_fallocate(fd, 0, RECEIPT_ROOM)) {
        close(fd);
        fd = -1;
    }
    activation->receipt_file = fd;
}

static bool write_set_aside(struct activation *activation, const struct text *text) {
    int fd = activation->receipt_file;

    return fd >= 0 && pwrite(fd, text->at, text->length, 0) == (ssize_t)text->length &&
           ftruncate(fd, (off_t)text->length) == 0 && fsync(fd) == 0 &&
           renameat(activation->folder.fd, TEMPORARY, activation->folder.fd, "receipt.json") == 0;
}

/* A harness may have deleted the whole folder, as `rm -rf /tmp/...` does without meaning it. */
static bool write_into_new_folder(struct activation *activation, const struct text *text) {
    struct folder folder;
    bool written = folder_open(&folder, activation->folder.path, true) == FOLDER_OPEN &&
                   folder_write(&folder, "started", "", 0) &&
                   folder_write(&folder, "receipt.json", text->at, text->length);

    return written;
}

/* The text stays in `receipt_text` also when it could not be saved. */
bool receipt_write(struct activation *activation) {
    struct text text = {.at = activation->receipt_text, .room = RECEIPT_ROOM};
    struct stat folder;

    make_receipt(activation, &text);
    bool deleted = fstat(activation->folder.fd, &folder) == 0 && folder.st_nlink == 0;
    return activation->receipt_written =
               write_set_aside(activation, &text) ||
               (!deleted && folder_write(&activation->folder, "receipt.json", text.at, text.length)) ||
               (deleted && write_into_new_folder(activation, &text));
}

bool state_write(struct activation *activation, const char *state) {
    struct text text = {.at = activation->state_text, .room = sizeof activation->state_text};

    text_add(&text, "{\"v\":1,\"state\":\"%s\",\"id\":\"%s\",\"nonce\":\"%s\"", state, activation->request.id,
             activation->nonce);
    add_identity(&text, "guardian", activation->guardian);
    add_identity(&text, "supervisor", activation->supervisor);
    add_identity(&text, "worker", activation->worker);
    add_time(&text, "started_at", activation->started_ms);
    text_add(&text, "}\n");
    return folder_write(&activation->folder, "state.json", text.at, text.length);
}
