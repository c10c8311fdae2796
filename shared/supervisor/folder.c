/* The folder of one activation: who may change it (the fence), claims that only one caller can win, and
   files that are never seen half written.

   The harness may own the folder when it runs as the supervisor's user, so nothing in it is followed or
   waited for: no symbolic link, no FIFO. */
#include "supervisor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define CLOSED ".closed"     /* an empty folder of this name stays behind: the activation is over for good */
#define LOCK_WAIT_MS 2000    /* the lock is held for microseconds; longer means a frozen or hostile holder */
#define FENCE_DIGITS 20      /* always all of them, so that a number is replaced by one write in place */

bool make_parents(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        int made = mkdir(path, 0755);
        int problem = errno;
        *slash = '/';
        if (made && problem != EEXIST && problem != EROFS && problem != EACCES) {
            errno = problem;
            return false;
        }
    }
    return true;
}

static bool is_closed(const char *path) {
    char closed[PATH_MAX];
    struct stat found;

    snprintf(closed, sizeof closed, "%s" CLOSED, path);
    return lstat(closed, &found) == 0;
}

enum presence folder_open(struct folder *folder, const char *path, bool create) {
    char copy[PATH_MAX];

    folder->path = path;
    folder->fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (folder->fd >= 0)
        return FOLDER_OPEN;
    int problem = errno;
    if (is_closed(path))
        return FOLDER_CLOSED;
    errno = problem;
    if (problem != ENOENT || !create || snprintf(copy, sizeof copy, "%s", path) >= (int)sizeof copy)
        return FOLDER_ABSENT;
    if (!make_parents(copy) || (mkdir(path, 0700) && errno != EEXIST))
        return FOLDER_ABSENT;
    return folder_open(folder, path, false);
}

static int open_inside(struct folder *folder, const char *name, int flags) {
    int fd = openat(folder->fd, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    struct stat found;

    if (fd >= 0 && (fstat(fd, &found) || !S_ISREG(found.st_mode))) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    return fd;
}

/* The highest number so far; 0 where there is none. What is no number counts as the highest of all: a
   damaged fence must not let an old owner in. */
static uint64_t fence_of(int fd) {
    char digits[FENCE_DIGITS + 1] = "";
    uint64_t number;
    ssize_t length = pread(fd, digits, FENCE_DIGITS, 0);

    if (length == 0)
        return 0;
    return parse_number(digits, UINT64_MAX, &number) ? number : UINT64_MAX;
}

uint64_t fence_read(struct folder *folder) {
    int fd = open_inside(folder, "fence", O_RDONLY);
    uint64_t fence = fd < 0 ? 0 : fence_of(fd);

    if (fd >= 0)
        close(fd);
    return fence;
}

bool lock_within(int fd, int64_t wait_ms) {
    int64_t until = monotonic_ms() + wait_ms;

    while (flock(fd, LOCK_EX | LOCK_NB)) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return false;
        if (monotonic_ms() >= until)
            return false;
        pause_ms(2);
    }
    return true;
}

int fence_enter(struct folder *folder, uint64_t fence, int *lock) {
    char digits[FENCE_DIGITS + 1];
    int fd = open_inside(folder, "fence", O_RDWR | O_CREAT);

    if (fd < 0)
        return fail("cannot open %s/fence: %s", folder->path, strerror(errno));
    if (!lock_within(fd, LOCK_WAIT_MS)) {
        close(fd);
        return fail("%s/fence stayed locked for %d ms by another command", folder->path, LOCK_WAIT_MS);
    }
    uint64_t highest = fence_of(fd);
    if (fence < highest) {
        close(fd);
        fail("fence %" PRIu64 " is refused: a newer owner with fence %" PRIu64 " has used %s", fence, highest,
             folder->path);
        return EXIT_FENCED;
    }
    snprintf(digits, sizeof digits, "%0*" PRIu64, FENCE_DIGITS, fence);
    if (fence > highest && pwrite(fd, digits, FENCE_DIGITS, 0) != FENCE_DIGITS) {
        int problem = errno;
        close(fd);
        return fail("cannot write %s/fence: %s", folder->path, strerror(problem));
    }
    *lock = fd;
    return EXIT_DONE;
}

bool folder_has(struct folder *folder, const char *name) {
    return faccessat(folder->fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

bool folder_claim(struct folder *folder, const char *name) {
    int fd = openat(folder->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (fd < 0)
        return false;
    close(fd);
    return true;
}

/* Up to `room` - 1 bytes, ended with a zero byte; -1 where there is no such file. */
ssize_t folder_read(struct folder *folder, const char *name, char *buffer, size_t room) {
    int fd = open_inside(folder, name, O_RDONLY);
    ssize_t total = 0, got = 0;

    if (fd < 0)
        return -1;
    while ((size_t)total < room - 1 && (got = read(fd, buffer + total, room - 1 - (size_t)total)) > 0)
        total += got;
    close(fd);
    buffer[total] = '\0';
    return got < 0 ? -1 : total;
}

bool folder_write(struct folder *folder, const char *name, const char *bytes, size_t length) {
    char temporary[64];

    snprintf(temporary, sizeof temporary, "%s.%d", name, (int)getpid());
    unlinkat(folder->fd, temporary, 0);
    int fd = open_inside(folder, temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0)
        return false;
    bool written = write_all(fd, bytes, length) && fsync(fd) == 0;
    close(fd);
    if (written && renameat(folder->fd, temporary, folder->fd, name) == 0)
        return true;
    int problem = errno;
    unlinkat(folder->fd, temporary, 0);
    errno = problem;
    return false;
}

int remove_below(int fd) {
    DIR *entries = fdopendir(dup(fd));
    struct dirent *entry;
    int problem = 0;

    if (!entries)
        return -1;
    while ((entry = readdir(entries))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (unlinkat(fd, entry->d_name, 0) == 0)
            continue;
        int below = openat(fd, entry->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (below < 0 || remove_below(below) || unlinkat(fd, entry->d_name, AT_REMOVEDIR))
            problem = errno;
        if (below >= 0)
            close(below);
    }
    closedir(entries);
    errno = problem;
    return problem ? -1 : 0;
}

/* First another name, so that a late launch finds nothing; the emptied folder stays under it as a tombstone. */
bool folder_remove(struct folder *folder) {
    char closed[PATH_MAX];

    if (snprintf(closed, sizeof closed, "%s" CLOSED, folder->path) >= (int)sizeof closed) {
        errno = ENAMETOOLONG;
        return false;
    }
    return rename(folder->path, closed) == 0 && remove_below(folder->fd) == 0;
}
