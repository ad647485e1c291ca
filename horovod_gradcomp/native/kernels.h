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

#define EXPORT __attribute__((visibility("default")))

#define GRADCOMP_DONE 0
#define GRADCOMP_NO_MEMORY 1
#define GRADCOMP_OUT_OF_RANGE 2

/* Rows of equal width: where they lie in a flat input and, in bytes, in a payload. */
typedef struct {
    int64_t start; /* first element */
    int64_t rows;
    int64_t width; /* elements a row */
    int64_t head;  /* first byte of the header values, (rows, headers) float32 */
    int64_t codes; /* first byte of the codes, (rows, row_bytes) */
    int64_t row_bytes;
} span;

/* A whole tensor to encode. Codecs without blocks have rows of one element and no header. */
typedef struct {
    const float *source;   /* what is encoded; NULL where it is in x */
    float *x;              /* becomes the error where that is wanted, else it is only read */
    uint8_t *payload;      /* (nbytes,); what follows the codes becomes zero, if that is not long */
    int64_t nbytes;
    const span *spans;
    int64_t count;         /* of spans */
    const double *numbers; /* settings, in the order in which the kernel names them */
    const float *tables;
    int32_t kernel;
    int32_t threads;       /* at most */
    uint32_t low;          /* key of the random draws */
    uint32_t high;
    int32_t bits;
    int32_t headers;
    int32_t want_error;
} encode_call;

/* A whole tensor to decode from several payloads, which are added in order. */
typedef struct {
    float *out;
    const uint8_t *const *payloads;
    int64_t number; /* of payloads */
    const span *spans;
    int64_t count;
    const double *numbers;
    const float *tables;
    int32_t kernel;
    int32_t threads;
    float scale;    /* factor on the sum */
    int32_t scaled; /* whether to multiply by it */
    int32_t bits;
    int32_t headers;
} decode_call;

/* The rows of one span, and what the call says. */
typedef struct {
    const float *source;
    float *x;       /* (rows, width) */
    float *head;    /* (rows, headers) */
    uint8_t *codes; /* (rows, row_bytes) */
    int64_t width;
    int64_t row_bytes;
    const double *numbers;
    const float *tables;
    uint32_t start; /* position of the first element, for random draws */
    uint32_t low;
    uint32_t high;
    int32_t bits;
    int32_t headers;
    int32_t want_error;
} encode_job;

typedef struct {
    float *out;                     /* (rows, width) */
    const uint8_t *const *payloads;
    int64_t number;
    int64_t head;                   /* first bytes in each payload */
    int64_t codes;
    int64_t width;
    int64_t row_bytes;
    const double *numbers;
    const float *tables;
    float scale;
    int32_t scaled;
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
    void (*words)(uint32_t low, uint32_t high, uint32_t start, int64_t count, uint32_t *out);
} level;

/* The level in use. */
const level *gradcomp_active(void);

extern const level gradcomp_base;
#if GRADCOMP_X86
extern const level gradcomp_avx2;
extern const level gradcomp_avx512;
#endif

#endif
