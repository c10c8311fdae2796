/* Sentences for people, numbers, JSON text and time. Nothing here knows what a sandbox is. */
#include "supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void text_add(struct text *text, const char *format, ...) {
    va_list arguments;
    size_t left = text->room - text->length;

    va_start(arguments, format);
    int length = vsnprintf(text->at + text->length, left, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= left) {
        text->at[text->length] = '\0';
        text->full = true;
        return;
    }
    text->length += (size_t)length;
}

/* Bytes that are no printable ASCII become \u00XX: a process may call itself anything, and JSON is UTF-8. */
void text_add_string(struct text *text, const char *string) {
    text_add(text, "\"");
    for (const unsigned char *at = (const unsigned char *)string; *at; at++) {
        if (*at == '"' || *at == '\\')
            text_add(text, "\\%c", *at);
        else if (*at < 0x20 || *at > 0x7e)
            text_add(text, "\\u%04x", *at);
        else
            text_add(text, "%c", *at);
    }
    text_add(text, "\"");
}

int fail(const char *format, ...) {
    va_list arguments;

    va_start(arguments, format);
    dprintf(STDERR_FILENO, "paddock-supervisor: ");
    vdprintf(STDERR_FILENO, format, arguments);
    dprintf(STDERR_FILENO, "\n");
    va_end(arguments);
    return EXIT_FAILED;
}

bool parse_number(const char *digits, uint64_t limit, uint64_t *number) {
    uint64_t value = 0;

    if (!*digits)
        return false;
    for (; *digits; digits++) {
        if (*digits < '0' || *digits > '9')
            return false;
        unsigned digit = (unsigned)(*digits - '0');
        if (value > (limit - digit) / 10)
            return false;
        value = value * 10 + digit;
    }
    *number = value;
    return true;
}

bool parse_owner(const char *words, uid_t *uid, gid_t *gid) {
    unsigned user, group;
    char rest;

    if (sscanf(words, "%u:%u%c", &user, &group, &rest) != 2)
        return false;
    *uid = user, *gid = group;
    return true;
}

static int64_t clock_ms(clockid_t clock) {
    struct timespec now;

    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int64_t monotonic_ms(void) { return clock_ms(CLOCK_MONOTONIC); }

int64_t unix_ms(void) { return clock_ms(CLOCK_REALTIME); }

void pause_ms(int64_t duration_ms) {
    struct timespec left = {duration_ms / 1000, (duration_ms % 1000) * 1000000};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

bool write_all(int fd, const void *bytes, size_t length) {
    const char *at = bytes;

    while (length) {
        ssize_t written = write(fd, at, length);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return false;
        at += written;
        length -= (size_t)written;
    }
    return true;
}

/* Low numbers belong to stdio: were they free, a folder of ours would become some child's standard output. */
void occupy_standard_streams(void) {
    for (int fd = open("/", O_RDONLY | O_DIRECTORY); fd >= 0; fd = open("/", O_RDONLY | O_DIRECTORY)) {
        if (fd > STDERR_FILENO) {
            close(fd);
            return;
        }
    }
}

/* A daemon that keeps the streams of the command that started it makes whoever waits for their end hang. */
void close_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        close(fd);
    occupy_standard_streams();
}
