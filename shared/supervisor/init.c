/* PID 1 of a sandbox: reaps whatever ends, and ends at once on TERM, which ends everything in its pid namespace.

   It allocates nothing and starts nothing, so a full memory or a full pids limit cannot hinder it. */
#include "supervisor.h"

#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

int command_init(int argc, char **argv) {
    sigset_t awaited;
    int signal = 0;

    (void)argc, (void)argv;
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* for where it is not PID 1 */
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGINT);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    for (;;) {
        /* Before the first wait, too: an ended child may have been inherited. */
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
        if (sigwait(&awaited, &signal) == 0 && signal != SIGCHLD)
            return EXIT_DONE;
    }
}
