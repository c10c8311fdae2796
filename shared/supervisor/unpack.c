/* A tar stream from stdin into a directory. What is there is merged with, and a file is replaced in one step.

   Nothing lands outside: names that lead out are refused, and below the directory no symbolic link is followed. A
   stream without its end mark, as when its sender dies, is an error, though what came before stays. */
#include "tar.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A folder that its owner may not write to gets its mode only when everything in it is there. */
struct sealed {
    struct sealed *next;
    mode_t mode;
    char path[];
};

struct target {
    int base;
    uid_t uid; /* -1: whoever unpacks */
    gid_t gid;
    struct sealed *sealed;
};

static bool leads_out(const char *path) {
    for (const char *at = path; at; at = strchr(at, '/'), at = at ? at + 1 : NULL)
        if (!strncmp(at, "..", 2) && (at[2] == '/' || !at[2]))
            return true;
    return *path == '/';
}

static bool give(const struct target *target, int parent, const char *name) {
    return target->uid == (uid_t)-1 || fchownat(parent, name, target->uid, target->gid, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Opens a folder, which is made where there is none. */
static int open_folder(const struct target *target, int parent, const char *name, mode_t mode, bool *made) {
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

    *made = fd < 0 && errno == ENOENT && mkdirat(parent, name, mode | 0700) == 0;
    if (*made && give(target, parent, name))
        fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd;
}

/* Opens the folder that the last part of `path` stands in, and gives that part; `path` is taken apart. */
static int open_parent(const struct target *target, char *path, char **last) {
    int fd = dup(target->base);
    char *part = path, *slash;
    bool made;

    for (; fd >= 0 && (slash = strchr(part, '/')); part = slash + 1) {
        *slash = '\0';
        if (!*part || !strcmp(part, "."))
            continue;
        int below = open_folder(target, fd, part, 0755, &made), problem = errno;
        close(fd);
        errno = problem;
        fd = below;
    }
    *last = part;
    return fd;
}

static bool copy_in(int to, uint64_t size) {
    static char block[65536];

    for (size_t part; size; size -= part) {
        part = size < sizeof block ? (size_t)size : sizeof block;
        if (!tar_read(block, part)) {
            errno = ENODATA;
            return false;
        }
        if (!write_all(to, block, part))
            return false;
    }
    return true;
}

static bool make_file(const struct target *target, int parent, const char *name, const struct tar_entry *entry) {
    int fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    bool made = fd >= 0 && copy_in(fd, entry->size) && give(target, parent, name) /* which would clear setuid */
                && fchmod(fd, entry->mode) == 0;

    if (fd >= 0)
        close(fd);
    return made;
}

static bool make_hardlink(const struct target *target, int parent, const char *name, const struct tar_entry *entry) {
    char path[TAR_PATH_ROOM], *last;

    if (leads_out(entry->link)) {
        errno = EXDEV;
        return false;
    }
    strcpy(path, entry->link);
    int from = open_parent(target, path, &last);
    bool made = from >= 0 && linkat(from, last, parent, name, 0) == 0;
    if (from >= 0)
        close(from);
    return made;
}

static bool make_folder(struct target *target, int parent, const char *name, const struct tar_entry *entry) {
    bool made;
    int fd = !*name || !strcmp(name, ".") ? dup(parent) : open_folder(target, parent, name, entry->mode, &made);

    if (fd < 0)
        return false;
    close(fd);
    if ((entry->mode & 0700) == 0700 || !made)
        return true;
    struct sealed *sealed = malloc(sizeof *sealed + strlen(entry->name) + 1);
    if (!sealed)
        return false;
    *sealed = (struct sealed){target->sealed, entry->mode};
    strcpy(sealed->path, entry->name);
    target->sealed = sealed;
    return true;
}

/* Under another name first, and then in the place of what is there. */
static bool replace(struct target *target, int parent, const char *name, const struct tar_entry *entry) {
    char temporary[64];
    bool made = false;

    snprintf(temporary, sizeof temporary, ".paddock-unpack-%d", (int)getpid());
    unlinkat(parent, temporary, 0); /* of one with our pid that was killed */
    if (entry->type == TAR_FILE)
        made = make_file(target, parent, temporary, entry);
    else if (entry->type == TAR_SYMLINK)
        made = symlinkat(entry->link, parent, temporary) == 0 && give(target, parent, temporary);
    else if (entry->type == TAR_HARDLINK)
        made = make_hardlink(target, parent, temporary, entry);
    else
        errno = EOPNOTSUPP; /* a device, a FIFO */
    made = made && renameat(parent, temporary, parent, name) == 0;
    int problem = errno;
    unlinkat(parent, temporary, 0); /* is there after a failure, and when both names are links to one file */
    errno = problem;
    return made;
}

static int unpack_entry(struct target *target, const struct tar_entry *entry) {
    char path[TAR_PATH_ROOM], *last;

    if (leads_out(entry->name))
        return fail("the entry %s leads out of the folder", entry->name);
    strcpy(path, entry->name);
    int parent = open_parent(target, path, &last);
    bool done = parent >= 0 && (entry->type == TAR_FOLDER ? make_folder : replace)(target, parent, last, entry);
    int problem = errno;
    if (parent >= 0)
        close(parent);
    if (!done)
        return fail("cannot unpack %s: %s", entry->name,
                    problem == ENODATA ? "the stream ended within it" : strerror(problem));
    return tar_skip_padding(entry) ? EXIT_DONE : fail("the stream ended behind %s", entry->name);
}

static int open_base(const char *told) {
    char path[PATH_MAX];

    if (snprintf(path, sizeof path, "%s", told) >= (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    if (!make_parents(path) || (mkdir(path, 0755) && errno != EEXIST && errno != EROFS))
        return -1;
    return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int command_unpack(int argc, char **argv) {
    static struct tar_entry entry;
    static char padding[TAR_BLOCK];
    struct target target = {.uid = (uid_t)-1, .gid = (gid_t)-1};
    int status = EXIT_DONE;

    if (argc > 2 && !parse_owner(argv[2], &target.uid, &target.gid))
        return EXIT_USAGE;
    target.base = open_base(argv[1]);
    if (target.base < 0)
        return fail("cannot use %s: %s", argv[1], strerror(errno));
    while (status == EXIT_DONE && (status = tar_next(&entry) ? EXIT_DONE : EXIT_FAILED) == EXIT_DONE && entry.type)
        status = unpack_entry(&target, &entry);
    for (struct sealed *at = target.sealed; at; at = at->next)
        if (fchmodat(target.base, at->path, at->mode, 0) && status == EXIT_DONE)
            status = fail("cannot set the mode of %s: %s", at->path, strerror(errno));
    while (status == EXIT_DONE && read(STDIN_FILENO, padding, sizeof padding) > 0)
        ; /* whoever sends is not cut off before the end of its last block */
    return status;
}
