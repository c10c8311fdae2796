/* The harness's two outputs. The harness writes into pipes that are always emptied, so it never waits; the start
   of each output stands in its file at once, and the end is kept in a ring and put behind it at the end. */
#include "activation.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHUNK 65536

static const char *const names[2] = {"stdout", "stderr"};

/* Before the fork, so that the guardian has the files and the rings, too. */
bool streams_open(struct activation *activation) {
    for (int which = 0; which < 2; which++) {
        struct stream *stream = &activation->streams[which];
        stream->pipe = -1;
        stream->file = openat(activation->folder.fd, names[which],
                              O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        if (stream->file < 0)
            return false;
        if (activation->request.tail_bytes == 0)
            continue;
        stream->ring = mmap(NULL, activation->request.tail_bytes, PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stream->ring == MAP_FAILED)
            return false;
    }
    return true;
}

static size_t write_head(struct activation *activation, struct stream *stream, const char *bytes, size_t length) {
    size_t done = 0;
    uint64_t room = activation->request.head_bytes - stream->head;

    if (stream->error || stream->ringed) /* behind a gap nothing belongs to the head any more */
        return 0;
    if (length > room)
        length = (size_t)room;
    while (done < length) {
        ssize_t written = write(stream->file, bytes + done, length - done);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0) {
            stream->error = written < 0 ? errno : EIO;
            break;
        }
        done += (size_t)written;
    }
    stream->head += done;
    return done;
}

static void write_ring(struct stream *stream, uint64_t room, const char *bytes, size_t length) {
    while (room && length) {
        uint64_t at = stream->ringed % room;
        size_t part = length < room - at ? length : (size_t)(room - at);
        memcpy(stream->ring + at, bytes, part);
        stream->ringed += part;
        bytes += part;
        length -= part;
    }
}

/* All that is in the pipe now; a flood ends at a share, so that signals and deadlines get their turn. */
void streams_pump(struct activation *activation, int which) {
    static char chunk[CHUNK];
    struct stream *stream = &activation->streams[which];
    ssize_t got = -1;

    for (int share = 0; stream->pipe >= 0 && share < 2 * PIPE_BYTES / CHUNK; share++) {
        got = read(stream->pipe, chunk, sizeof chunk);
        if (got <= 0)
            break;
        size_t headed = write_head(activation, stream, chunk, (size_t)got);
        write_ring(stream, activation->request.tail_bytes, chunk + headed, (size_t)got - headed);
        stream->total += (uint64_t)got;
    }
    if (got == 0) {
        close(stream->pipe);
        stream->pipe = -1;
    }
}

static void append_tail(struct stream *stream, uint64_t room) {
    uint64_t length = stream->ringed < room ? stream->ringed : room;
    uint64_t from = stream->ringed - length;

    while (stream->tail < length) {
        uint64_t at = (from + stream->tail) % room;
        uint64_t part = length - stream->tail < room - at ? length - stream->tail : room - at;
        ssize_t written = write(stream->file, stream->ring + at, part);
        if (written <= 0)
            break;
        stream->tail += (uint64_t)written;
    }
    if (stream->tail < length && !stream->error)
        stream->error = errno;
}

/* What is left in the pipes, then the tails. A survivor may hold a pipe open: what it writes later is not told. */
void streams_finish(struct activation *activation) {
    for (int which = 0; which < 2; which++) {
        struct stream *stream = &activation->streams[which];
        streams_pump(activation, which);
        if (stream->ringed)
            append_tail(stream, activation->request.tail_bytes);
    }
}
