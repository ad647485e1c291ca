/* What the compiled kernels and their caller share.
 *
 * Every kernel repeats, operation for operation, what its codec does with tensor operations, so that
 * payloads, errors and decoded values are the same bits; only sums in double differ in their order.
 * The same source is compiled once for each level of instructions (base.c, avx2.c, avx512.c), and
 * dispatch.c chooses at run time.
 */
#ifndef GRADCOMP_KERNELS_H
#define GRADCOMP_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define GRADCOMP_X86 1
#else
#define GRADCOMP_X86 0
#endif

#define GRADCOMP_DONE 0
#define GRADCOMP_NO_MEMORY 1

/* Rows to encode. Codecs without blocks have rows of one element and no header. */
typedef struct {
    float *x;         /* (rows, width); becomes the error where that is wanted */
    float *head;      /* (rows, headers) */
    uint8_t *codes;   /* (rows, row_bytes) */
    int64_t width;    /* elements a row */
    int64_t row_bytes;
    const double *numbers; /* settings, in the order in which the kernel names them */
    const float *tables;
    uint32_t start;   /* position of the first element, for random draws */
    uint32_t low;     /* key of the random draws */
    uint32_t high;
    int32_t bits;
    int32_t headers;
    int32_t want_error;
} encode_job;

/* Rows to decode from several payloads, which are added in order. */
typedef struct {
    float *out;                 /* (rows, width) */
    const float *const *heads;  /* one for each payload */
    const uint8_t *const *codes;
    int64_t payloads;
    int64_t width;
    int64_t row_bytes;
    const double *numbers;
    const float *tables;
    float scale;                /* factor on the sum */
    int32_t scaled;             /* whether to multiply by it */
    int32_t bits;
    int32_t headers;
} decode_job;

typedef struct {
    const char *name;
    int (*encode)(const encode_job *job, int64_t first, int64_t last);
    int (*decode)(const decode_job *job, int64_t first, int64_t last);
} kernel;

typedef struct {
    const char *name;
    const kernel *kernels; /* ends with a name of NULL */
    int64_t (*above)(const float *x, int64_t count, int32_t limit, int64_t *out, int64_t room);
    int32_t (*kth)(const float *x, int64_t count, int64_t k, int64_t *greater);
    void (*largest)(const float *x, int64_t count, int64_t k, int64_t *out);
} level;

extern const level gradcomp_base;
#if GRADCOMP_X86
extern const level gradcomp_avx2;
extern const level gradcomp_avx512;
#endif

#endif
