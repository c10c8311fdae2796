/* Reads what is to be launched from stdin: neither a command line nor an environment of ours ever holds the key,
   a token or a prompt. The other side is `LaunchRequest` in protocol.py.

   A frame is a row of fields `name=value`, each ended by a zero byte, and one empty field at the end. A frame
   that ends early, as when its sender dies, launches nothing.

     paddock-run=1           comes first: the version of the frame
     id=...                  the activation's name, told in the receipt
     key=64 hex digits       what the receipt is signed with; left out: it is not signed
     arg=...                 once for each argument, the program first; looked for in the PATH of `env`
     env=NAME=VALUE          once for each variable
     inherit_environment=1   the environment that this command was started with lies below `env`
     cwd=PATH                left out: where this command was started
     user=UID:GID, group=GID (once for each further group)
     deadline_ms, grace_ms, kill_ms, survivors=drain|keep_services|keep_all
     head_bytes, tail_bytes  how much of the start and of the end of each output is kept
     oom_score_adj=N, no_new_privileges=1 */
#include "activation.h"

#include <ctype.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FRAME_MOST (8 << 20)
#define FRAME_WAIT_MS 60000
#define LONGEST_MS (INT64_C(1) << 50)
#define RING_MOST (UINT64_C(64) << 20)

#define ID_LETTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-"

/* How a field is read: the parser gives NULL, or what is wrong with the value. */
struct field {
    const char *name;
    const char *(*parse)(struct request *request, char *value, const struct field *field);
    size_t offset; /* in the request, of what a flag or a number sets */
    uint64_t most;
};

static const char *parse_version(struct request *request, char *value, const struct field *field) {
    (void)request, (void)field;
    return strcmp(value, "1") ? "is not 1: supervisor and service are of different releases" : NULL;
}

static const char *parse_id(struct request *request, char *value, const struct field *field) {
    (void)field;
    if (!*value || strlen(value) >= ID_ROOM || value[strspn(value, ID_LETTERS)])
        return "is not 1 to 128 letters, digits or ._:-";
    strcpy(request->id, value);
    return NULL;
}

/* What was read is wiped where it was read. */
static const char *parse_key(struct request *request, char *value, const struct field *field) {
    static unsigned char key[KEY_BYTES];
    bool whole = strlen(value) == 2 * KEY_BYTES;

    (void)field;
    for (size_t i = 0; whole && i < KEY_BYTES; i++)
        whole = isxdigit((unsigned char)value[2 * i]) && sscanf(value + 2 * i, "%2hhx", &key[i]) == 1;
    memset(value, '-', strlen(value));
    request->key = key;
    return whole ? NULL : "is not 64 hexadecimal digits";
}

static const char *parse_argument(struct request *request, char *value, const struct field *field) {
    (void)field;
    request->arguments[request->argument_count++] = value;
    return NULL;
}

static const char *parse_variable(struct request *request, char *value, const struct field *field) {
    (void)field;
    if (*value == '=' || !strchr(value, '='))
        return "is not NAME=VALUE";
    request->environment[request->variable_count++] = value;
    return NULL;
}

static const char *parse_directory(struct request *request, char *value, const struct field *field) {
    (void)field;
    request->working_directory = value;
    return NULL;
}

static const char *parse_user(struct request *request, char *value, const struct field *field) {
    (void)field;
    request->as_user = parse_owner(value, &request->uid, &request->gid);
    return request->as_user ? NULL : "is not UID:GID";
}

static const char *parse_group(struct request *request, char *value, const struct field *field) {
    uint64_t group;

    if (request->group_count == GROUPS_MOST || !parse_number(value, field->most, &group))
        return "is no number, or there are too many";
    request->groups[request->group_count++] = (gid_t)group;
    return NULL;
}

static const char *parse_policy(struct request *request, char *value, const struct field *field) {
    static const char *const names[] = {[DRAIN] = "drain", [KEEP_SERVICES] = "keep_services", [KEEP_ALL] = "keep_all"};

    (void)field;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(value, names[i]))
            continue;
        request->policy = (enum policy)i;
        return NULL;
    }
    return "is none of drain, keep_services, keep_all";
}

static const char *parse_oom_score(struct request *request, char *value, const struct field *field) {
    char rest;

    (void)field;
    request->oom_asked = sscanf(value, "%d%c", &request->oom_score_adj, &rest) == 1;
    if (!request->oom_asked || request->oom_score_adj < -1000 || request->oom_score_adj > 1000)
        return "is not between -1000 and 1000";
    return NULL;
}

