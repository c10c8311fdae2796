/* HMAC-SHA-256 (FIPS 198-1, FIPS 180-4), for what the supervisor says in its receipt. */
#ifndef PADDOCK_SHA256_H
#define PADDOCK_SHA256_H

#include <stddef.h>

#define DIGEST_BYTES 32

void hmac_sha256(const unsigned char key[DIGEST_BYTES], const void *message, size_t length,
                 unsigned char digest[DIGEST_BYTES]);

#endif
