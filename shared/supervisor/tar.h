/* The part of the tar format that `unpack` and `pack` share: ustar with GNU's long names and large numbers, and of
   pax its paths and sizes, which is what Python's tarfile writes. */
#ifndef PADDOCK_TAR_H
#define PADDOCK_TAR_H

#include "supervisor.h"

#define TAR_BLOCK 512
#define TAR_PATH_ROOM 4096

struct tar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], checksum[8], type, link[100];
    char magic[6], version[2], uname[32], gname[32], major[8], minor[8], prefix[155], unused[12];
};

enum tar_type { TAR_FILE = '0', TAR_HARDLINK = '1', TAR_SYMLINK = '2', TAR_FOLDER = '5' };

struct tar_entry {
    char type; /* 0: the end of the stream */
    mode_t mode;
    uint64_t size;
    bool sized; /* by a description before the header */
    char name[TAR_PATH_ROOM], link[TAR_PATH_ROOM];
};

bool tar_next(struct tar_entry *entry);
bool tar_read(void *bytes, size_t length); /* exactly so many from stdin */
bool tar_skip_padding(const struct tar_entry *entry);
bool tar_number(const char *field, size_t room, uint64_t *number);
void tar_put_number(char *field, size_t room, uint64_t number);
unsigned tar_checksum(const struct tar_header *header);

#endif
