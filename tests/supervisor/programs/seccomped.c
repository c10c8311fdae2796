/* Runs a command under a seccomp filter: `seccomped deny NUMBER[,NUMBER...] COMMAND...` answers these system calls
   with ENOSYS; `seccomped pause NUMBER WHICH INPUT COMMAND...` holds the WHICHth such call of the command and of all that it
   starts, whose stdin is the file INPUT: prints `paused PID`, lets it go on when a line comes on stdin, and prints `goes on`. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 16

static int install(const unsigned *numbers, int count, unsigned action, unsigned flags) {
    struct sock_filter filter[2 * MOST + 2];
    struct sock_fprog program = {.filter = filter};
    unsigned short length = 0;

    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, numbers[i], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    }
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    program.len = length;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        exit(70);
    int result = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program);
    if (result < 0) {
        perror("seccomp");
        exit(70);
    }
    return result;
}

static void send_descriptor(int through, int fd) {
    char byte = 0, room[CMSG_SPACE(sizeof fd)];
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *told = CMSG_FIRSTHDR(&message);

    told->cmsg_level = SOL_SOCKET;
    told->cmsg_type = SCM_RIGHTS;
    told->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(told), &fd, sizeof fd);
    if (sendmsg(through, &message, 0) != 1)
        exit(71);
}

static int receive_descriptor(int through) {
    char byte, room[CMSG_SPACE(sizeof(int))];
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    int fd;

    if (recvmsg(through, &message, MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&message))
        exit(71);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

static void watch(int listener, int which) {
    struct pollfd polled = {listener, POLLIN, 0};
    char line[16];

    while (poll(&polled, 1, -1) > 0 && polled.revents & POLLIN) {
        struct seccomp_notif call = {0};
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call))
            continue;
        if (--which == 0) {
            printf("paused %d\n", (int)call.pid);
            fflush(stdout);
            if (read(STDIN_FILENO, line, sizeof line) < 0)
                exit(72);
        }
        struct seccomp_notif_resp go_on = {.id = call.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &go_on);
        if (which == 0) {
            printf("goes on\n");
            fflush(stdout);
        }
    }
}

int main(int argc, char **argv) {
    unsigned numbers[MOST];
    int count = 0, ends[2];

    if (argc < 4)
        return 64;
    for (char *at = strtok(argv[2], ","); at && count < MOST; at = strtok(NULL, ","))
        numbers[count++] = (unsigned)atoi(at);
    if (!strcmp(argv[1], "deny")) {
        install(numbers, count, SECCOMP_RET_ERRNO | ENOSYS, 0);
        execv(argv[3], argv + 3);
        return 127;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        return 71;
    int input = dup(STDIN_FILENO); /* the command's own stdin is argv[4], a file */
    pid_t pid = fork();
    if (pid == 0) {
        close(input);
        if (!freopen(argv[4], "r", stdin))
            return 66;
        send_descriptor(ends[1], install(numbers, count, SECCOMP_RET_USER_NOTIF, SECCOMP_FILTER_FLAG_NEW_LISTENER));
        dup2(STDERR_FILENO, STDOUT_FILENO); /* stdout tells of pauses */
        execv(argv[5], argv + 5);
        return 127;
    }
    close(ends[1]);
    watch(receive_descriptor(ends[0]), atoi(argv[3]));
    waitpid(pid, NULL, 0);
    return 0;
}
