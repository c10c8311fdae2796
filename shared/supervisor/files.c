/* One file in, one file out, over stdio: for where a provider's own upload does not reach (tmpfs, read-only
   roots) and no image offers a shell. */
#include "supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 65536

static char block[BLOCK];

/* All of `size` bytes, or false: an input that ends early is a client that went away, not a short file. */
static bool copy_exactly(int from, int to, uint64_t size) {
    while (size) {
        ssize_t got = read(from, block, size < BLOCK ? (size_t)size : BLOCK);
        if (got < 0 && errno == EINTR)
            continue;
        if (got == 0)
            errno = ENODATA;
        if (got <= 0 || !write_all(to, block, (size_t)got))
            return false;
        size -= (uint64_t)got;
    }
    return true;
}

static bool parse_mode(const char *digits, mode_t *mode) {
    unsigned value;
    char rest;

    if (sscanf(digits, "%o%c", &value, &rest) != 1 || value > 07777)
        return false;
    *mode = (mode_t)value;
    return true;
}

static int put_file(char *path, mode_t mode, uint64_t size, uid_t uid, gid_t gid) {
    char temporary[PATH_MAX];

    if (snprintf(temporary, sizeof temporary, "%s.paddock-%d", path, (int)getpid()) >= (int)sizeof temporary)
        return fail("the path is too long: %s", path);
    make_parents(path);
    unlink(temporary); /* of one with our pid that was killed */
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return fail("cannot create %s: %s", path, strerror(errno));
    bool done = copy_exactly(STDIN_FILENO, fd, size);
    done = done && (uid == (uid_t)-1 || fchown(fd, uid, gid) == 0); /* before the mode: a chown clears setuid */
    done = done && fchmod(fd, mode) == 0;
    done = close(fd) == 0 && done;
    if (done && rename(temporary, path) == 0)
        return EXIT_DONE;
    int problem = errno;
    unlink(temporary);
    if (problem == ENODATA)
        return fail("%s was not written: the input ended before its %llu bytes", path, (unsigned long long)size);
    return fail("cannot write %s: %s", path, strerror(problem));
}

int command_put(int argc, char **argv) {
    uint64_t size;
    mode_t mode;
    uid_t uid = (uid_t)-1;
    gid_t gid = (gid_t)-1;

    if (!parse_mode(argv[2], &mode) || !parse_number(argv[3], INT64_MAX, &size) ||
        (argc > 4 && !parse_owner(argv[4], &uid, &gid)))
        return EXIT_USAGE;
    return put_file(argv[1], mode, size, uid, gid);
}

int command_get(int argc, char **argv) {
    uint64_t offset = 0, length = INT64_MAX;
    struct stat found;

    if ((argc > 2 && !parse_number(argv[2], INT64_MAX, &offset)) ||
        (argc > 3 && !parse_number(argv[3], INT64_MAX, &length)))
        return EXIT_USAGE;
    int fd = open(argv[1], O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &found))
        return fail("cannot read %s: %s", argv[1], strerror(errno));
    if (!S_ISREG(found.st_mode))
        return fail("%s is not a regular file", argv[1]);
    if (lseek(fd, (off_t)offset, SEEK_SET) < 0)
        return fail("cannot read %s from byte %s: %s", argv[1], argv[2], strerror(errno));
    if (!copy_exactly(fd, STDOUT_FILENO, length) && errno != ENODATA)
        return fail("cannot pass on %s: %s", argv[1], strerror(errno));
    return EXIT_DONE;
}
