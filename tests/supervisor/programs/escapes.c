/* What a harness may do to outlive its supervisor: `escapes WAY NAME REPORT LINES exit|stay`.

   Every process that should be found again is called NAME and writes its pid into REPORT. When there are LINES, the
   harness itself exits, or stays. Whatever a failing test would leave behind ends by itself after LIFE_S. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LIFE_S 90

static const char *name, *report_path;
static int report_fd;
static time_t started;
static int *births;

static void report(void) {
    char line[32];
    int length = snprintf(line, sizeof line, "%d\n", (int)getpid());

    if (write(report_fd, line, (size_t)length) != length)
        abort();
}

static void become_known(void) {
    alarm(LIFE_S);
    prctl(PR_SET_NAME, name);
    report();
}

static void live(void) {
    become_known();
    for (;;)
        pause();
}

static int is_over(void) { return time(NULL) - started > LIFE_S; }

/* The file stays open only where the way is not about closing it. */
static void close_all(void) { syscall(436 /* close_range */, 0, ~0U, 0); }

static pid_t forked(void) {
    pid_t pid = fork();

    if (pid < 0)
        abort();
    return pid;
}

static void double_fork(void) {
    pid_t pid = forked();

    if (pid == 0) {
        setsid();
        if (forked())
            _exit(0);
        return;
    }
    waitpid(pid, NULL, 0);
}

static void ignore_signals(void) {
    for (int number = 1; number < NSIG; number++)
        if (number != SIGALRM)
            signal(number, SIG_IGN);
}

static void *second_thread(void *nothing) {
    (void)nothing;
    become_known();
    for (;;)
        pause();
    return NULL;
}

static void way_plain(void) {
    if (forked() == 0)
        live();
}

static void way_setsid(void) {
    if (forked() == 0) {
        setsid();
        live();
    }
}

static void way_double_fork(void) {
    pid_t self = getpid();

    double_fork();
    if (getpid() != self)
        live();
}

static void way_own_group(void) {
    if (forked() == 0) {
        setpgid(0, 0);
        live();
    }
}

/* A new program without any variable: what /proc/PID/environ shows is empty. */
static void exec_self(const char *way, char **environment) {
    char *arguments[] = {"escapes", (char *)way, (char *)name, (char *)report_path, "0", "exit", NULL};

    execve("/proc/self/exe", arguments, environment);
    abort();
}

static void way_empty_environment(void) {
    char *none[] = {NULL};

    if (forked() == 0)
        exec_self("live", none);
}

static void way_closed_files(void) {
    if (forked() == 0) {
        become_known();
        close_all();
        for (;;)
            pause();
    }
}

static void way_everything(void) {
    pid_t self = getpid();
    char *none[] = {NULL};

    double_fork();
    if (getpid() == self)
        return;
    setpgid(0, 0);
    ignore_signals();
    exec_self("live_closed", none);
}

static void way_ignored_signals(void) {
    if (forked() == 0) {
        setsid();
        ignore_signals();
        live();
    }
}

static void way_clone_parent(void) {
    if (syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0) == 0) {
        setsid();
        live();
    }
}

static void way_nested_subreaper(void) {
    if (forked() == 0) {
        pid_t self = getpid();
        setsid();
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        double_fork();
        if (getpid() == self)
            double_fork();
        live();
    }
}

static void way_stopped(void) {
    if (forked() == 0) {
        setsid();
        become_known();
        raise(SIGSTOP);
        for (;;)
            pause();
    }
}

/* The first thread ends, and /proc calls the process a zombie while its second thread lives. */
static void way_threads(void) {
    pthread_t thread;

    if (forked() == 0) {
        setsid();
        alarm(LIFE_S);
        prctl(PR_SET_NAME, name);
        if (pthread_create(&thread, NULL, second_thread, NULL))
            abort();
        pthread_exit(NULL);
    }
}

static void way_non_dumpable(void) {
    if (forked() == 0) {
        setsid();
        prctl(PR_SET_DUMPABLE, 0);
        live();
    }
}

static void way_vfork(void) {
    if (forked() == 0) {
        setsid();
        become_known();
        if (vfork() == 0) {
            become_known();
            for (;;)
                pause();
        }
        for (;;)
            pause();
    }
}

static void way_zombies(void) {
    if (forked() == 0) {
        setsid();
        become_known();
        for (int i = 0; i < 50; i++)
            if (forked() == 0)
                _exit(0);
        for (;;)
            pause();
    }
}

/* Each keeps a few short-lived children, and whoever loses its parent takes its place: killing one after the other
   breeds more. */
static void storm(void) {
    become_known();
    for (pid_t parent = getpid(); !is_over();) {
        for (int i = 0; i < 4 && __atomic_add_fetch(births, 1, __ATOMIC_RELAXED) < 20000; i++) {
            if (fork() != 0)
                continue;
            setsid();
            usleep(5000);
            if (getppid() == parent)
                _exit(0);
            parent = getpid();
            become_known();
            i = 0;
        }
        usleep(2000);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
    }
    _exit(0);
}

static void way_fork_storm(void) {
    for (int i = 0; i < 8; i++)
        if (forked() == 0)
            storm();
}

/* Never the same process twice: each forks and exits at once. */
static void way_relay(void) {
    if (forked())
        return;
    setsid();
    become_known();
    while (!is_over()) {
        pid_t pid = fork();
        if (pid > 0)
            _exit(0);
    }
    _exit(0);
}

static void way_live(void) { live(); }

static void way_live_closed(void) {
    become_known();
    close_all();
    ignore_signals();
    for (;;)
        pause();
}

static const struct {
    const char *name;
    void (*go)(void);
} ways[] = {
    {"plain", way_plain},
    {"setsid", way_setsid},
    {"double_fork", way_double_fork},
    {"own_group", way_own_group},
    {"empty_environment", way_empty_environment},
    {"closed_files", way_closed_files},
    {"everything", way_everything},
    {"ignored_signals", way_ignored_signals},
    {"clone_parent", way_clone_parent},
    {"nested_subreaper", way_nested_subreaper},
    {"stopped", way_stopped},
    {"threads", way_threads},
    {"non_dumpable", way_non_dumpable},
    {"vfork", way_vfork},
    {"zombies", way_zombies},
    {"fork_storm", way_fork_storm},
    {"relay", way_relay},
    {"live", way_live},
    {"live_closed", way_live_closed},
};

static int lines(void) {
    FILE *written = fopen(report_path, "re");
    int count = 0, letter;

    while ((letter = fgetc(written)) != EOF)
        count += letter == '\n';
    fclose(written);
    return count;
}

int main(int argc, char **argv) {
    if (argc != 6)
        return 64;
    name = argv[2];
    report_path = argv[3];
    started = time(NULL);
    report_fd = open(report_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    births = mmap(NULL, sizeof *births, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report_fd < 0 || births == MAP_FAILED)
        return 65;
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++)
        if (!strcmp(ways[i].name, argv[1]))
            ways[i].go();
    alarm(LIFE_S);
    while (lines() < atoi(argv[4]))
        usleep(1000);
    while (!strcmp(argv[5], "stay"))
        pause();
    return 7;
}
