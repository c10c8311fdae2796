/* See sha256.h. Written after the standard; checked against Python's hmac by the tests. */
#include "sha256.h"

#include <stdint.h>
#include <string.h>

#define BLOCK 64

struct sha256 {
    uint32_t state[8];
    uint64_t length;
    unsigned char block[BLOCK];
};

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t word, int by) { return word >> by | word << (32 - by); }

static void expand(const unsigned char *block, uint32_t words[64]) {
    for (int i = 0; i < 16; i++)
        words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 |
                   block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t low = rotate(words[i - 15], 7) ^ rotate(words[i - 15], 18) ^ words[i - 15] >> 3;
        uint32_t high = rotate(words[i - 2], 17) ^ rotate(words[i - 2], 19) ^ words[i - 2] >> 10;
        words[i] = words[i - 16] + low + words[i - 7] + high;
    }
}

static void compress(struct sha256 *sum) {
    uint32_t words[64], s[8];

    expand(sum->block, words);
    memcpy(s, sum->state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t one = rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25);
        uint32_t two = rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22);
        uint32_t chosen = (s[4] & s[5]) ^ (~s[4] & s[6]), most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t first = s[7] + one + chosen + rounds[i] + words[i];
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + two + most;
    }
    for (int i = 0; i < 8; i++)
        sum->state[i] += s[i];
}

static void begin(struct sha256 *sum) {
    static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

    memcpy(sum->state, start, sizeof start);
    sum->length = 0;
}

static void add(struct sha256 *sum, const void *bytes, size_t length) {
    for (const unsigned char *at = bytes; length--; at++) {
        sum->block[sum->length++ % BLOCK] = *at;
        if (sum->length % BLOCK == 0)
            compress(sum);
    }
}

static void end(struct sha256 *sum, unsigned char digest[DIGEST_BYTES]) {
    uint64_t bits = sum->length * 8;
    unsigned char size[8];

    for (int i = 0; i < 8; i++)
        size[i] = (unsigned char)(bits >> (56 - 8 * i));
    add(sum, "\x80", 1);
    while (sum->length % BLOCK != BLOCK - sizeof size)
        add(sum, "", 1);
    add(sum, size, sizeof size);
    for (int i = 0; i < DIGEST_BYTES; i++)
        digest[i] = (unsigned char)(sum->state[i / 4] >> (24 - 8 * (i % 4)));
}

void hmac_sha256(const unsigned char key[DIGEST_BYTES], const void *message, size_t length,
                 unsigned char digest[DIGEST_BYTES]) {
    unsigned char inner[BLOCK], outer[BLOCK];
    struct sha256 sum;

    memset(inner, 0x36, BLOCK);
    memset(outer, 0x5c, BLOCK);
    for (int i = 0; i < DIGEST_BYTES; i++)
        inner[i] ^= key[i], outer[i] ^= key[i];
    begin(&sum);
    add(&sum, inner, BLOCK);
    add(&sum, message, length);
    end(&sum, digest);
    begin(&sum);
    add(&sum, outer, BLOCK);
    add(&sum, digest, DIGEST_BYTES);
    end(&sum, digest);
}
