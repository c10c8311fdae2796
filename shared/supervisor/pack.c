/* A file or a directory as a tar stream to stdout, under its own last name. Owners are left out; what is no file,
   folder or symbolic link is, too. A link at the very top is followed, none below it. */
#include "tar.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEEPEST 200 /* folders in folders; each keeps a file open */

static char path[TAR_PATH_ROOM]; /* of the entry, below the top */

static bool put_padding(uint64_t size) {
    static const char zeros[TAR_BLOCK];

    return write_all(STDOUT_FILENO, zeros, (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK);
}

static bool put_header(const char *name, const char *link, char type, mode_t mode, uint64_t size, time_t mtime) {
    struct tar_header header = {.type = type};

    memcpy(header.magic, "ustar ", sizeof header.magic); /* GNU's, as its long names are */
    header.version[0] = ' ';
    strncpy(header.name, name, sizeof header.name);
    strncpy(header.link, link, sizeof header.link);
    tar_put_number(header.mode, sizeof header.mode, mode & 07777);
    tar_put_number(header.uid, sizeof header.uid, 0);
    tar_put_number(header.gid, sizeof header.gid, 0);
    tar_put_number(header.size, sizeof header.size, size);
    tar_put_number(header.mtime, sizeof header.mtime, mtime > 0 ? (uint64_t)mtime : 0);
    snprintf(header.checksum, sizeof header.checksum, "%06o", tar_checksum(&header));
    header.checksum[7] = ' ';
    return write_all(STDOUT_FILENO, &header, sizeof header);
}

static bool put_long(char type, const char *text) {
    size_t length = strlen(text) + 1;

    return put_header("././@LongLink", "", type, 0644, length, 0) && write_all(STDOUT_FILENO, text, length) &&
           put_padding(length);
}

static bool put_entry(const char *name, const char *link, char type, const struct stat *about, uint64_t size) {
    if (strlen(name) > sizeof((struct tar_header *)0)->name && !put_long('L', name))
        return false;
    if (strlen(link) > sizeof((struct tar_header *)0)->link && !put_long('K', link))
        return false;
    return put_header(name, link, type, about->st_mode, size, about->st_mtime);
}

/* Exactly the size that the header told: a file that grows is cut, one that shrinks is an error. */
static bool put_file(int fd, const struct stat *about) {
    static char block[65536];
    uint64_t left = (uint64_t)about->st_size;

    if (!put_entry(path, "", '0', about, left))
        return false;
    while (left) {
        ssize_t got = read(fd, block, left < sizeof block ? (size_t)left : sizeof block);
        if (got == 0)
            errno = ENODATA;
        if (got <= 0 || !write_all(STDOUT_FILENO, block, (size_t)got))
            return false;
        left -= (uint64_t)got;
    }
    return put_padding((uint64_t)about->st_size);
}

static bool put_symlink(int parent, const char *name, const struct stat *about) {
    char target[TAR_PATH_ROOM];
    ssize_t length = readlinkat(parent, name, target, sizeof target - 1);

    if (length < 0)
        return false;
    target[length] = '\0';
    return put_entry(path, target, '2', about, 0);
}

static bool put_folder(int fd, const struct stat *about, int depth);

static bool put_any(int parent, const char *name, int follow, int depth) {
    struct stat about;

    if (fstatat(parent, name, &about, follow))
        return errno == ENOENT && depth > 0; /* gone since it was listed */
    if (S_ISLNK(about.st_mode))
        return put_symlink(parent, name, &about);
    if (!S_ISREG(about.st_mode) && !S_ISDIR(about.st_mode)) {
        errno = EINVAL;
        return depth > 0;
    }
    int fd = openat(parent, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC | (follow ? O_NOFOLLOW : 0));
    if (fd < 0 || fstat(fd, &about))
        return false;
    bool put = S_ISDIR(about.st_mode) ? put_folder(fd, &about, depth) : put_file(fd, &about);
    int problem = errno;
    close(fd);
    errno = problem;
    return put;
}

static bool put_folder(int fd, const struct stat *about, int depth) {
    size_t length = strlen(path);
    struct dirent *entry;
    DIR *entries = NULL;
    bool put = depth < DEEPEST && put_entry(path, "", '5', about, 0) && (entries = fdopendir(dup(fd)));

    while (put && (entry = readdir(entries))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        put = snprintf(path + length, sizeof path - length, "/%s", entry->d_name) < (int)(sizeof path - length) &&
              put_any(fd, entry->d_name, AT_SYMLINK_NOFOLLOW, depth + 1);
        if (put) /* else the path stays, for the sentence */
            path[length] = '\0';
    }
    if (entries)
        closedir(entries);
    return put;
}

int command_pack(int argc, char **argv) {
    size_t length = strlen(argv[1]);
    static const char end[2 * TAR_BLOCK];

    (void)argc;
    while (length > 1 && argv[1][length - 1] == '/')
        argv[1][--length] = '\0';
    const char *slash = strrchr(argv[1], '/'), *name = slash ? slash + 1 : argv[1];
    snprintf(path, sizeof path, "%s", *name ? name : ".");
    if (put_any(AT_FDCWD, argv[1], 0, 0) && write_all(STDOUT_FILENO, end, sizeof end))
        return EXIT_DONE;
    return fail("cannot pack %s (at %s): %s", argv[1], path,
                errno == EINVAL ? "it is neither a file nor a folder" : strerror(errno));
}
