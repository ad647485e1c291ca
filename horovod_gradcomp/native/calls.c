/* The calls from outside: whole tensors, over threads. No result depends on how many there are. */
#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Elements; starting a thread takes about as long as these. */
#define WORTH_A_THREAD 262144
#define MOST_THREADS 64

/* Rows [from, to) of a span. */
typedef int run_rows(const void *call, const span *s, int64_t from, int64_t to);

/* The rows whose first elements are in [first, last), as if all spans followed each other. */
typedef struct {
    run_rows *run;
    const void *call;
    const span *spans;
    int64_t count;
    int64_t first;
    int64_t last;
    int state;
} part;

/* The first row of a span that begins at or after an element, counted from the span's own. */
static int64_t row_at(const span *s, int64_t element) {
    if (element <= 0) return 0;
    const int64_t row = (element + s->width - 1) / s->width;
    return row < s->rows ? row : s->rows;
}

static void *run_part(void *given) {
    part *own = given;
    int64_t begin = 0;
    for (int64_t i = 0; i < own->count && own->state == GRADCOMP_DONE; i++) {
        const span *s = &own->spans[i];
        const int64_t from = row_at(s, own->first - begin), to = row_at(s, own->last - begin);
        begin += s->rows * s->width;
        if (from < to) own->state = own->run(own->call, s, from, to);
    }
    return NULL;
}

static int run_parts(run_rows *run, const void *call, const span *spans, int64_t count,
                     int threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += spans[i].rows * spans[i].width;
    int64_t number = total / WORTH_A_THREAD;
    number = number < threads ? number : threads;
    number = number < MOST_THREADS ? number : MOST_THREADS;
    number = number > 1 ? number : 1;
    part parts[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    int started[MOST_THREADS], state = GRADCOMP_DONE;
    for (int64_t i = 0; i < number; i++) {
        const int64_t last = i < number - 1 ? total / number * (i + 1) : total;
        parts[i] = (part){run, call, spans, count, total / number * i, last, GRADCOMP_DONE};
        started[i] = i < number - 1 && !pthread_create(&ids[i], NULL, run_part, &parts[i]);
        if (!started[i]) run_part(&parts[i]);
    }
    for (int64_t i = 0; i < number; i++) {
        if (started[i]) pthread_join(ids[i], NULL);
        if (parts[i].state != GRADCOMP_DONE) state = parts[i].state;
    }
    return state;
}

static int encode_rows_of(const void *given, const span *s, int64_t from, int64_t to) {
    const encode_call *call = given;
    const encode_job job = {
        .source = call->source ? call->source + s->start : NULL,
        .x = call->x + s->start,
        .head = (float *)(void *)(call->payload + s->head),
        .codes = call->payload + s->codes,
        .width = s->width,
        .row_bytes = s->row_bytes,
        .numbers = call->numbers,
        .tables = call->tables,
        .start = (uint32_t)s->start,
        .low = call->low,
        .high = call->high,
        .bits = call->bits,
        .headers = call->headers,
        .want_error = call->want_error,
    };
    return gradcomp_active()->kernels[call->kernel].encode(&job, from, to);
}

static int decode_rows_of(const void *given, const span *s, int64_t from, int64_t to) {
    const decode_call *call = given;
    const decode_job job = {
        .out = call->out + s->start,
        .payloads = call->payloads,
        .number = call->number,
        .head = s->head,
        .codes = s->codes,
        .width = s->width,
        .row_bytes = s->row_bytes,
        .numbers = call->numbers,
        .tables = call->tables,
        .scale = call->scale,
        .scaled = call->scaled,
        .bits = call->bits,
        .headers = call->headers,
    };
    return gradcomp_active()->kernels[call->kernel].decode(&job, from, to);
}

/* Sizes of the structures, so that a caller with others notices. */
EXPORT int gradcomp_sizes(void) { return (int)(1000 * sizeof(encode_call) + sizeof(decode_call)); }

EXPORT int gradcomp_encode(const encode_call *call) {
    const int64_t end = call->nbytes < 8 ? call->nbytes : 8; /* padding and flag are no more */
    memset(call->payload + call->nbytes - end, 0, (size_t)end);
    return run_parts(encode_rows_of, call, call->spans, call->count, call->threads);
}

EXPORT int gradcomp_decode(const decode_call *call) {
    return run_parts(decode_rows_of, call, call->spans, call->count, call->threads);
}

/* Select by way of a sample; returns whether it was possible. */
static int largest_of_sample(const float *x, int64_t count, int64_t k, int64_t rank, int64_t stride,
                             int64_t *out) {
    const level *active = gradcomp_active();
    const int64_t samples = (count + stride - 1) / stride, room = 2 * k;
    const int64_t floats = samples > room ? samples : room;
    float *values = malloc((size_t)floats * sizeof *values);
    int64_t *found = malloc((size_t)room * sizeof *found), greater, number = 0;
    if (values && found) {
        for (int64_t i = 0; i < samples; i++) values[i] = x[i * stride];
        const int32_t limit = active->kth(values, samples, rank, &greater);
        number = active->above(x, count, limit ? limit - 1 : 0, found, room);
    }
    const int enough = k <= number && number <= room; /* else many are equal, or it misled */
    if (enough) {
        for (int64_t i = 0; i < number; i++) values[i] = x[found[i]];
        active->largest(values, number, k, out);
        for (int64_t i = 0; i < k; i++) out[i] = found[out[i]];
    }
    free(values);
    free(found);
    return enough;
}

/* Ascending positions of the k largest magnitudes, 1 <= k <= count; ties by lowest position.
 * One in stride is looked at first, where rank says which of these is a little below the k-th of
 * all; 0 for no sample. */
EXPORT void gradcomp_largest(const float *x, int64_t count, int64_t k, int64_t rank, int64_t stride,
                             int64_t *out) {
    if (rank && largest_of_sample(x, count, k, rank, stride, out)) return;
    gradcomp_active()->largest(x, count, k, out);
}

/* Ascending positions of k elements: of those above a limit, the largest if there are more, the
 * largest of all if there is none, and as many of the lowest positions as are missing. */
EXPORT void gradcomp_above(const float *x, int64_t count, int32_t limit, int64_t k, int64_t rank,
                           int64_t stride, int64_t *out) {
    int64_t found = gradcomp_active()->above(x, count, limit, out, k);
    if (found > k) {
        gradcomp_largest(x, count, k, rank, stride, out);
        return;
    }
    if (!found) gradcomp_active()->largest(x, count, found = 1, out);
    int64_t missing = k - found, next = missing;
    memmove(out + missing, out, (size_t)found * sizeof *out);
    for (int64_t at = 0, position = 0; at < k; at++, position++) {
        if (next < k && (out[next] == position || !missing)) {
            position = out[at] = out[next++];
        } else {
            out[at] = position;
            missing--;
        }
    }
}

/* Replaces the values at positions, or adds to them where that is wanted, in their order. */
EXPORT int gradcomp_scatter(float *x, int64_t numel, const int64_t *positions, const float *values,
                            int64_t count, int add) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t at = positions[i];
        if (at < 0 || at >= numel) return GRADCOMP_OUT_OF_RANGE;
        x[at] = add ? x[at] + values[i] : values[i];
    }
    return GRADCOMP_DONE;
}

/* Words of the counter hash for positions from start on. */
EXPORT void gradcomp_words(uint32_t low, uint32_t high, uint32_t start, int64_t count,
                           uint32_t *out) {
    gradcomp_active()->words(low, high, start, count, out);
}
