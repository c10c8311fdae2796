/* `relay`: whatever connects to 127.0.0.1:PORT in the sandbox is connected to a Unix socket, so that a sandbox without
   any network reaches what serves there and nothing else.

   One process and one loop serve all connections. Each direction ends by itself (half-close), and what one side
   cannot take now waits in a buffer of bounded size, so that a slow reader slows down its own writer only. */
#include "supervisor.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define BUFFER 65536
#define BATCH 64
#define BACKLOG 1024
#define TICK_MS 20         /* while a connection waits for a place in the socket's queue, or for a free descriptor */
#define QUEUE_WAIT_MS 10000

enum side { CLIENT, SERVER };

struct connection;

struct end {
    struct connection *connection;
    int fd;
    uint32_t watched;
    char *held; /* what came from here and was not passed on yet */
    size_t from, to;
    bool read_all, told; /* the end of its stream was seen; and was passed on */
};

struct connection {
    struct end ends[2];
    int64_t since_ms; /* waits for the socket's queue since then */
    bool dead;
    struct connection *next;
};

static struct {
    int events, listener;
    bool listening, untidy; /* untidy: some connection is dead, or still to be connected */
    struct sockaddr_un server;
    struct connection *all;
} relay;

static struct end *other(struct end *end) { return &end->connection->ends[end == &end->connection->ends[CLIENT]]; }

static void watch(struct end *end) {
    struct epoll_event event = {.data.ptr = end};
    struct end *peer = other(end);

    if (!end->read_all && end->to < BUFFER)
        event.events |= EPOLLIN;
    if (peer->from < peer->to)
        event.events |= EPOLLOUT;
    if (end->fd < 0 || event.events == end->watched)
        return;
    /* Watched for nothing, a descriptor still reports that its peer is gone, again and again. */
    int change = !event.events ? EPOLL_CTL_DEL : end->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    epoll_ctl(relay.events, change, end->fd, &event);
    end->watched = event.events;
}

/* The client is told by a reset: an orderly end would look like a whole answer. */
static void cut(struct connection *connection) {
    struct linger at_once = {1, 0};

    setsockopt(connection->ends[CLIENT].fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    connection->dead = relay.untidy = true;
}

static bool fill(struct end *end) {
    ssize_t got = read(end->fd, end->held + end->to, BUFFER - end->to);

    if (got < 0)
        return errno == EAGAIN || errno == EINTR;
    end->to += (size_t)got;
    end->read_all = got == 0;
    return true;
}

static bool pass_on(struct end *end) {
    int fd = other(end)->fd;

    while (end->from < end->to) {
        ssize_t written = send(fd, end->held + end->from, end->to - end->from, MSG_NOSIGNAL);
        if (written < 0)
            return errno == EAGAIN || errno == EINTR;
        end->from += (size_t)written;
    }
    end->from = end->to = 0;
    if (end->read_all && !end->told) {
        end->told = true;
        shutdown(fd, SHUT_WR);
    }
    return true;
}

static void serve(struct end *end, uint32_t came) {
    struct connection *connection = end->connection;

    if (connection->dead)
        return;
    bool sound = !(came & (EPOLLIN | EPOLLHUP | EPOLLERR)) || end->read_all || end->to == BUFFER || fill(end);
    sound = sound && pass_on(end) && pass_on(other(end));
    if (!sound)
        cut(connection);
    else if (end->told && other(end)->told)
        connection->dead = relay.untidy = true;
    watch(end);
    watch(other(end));
}

/* Connected, refused for good, or (the socket's queue being full) to be tried again. */
static void reach_server(struct connection *connection) {
    struct end *server = &connection->ends[SERVER];
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    if (fd >= 0 && connect(fd, (struct sockaddr *)&relay.server, sizeof relay.server) == 0) {
        server->fd = fd;
        watch(&connection->ends[CLIENT]);
        watch(server);
        return;
    }
    int problem = errno;
    if (fd >= 0)
        close(fd);
    relay.untidy = true;
    if (problem != EAGAIN || monotonic_ms() - connection->since_ms > QUEUE_WAIT_MS)
        cut(connection);
}

static struct connection *new_connection(int fd) {
    struct connection *connection = calloc(1, sizeof *connection);
    int at_once = 1;

    if (!connection)
        return NULL;
    for (int side = CLIENT; side <= SERVER; side++)
        connection->ends[side] = (struct end){.connection = connection, .fd = -1, .held = malloc(BUFFER)};
    connection->ends[CLIENT].fd = fd;
    connection->since_ms = monotonic_ms();
    connection->dead = !connection->ends[CLIENT].held || !connection->ends[SERVER].held;
    relay.untidy |= connection->dead;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
    return connection;
}

static void listen_for(bool wanted) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};

    if (wanted != relay.listening)
        epoll_ctl(relay.events, wanted ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, relay.listener, &event);
    relay.listening = wanted;
}

