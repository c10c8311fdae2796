/* Starts the harness: the last steps of the forked process before it becomes the program that was asked for.

   What fails there comes back as one sentence over a pipe that the kernel closes when the program starts. */
#include "activation.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define START_WAIT_MS 30000
#define STANDARD_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define PATH_ROOM 4096

extern char **environ;

struct failure {
    int error;
    char problem[sizeof((struct activation *)0)->problem];
};

static const char *variable_of(char **environment, const char *name) {
    size_t length = strlen(name);

    for (; *environment; environment++)
        if (!strncmp(*environment, name, length) && (*environment)[length] == '=')
            return *environment + length + 1;
    return NULL;
}

/* A later value replaces an earlier one of the same name. */
static void set_variable(char **environment, size_t *count, char *variable) {
    size_t name = strcspn(variable, "=") + 1;

    for (size_t i = 0; i < *count; i++) {
        if (strncmp(environment[i], variable, name))
            continue;
        environment[i] = variable;
        return;
    }
    environment[(*count)++] = variable;
}

static char **make_environment(struct activation *activation) {
    struct request *request = &activation->request;
    size_t inherited = 0, count = 0;

    while (request->inherit_environment && environ[inherited])
        inherited++;
    char **environment = calloc(inherited + request->variable_count + 2, sizeof *environment);
    for (size_t i = 0; environment && i < inherited; i++)
        set_variable(environment, &count, environ[i]);
    for (size_t i = 0; environment && i < request->variable_count; i++)
        set_variable(environment, &count, request->environment[i]);
    if (environment)
        set_variable(environment, &count, activation->marker);
    return environment;
}

/* A score that cannot be set is a gap in the receipt and no failure of the launch. */
static void set_oom_score(struct activation *activation) {
    char digits[16];
    int length = snprintf(digits, sizeof digits, "%d", activation->request.oom_score_adj);
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

    activation->oom_score_set = fd >= 0 && write(fd, digits, (size_t)length) == length;
}

static const char *set_credentials(struct request *request) {
    if (request->no_new_privileges && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return "forgo new privileges";
    if (!request->as_user || (geteuid() == request->uid && getegid() == request->gid && !request->group_count))
        return NULL;
    if (setgroups(request->group_count, request->groups) || setresgid(request->gid, request->gid, request->gid))
        return "take the asked-for groups";
    return setresuid(request->uid, request->uid, request->uid) ? "become the asked-for user" : NULL;
}

/* ENOENT of a file that is there: what it names as its interpreter is not. */
static void explain_missing(struct failure *failure, const char *program) {
    char line[128] = "";
    int fd = open(program, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    ssize_t length = read(fd, line, sizeof line - 1);
    line[length > 0 ? length : 0] = '\0';
    line[strcspn(line, "\n")] = '\0';
    if (!strncmp(line, "#!", 2))
        snprintf(failure->problem, sizeof failure->problem, "cannot execute %.100s: its interpreter %.100s is missing",
                 program, line + 2 + strspn(line + 2, " "));
    else
        snprintf(failure->problem, sizeof failure->problem,
                 "cannot execute %.150s: the dynamic loader that it needs is missing", program);
}

/* As execvpe(), but the PATH is the harness's own. Returns only when nothing could be executed. */
static void execute(struct request *request, char **environment, struct failure *failure) {
    const char *program = request->arguments[0], *path = variable_of(environment, "PATH");
    char candidate[PATH_ROOM];

    snprintf(failure->problem, sizeof failure->problem, "cannot execute %.200s", program);
    failure->error = ENOENT;
    if (strchr(program, '/'))
        path = "";
    for (const char *at = path ? path : STANDARD_PATH, *end; at; at = *end ? end + 1 : NULL) {
        end = at + strcspn(at, ":");
        snprintf(candidate, sizeof candidate, "%.*s%s%s", (int)(end - at), at, end > at ? "/" : "", program);
        execve(candidate, request->arguments, environment);
        if (errno == ENOENT && access(candidate, F_OK) == 0)
            explain_missing(failure, candidate);
        if (errno != ENOENT && errno != ENOTDIR)
            failure->error = errno;
    }
}

static void reset_signals(void) {
    sigset_t none;

    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

static void become_harness(struct activation *activation, const int streams[3], int report) {
    struct request *request = &activation->request;
    struct failure failure = {0};
    const char *step = NULL;

    /* Without the key it may be looked at, as the kernel asks for before a process may set its own score. */
    if (request->key)
        explicit_bzero(request->key, KEY_BYTES);
    prctl(PR_SET_DUMPABLE, 1);
    setsid();
    for (int i = 0; i < 3; i++)
        dup2(streams[i], i); /* all are above 2, and the copies are not close-on-exec */
    umask(022);
    char **environment = make_environment(activation);
    if (!environment)
        step = "make the environment";
    if (request->oom_asked)
        set_oom_score(activation);
    if (!step)
        step = set_credentials(request);
    if (!step && request->working_directory && chdir(request->working_directory))
        step = request->working_directory;
    if (step) {
        failure.error = errno;
        snprintf(failure.problem, sizeof failure.problem, "cannot %s%.200s",
                 step == request->working_directory ? "enter the working directory " : "", step);
    } else {
        reset_signals();
        execute(request, environment, &failure);
    }
    write_all(report, &failure, sizeof failure);
    _exit(127);
}

/* True once the kernel has closed the pipe, which it does when the program starts. */
static bool has_started(struct activation *activation, int report) {
    struct pollfd polled = {report, POLLIN, 0};
    struct failure failure = {ETIMEDOUT, "the harness did not start in time"};

    if (poll(&polled, 1, START_WAIT_MS) > 0) {
        ssize_t got = read(report, &failure, sizeof failure); /* written at once, and shorter than any pipe */
        if (got == 0)
            return true;
    }
    activation->error = failure.error;
    snprintf(activation->problem, sizeof activation->problem, "%s", failure.problem);
    return false;
}

bool launch(struct activation *activation, const int standard_streams[3]) {
    int report[2];

    if (pipe2(report, O_CLOEXEC)) {
        activation->error = errno;
        strcpy(activation->problem, "cannot make a pipe");
        return false;
    }
    pid_t pid = fork();
    if (pid == 0)
        become_harness(activation, standard_streams, report[1]);
    close(report[1]);
    if (pid < 0) {
        activation->error = errno;
        strcpy(activation->problem, "cannot fork");
    }
    activation->worker = pid < 0 ? (struct identity){0} : identity_of(pid);
    bool started = pid > 0 && has_started(activation, report[0]);
    close(report[0]);
    return started;
}