static const char *parse_flag(struct request *request, char *value, const struct field *field) {
    if (strcmp(value, "0") && strcmp(value, "1"))
        return "is neither 0 nor 1";
    *(bool *)((char *)request + field->offset) = *value == '1';
    return NULL;
}

static const char *parse_count(struct request *request, char *value, const struct field *field) {
    uint64_t number;

    if (!parse_number(value, field->most, &number))
        return "is no number, or too large";
    memcpy((char *)request + field->offset, &number, sizeof number);
    return NULL;
}

#define OF(name) offsetof(struct request, name)

static const struct field fields[] = {
    {"paddock-run", parse_version, 0, 0},
    {"id", parse_id, 0, 0},
    {"key", parse_key, 0, 0},
    {"arg", parse_argument, 0, 0},
    {"env", parse_variable, 0, 0},
    {"cwd", parse_directory, 0, 0},
    {"user", parse_user, 0, 0},
    {"group", parse_group, 0, UINT32_MAX - 1},
    {"survivors", parse_policy, 0, 0},
    {"oom_score_adj", parse_oom_score, 0, 0},
    {"inherit_environment", parse_flag, OF(inherit_environment), 0},
    {"no_new_privileges", parse_flag, OF(no_new_privileges), 0},
    {"deadline_ms", parse_count, OF(deadline_ms), LONGEST_MS},
    {"grace_ms", parse_count, OF(grace_ms), LONGEST_MS},
    {"kill_ms", parse_count, OF(kill_ms), LONGEST_MS},
    {"head_bytes", parse_count, OF(head_bytes), INT64_MAX},
    {"tail_bytes", parse_count, OF(tail_bytes), RING_MOST},
};

static const struct field *find_field(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (strlen(fields[i].name) == length && !strncmp(fields[i].name, name, length))
            return &fields[i];
    return NULL;
}

static bool parse_fields(struct request *request, char *bytes, size_t length) {
    for (char *at = bytes; at < bytes + length; at += strlen(at) + 1) {
        size_t name = strcspn(at, "=");
        const struct field *field = at[name] ? find_field(at, name) : NULL;
        const char *wrong = field ? field->parse(request, at + name + 1, field) : "is unknown";
        if (at == bytes && (!field || field->parse != parse_version))
            wrong = "stands where paddock-run=1 should";
        if (wrong) {
            fail("the frame's field %.*s %s", (int)name, at, wrong);
            return false;
        }
    }
    if (request->argument_count && *request->arguments[0])
        return true;
    fail("the frame names no program");
    return false;
}

/* Where the closing empty field stands, or 0: then it has not come yet. */
static size_t frame_end(const char *bytes, size_t length, size_t from) {
    for (size_t i = from ? from : 1; i < length; i++)
        if (!bytes[i] && !bytes[i - 1])
            return i;
    return 0;
}

static size_t read_whole(char *bytes) {
    int64_t until_ms = monotonic_ms() + FRAME_WAIT_MS;
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    size_t length = 0, end = 0;

    while (!end && length < FRAME_MOST) {
        int64_t left_ms = until_ms - monotonic_ms();
        ssize_t got = left_ms > 0 && poll(&input, 1, (int)left_ms) > 0
                          ? read(STDIN_FILENO, bytes + length, FRAME_MOST - length) : 0;
        if (got <= 0)
            break;
        end = frame_end(bytes, length + (size_t)got, length);
        length += (size_t)got;
    }
    return end;
}

/* The request keeps pointing into the frame, which is never freed. */
bool frame_read(struct request *request) {
    char *bytes = mmap(NULL, FRAME_MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    size_t length = bytes == MAP_FAILED ? 0 : read_whole(bytes), count = 2;

    if (!length) {
        fail("the frame on stdin is incomplete, so nothing was launched");
        return false;
    }
    for (size_t i = 0; i < length; i++)
        count += !bytes[i];
    request->arguments = calloc(count, sizeof *request->arguments);
    request->environment = calloc(count, sizeof *request->environment);
    if (request->arguments && request->environment)
        return parse_fields(request, bytes, length);
    fail("there is no memory for the frame, so nothing was launched");
    return false;
}
