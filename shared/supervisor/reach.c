/* reach: whether an address answers from inside a sandbox, in any image. Sends stdin, gives what comes back. */
#include "box.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int connected(const char *host, uint64_t port, int wait_ms) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), problem = 0;
    socklen_t size = sizeof problem;

    if (fd < 0 || inet_pton(AF_INET, host, &address.sin_addr) != 1)
        return errno = EINVAL, -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS)
        return -1;
    struct pollfd ready = {fd, POLLOUT, 0};
    if (poll(&ready, 1, wait_ms) != 1)
        return errno = ETIMEDOUT, -1;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &size) < 0 || problem)
        return errno = problem, -1;
    fcntl(fd, F_SETFL, 0);
    return fd;
}

/* reach ADDRESS PORT WAIT_MS: an IPv4 address */
int command_reach(int argc, char **argv) {
    char bytes[4096];
    uint64_t port, wait_ms;
    ssize_t got;

    (void)argc;
    if (!parse_number(argv[2], 65535, &port) || !parse_number(argv[3], 3600000, &wait_ms))
        return EXIT_USAGE;
    int fd = connected(argv[1], port, (int)wait_ms);
    if (fd < 0)
        return fail("%s:%s is not reached: %s", argv[1], argv[2], strerror(errno));
    while ((got = read(STDIN_FILENO, bytes, sizeof bytes)) > 0)
        if (!write_all(fd, bytes, (size_t)got))
            break;
    shutdown(fd, SHUT_WR);
    while ((got = read(fd, bytes, sizeof bytes)) > 0)
        write_all(STDOUT_FILENO, bytes, (size_t)got);
    return EXIT_DONE;
}
