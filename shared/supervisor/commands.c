/* The commands on an activation's folder, but for the launch and the ones that end it. */
#include "supervisor.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static struct answer answer; /* large, and there is one per process */

/* Opens the folder and passes its fence. An absent or closed folder has none: that is an answer, not an error. */
int folder_enter(char **argv, bool create, struct folder *folder, enum presence *presence, int *lock) {
    uint64_t fence;

    *lock = -1;
    if (!parse_number(argv[2], UINT64_MAX, &fence))
        return EXIT_USAGE;
    *presence = folder_open(folder, argv[1], create);
    if (*presence == FOLDER_ABSENT && (create || errno != ENOENT))
        return fail("cannot use the folder %s: %s", argv[1], strerror(errno));
    return *presence == FOLDER_OPEN ? fence_enter(folder, fence, lock) : EXIT_DONE;
}

static int enter_and_leave(char **argv, bool create, struct folder *folder, enum presence *presence) {
    int lock;
    int status = folder_enter(argv, create, folder, presence, &lock);

    if (lock >= 0)
        close(lock);
    return status;
}

static int tell_state(char **argv, bool create) {
    struct folder folder;
    enum presence presence;
    int status = enter_and_leave(argv, create, &folder, &presence);

    if (status != EXIT_DONE)
        return status;
    observe(&answer, &folder, presence);
    print_answer(&answer);
    return EXIT_DONE;
}

int command_prepare(int argc, char **argv) {
    (void)argc;
    return tell_state(argv, true);
}

int command_status(int argc, char **argv) {
    (void)argc;
    return tell_state(argv, false);
}

int command_wait(int argc, char **argv) {
    struct folder folder;
    enum presence presence;
    uint64_t wait_ms;

    (void)argc;
    if (!parse_number(argv[3], INT32_MAX, &wait_ms))
        return EXIT_USAGE;
    int status = enter_and_leave(argv, false, &folder, &presence);
    if (status != EXIT_DONE)
        return status;
    if (presence == FOLDER_OPEN)
        await_end(&folder, &answer, (int64_t)wait_ms);
    else
        observe(&answer, &folder, presence);
    return print_answer(&answer);
}

/* Refused while something may run in it: what is deleted under a live supervisor could not be proven any more. */
int command_remove(int argc, char **argv) {
    struct folder folder;
    enum presence presence;
    int status = enter_and_leave(argv, false, &folder, &presence);

    (void)argc;
    if (status != EXIT_DONE)
        return status;
    if (presence == FOLDER_OPEN && !folder_is_released(&folder))
        return fail("%s is in use by a live supervisor: stop it first", folder.path);
    if (presence == FOLDER_OPEN && !folder_remove(&folder))
        return fail("cannot remove %s: %s", folder.path, strerror(errno));
    observe(&answer, &folder, presence == FOLDER_ABSENT ? FOLDER_ABSENT : FOLDER_CLOSED);
    print_answer(&answer);
    return EXIT_DONE;
}