/* Without a free descriptor nobody is accepted for a tick; whoever comes waits in the listener's queue. */
static void accept_all(void) {
    int fd;

    while ((fd = accept4(relay.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *connection = new_connection(fd);
        if (!connection) {
            close(fd);
            continue;
        }
        connection->next = relay.all;
        relay.all = connection;
        if (!connection->dead)
            reach_server(connection);
    }
    listen_for(errno == EAGAIN || errno == EINTR || errno == ECONNABORTED);
}

/* After each batch, so that no event in it points to what is freed already. */
static void tidy(void) {
    relay.untidy = false;
    for (struct connection **at = &relay.all, *connection; (connection = *at);) {
        if (!connection->dead && connection->ends[SERVER].fd < 0)
            reach_server(connection); /* which may leave it untidy again */
        if (!connection->dead) {
            at = &connection->next;
            continue;
        }
        *at = connection->next;
        for (int side = CLIENT; side <= SERVER; side++) {
            if (connection->ends[side].fd >= 0)
                close(connection->ends[side].fd);
            free(connection->ends[side].held);
        }
        free(connection);
    }
}

static void run_relay(void) {
    struct epoll_event came[BATCH];

    listen_for(true);
    for (;;) {
        int count = epoll_wait(relay.events, came, BATCH, relay.untidy || !relay.listening ? TICK_MS : -1);
        listen_for(true);
        for (int i = 0; i < count; i++) {
            if (came[i].data.ptr)
                serve(came[i].data.ptr, came[i].events);
            else
                accept_all();
        }
        if (relay.untidy)
            tidy();
    }
}

static int open_listener(uint16_t port) {
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int again = 1;

    relay.listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (relay.listener < 0)
        return fail("cannot make a socket: %s", strerror(errno));
    setsockopt(relay.listener, SOL_SOCKET, SO_REUSEADDR, &again, sizeof again);
    if (bind(relay.listener, (struct sockaddr *)&place, sizeof place) == 0 && listen(relay.listener, BACKLOG) == 0)
        return EXIT_DONE;
    int problem = errno;
    fail("cannot listen on 127.0.0.1:%u: %s", (unsigned)port, strerror(problem));
    return problem == EADDRINUSE ? EXIT_TAKEN : EXIT_FAILED;
}

static void allow_many_descriptors(void) {
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

int command_relay(int argc, char **argv) {
    uint64_t port;

    if (!parse_number(argv[1], 65535, &port) || (argc > 3 && strcmp(argv[3], "detach")))
        return EXIT_USAGE;
    relay.server.sun_family = AF_UNIX;
    if (strlen(argv[2]) >= sizeof relay.server.sun_path)
        return fail("the path of a Unix socket has at most %zu bytes: %s", sizeof relay.server.sun_path - 1, argv[2]);
    strcpy(relay.server.sun_path, argv[2]);
    allow_many_descriptors();
    int status = open_listener((uint16_t)port);
    if (status != EXIT_DONE)
        return status;
    relay.events = epoll_create1(EPOLL_CLOEXEC);
    if (relay.events < 0)
        return fail("cannot await events: %s", strerror(errno));
    pid_t pid = argc > 3 ? fork() : 0;
    if (pid != 0)
        return pid > 0 ? EXIT_DONE : fail("cannot fork: %s", strerror(errno));
    if (argc > 3) {
        setsid();
        close_standard_streams();
    } else {
        write_all(STDOUT_FILENO, "ready\n", 6);
    }
    run_relay();
    return EXIT_DONE;
}
