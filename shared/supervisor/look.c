/* check and mkdir: what a box is like, asked and set right when it is made. */
#include "box.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A folder that can be written to is 'w', another folder 'd', a program 'x', anything else 'f', nothing '-'. */
static char kind_of(const char *path) {
    struct stat about;
    if (stat(path, &about) < 0) return '-';
    if (S_ISDIR(about.st_mode)) return access(path, R_OK | W_OK | X_OK) == 0 ? 'w' : 'd';
    return access(path, X_OK) == 0 ? 'x' : 'f';
}

/* check PATH...: "UID GID", the kind and the path of HOME, then kind and path of each, a line each */
int command_check(int argc, char **argv) {
    const char *home = getenv("HOME") ? getenv("HOME") : "";
    printf("%ld %ld\n%c %s\n", (long)geteuid(), (long)getegid(), kind_of(home), home);
    for (int i = 1; i < argc; i++) printf("%c %s\n", kind_of(argv[i]), argv[i]);
    return 0;
}

static int make_folder(const char *path, uid_t uid, gid_t gid, mode_t mode) {
    if (mkdir(path, 0755) < 0) return errno == EEXIST ? 0 : -1;
    return chown(path, uid, gid) < 0 || chmod(path, mode) < 0 ? -1 : 0;
}

/* mkdir UID GID MODE PATH: makes what is missing of the path; owner and mode are set on what was made. */
int command_mkdir(int argc, char **argv) {
    (void)argc;
    char *path = argv[4];
    uid_t uid = (uid_t)atol(argv[1]);
    gid_t gid = (gid_t)atol(argv[2]);
    mode_t mode = (mode_t)strtol(argv[3], NULL, 8);
    for (char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
        *at = 0;
        if (make_folder(path, uid, gid, mode) < 0) return fail("cannot make %s: %s", path, strerror(errno));
        *at = '/';
    }
    return make_folder(path, uid, gid, mode) < 0 ? fail("cannot make %s: %s", path, strerror(errno)) : EXIT_DONE;
}
