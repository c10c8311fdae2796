/* Who was there before the launch: never killed, whatever it carries. It lies in the activation's folder with the
   nonce, one line each, for a sweep after supervisor and guardian are dead. */
#include "activation.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BASELINE_ROOM (1 << 20)

static int by_pid(const void *one, const void *other) {
    return ((const struct identity *)one)->pid - ((const struct identity *)other)->pid;
}

bool baseline_write(struct activation *activation) {
    struct table table = {0};
    struct text text = {0};

    if (!table_scan(&table))
        return false;
    text.room = 64 + table.count * 48;
    text.at = malloc(text.room);
    activation->baseline = calloc(table.count, sizeof *activation->baseline);
    if (!text.at || !activation->baseline)
        return false;
    text_add(&text, "%s\n", activation->nonce);
    for (size_t i = 0; i < table.count; i++) {
        activation->baseline[i] = table.list[i].identity;
        text_add(&text, "%d %llu\n", (int)table.list[i].identity.pid, table.list[i].identity.start);
    }
    activation->baseline_count = table.count;
    qsort(activation->baseline, table.count, sizeof *activation->baseline, by_pid);
    bool written = folder_write(&activation->folder, "baseline", text.at, text.length);
    free(text.at);
    munmap(table.list, table.room * sizeof *table.list);
    return written;
}

/* The nonce and who was there before the launch, as the guardian wrote them. A nonce of another form is none: a
   short one would fit every marker. */
bool baseline_read(struct activation *activation) {
    char *text = malloc(BASELINE_ROOM), *at;
    struct identity identity;
    int used;

    if (!text || folder_read(&activation->folder, "baseline", text, BASELINE_ROOM) < 0)
        return false;
    if (strcspn(text, "\n") != NONCE_DIGITS || strspn(text, "0123456789abcdef") != NONCE_DIGITS)
        return false;
    snprintf(activation->nonce, sizeof activation->nonce, "%.*s", NONCE_DIGITS, text);
    snprintf(activation->marker, sizeof activation->marker, MARKER "=%s", activation->nonce);
    activation->baseline = calloc(BASELINE_ROOM / 4, sizeof identity);
    for (at = text + NONCE_DIGITS; activation->baseline; at += used) {
        if (sscanf(at, "%d %llu%n", &identity.pid, &identity.start, &used) != 2)
            break;
        activation->baseline[activation->baseline_count++] = identity;
    }
    free(text);
    return true;
}
