/* What the files of a sandbox's own commands share: once.c, keep.c, look.c, descendants.c. */
#ifndef PADDOCK_BOX_H
#define PADDOCK_BOX_H

#include "supervisor.h"

/* Names this start of the sandbox: the start of PID 1 as the kernel tells it. Differs after every restart. */
void boot_name(char *into, size_t size);

/* Runs the command that the request on stdin asks for; `boot` names this start of the sandbox. */
int run_once(const char *boot);

/* Kills every descendant of the caller, who has to be a child subreaper or PID 1, and reaps until the kernel says
   that none is left. False when some were alive after the budget. `ended` is told of each. */
bool kill_descendants(int64_t budget_ms, void (*ended)(pid_t pid, int status));

#endif
