/* Tar headers: their numbers, their checksum, and reading one entry after the other from stdin. See tar.h. */
#include "tar.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PAX_MOST 65536

/* Octal digits, or with the first bit set a big-endian number. */
bool tar_number(const char *field, size_t room, uint64_t *number) {
    const unsigned char *at = (const unsigned char *)field;
    uint64_t value = 0;

    if (*at & 0x80) {
        for (size_t i = 1; i < room; i++) {
            if (value >> 55)
                return false;
            value = value << 8 | at[i];
        }
        *number = value;
        return true;
    }
    while (room && *at == ' ')
        at++, room--;
    for (; room && *at >= '0' && *at <= '7'; at++, room--)
        value = value << 3 | (*at - '0');
    *number = value;
    return room == 0 || *at == ' ' || *at == '\0';
}

void tar_put_number(char *field, size_t room, uint64_t number) {
    if (number < UINT64_C(1) << 3 * (room - 1)) {
        char digits[24];
        snprintf(digits, sizeof digits, "%0*llo", (int)room - 1, (unsigned long long)number);
        memcpy(field, digits, room);
        return;
    }
    for (size_t i = room; i-- > 1; number >>= 8)
        field[i] = (char)(number & 0xff);
    field[0] = (char)0x80;
}

/* The sum of all bytes, those of the checksum itself taken as blanks. */
unsigned tar_checksum(const struct tar_header *header) {
    const unsigned char *at = (const unsigned char *)header;
    unsigned sum = sizeof header->checksum * ' ';

    for (size_t i = 0; i < sizeof *header; i++)
        if (i < offsetof(struct tar_header, checksum) || i >= offsetof(struct tar_header, type))
            sum += at[i];
    return sum;
}

bool tar_read(void *bytes, size_t length) {
    char *at = bytes;

    while (length) {
        ssize_t got = read(STDIN_FILENO, at, length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        length -= (size_t)got;
    }
    return true;
}

static bool skip(uint64_t length) {
    static char nothing[65536];

    for (size_t part; length; length -= part) {
        part = length < sizeof nothing ? (size_t)length : sizeof nothing;
        if (!tar_read(nothing, part))
            return false;
    }
    return true;
}


static uint64_t padding(uint64_t size) { return (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK; }

static bool take_text(char *to, const char *text) {
    size_t length = strlen(text);

    if (length >= TAR_PATH_ROOM)
        return false;
    memcpy(to, text, length + 1);
    return true;
}

/* `length key=value\n`, again and again; what is no path, link or size is of no use here. */
static bool take_pax(struct tar_entry *entry, char *records, size_t length) {
    for (char *at = records, *end = records + length; at < end;) {
        char *blank = memchr(at, ' ', (size_t)(end - at)), *equals;
        uint64_t whole;
        if (!blank)
            return false;
        *blank = '\0';
        if (!parse_number(at, length, &whole) || whole < (uint64_t)(blank - at) + 3 || whole > (uint64_t)(end - at))
            return false;
        at[whole - 1] = '\0';
        if (!(equals = strchr(blank + 1, '=')))
            return false;
        *equals = '\0';
        if (!strcmp(blank + 1, "path") && !take_text(entry->name, equals + 1))
            return false;
        if (!strcmp(blank + 1, "linkpath") && !take_text(entry->link, equals + 1))
            return false;
        if (!strcmp(blank + 1, "size"))
            entry->sized = parse_number(equals + 1, INT64_MAX, &entry->size);
        at += whole;
    }
    return true;
}

/* What says more of the entry that follows: a long name or link, or pax records. */
static bool take_description(struct tar_entry *entry, char type, uint64_t size) {
    static char text[PAX_MOST + 1];

    if (size > PAX_MOST || !tar_read(text, (size_t)size) || !skip(padding(size)))
        return false;
    text[size] = '\0';
    if (type == 'L')
        return take_text(entry->name, text);
    if (type == 'K')
        return take_text(entry->link, text);
    return type != 'x' || take_pax(entry, text, (size_t)size);
}

static void take_header(struct tar_entry *entry, const struct tar_header *header, uint64_t size, uint64_t mode) {
    bool prefixed = !memcmp(header->magic, "ustar", 6) && *header->prefix; /* GNU's own magic ends in a blank */

    if (!*entry->name)
        snprintf(entry->name, TAR_PATH_ROOM, "%.155s%s%.100s", prefixed ? header->prefix : "", prefixed ? "/" : "",
                 header->name);
    for (size_t length = strlen(entry->name); length > 1 && entry->name[length - 1] == '/'; length--)
        entry->name[length - 1] = '\0';
    if (!*entry->link)
        snprintf(entry->link, TAR_PATH_ROOM, "%.100s", header->link);
    if (!entry->sized)
        entry->size = size;
    entry->type = header->type ? header->type : TAR_FILE;
    entry->mode = (mode_t)mode & 07777;
    if (entry->type != TAR_FILE)
        entry->size = 0;
}

/* False with a sentence on stderr. The type is 0 at the end mark; without one the stream is not whole. */
bool tar_next(struct tar_entry *entry) {
    struct tar_header header;
    uint64_t size, mode, checksum;

    *entry = (struct tar_entry){0};
    for (;;) {
        if (!tar_read(&header, sizeof header))
            return fail("the stream ended without its end mark"), false;
        if (!*header.name && !*header.magic)
            return true;
        if (!tar_number(header.checksum, sizeof header.checksum, &checksum) || checksum != tar_checksum(&header) ||
            !tar_number(header.size, sizeof header.size, &size) || !tar_number(header.mode, sizeof header.mode, &mode) ||
            size > INT64_MAX)
            return fail("the stream is no tar stream, or damaged"), false;
        if (header.type == 'L' || header.type == 'K' || header.type == 'x' || header.type == 'g') {
            if (!take_description(entry, header.type, size))
                return fail("a description in the stream is damaged, or too long"), false;
            continue;
        }
        take_header(entry, &header, size, mode);
        return true;
    }
}

/* What stands behind an entry's bytes up to the next header. */
bool tar_skip_padding(const struct tar_entry *entry) { return skip(padding(entry->size)); }
