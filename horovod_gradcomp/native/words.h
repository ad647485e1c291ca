/* Bits of floats, rounding, and the counter hash of core/random.py. */

INLINE uint32_t bits_of(float x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

INLINE float float_of(uint32_t word) {
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

INLINE int32_t magnitude_of(float x) { return (int32_t)(bits_of(x) & 0x7FFFFFFFu); }

/* Adding this leaves a float of up to 2^22 rounded half to even, as an integer, in the low bits. */
#define ROUNDER 12582912.0f /* 1.5 * 2^23 */

/* Cut to [low, high]; NaN becomes low, so that a code is always in range. */
INLINE float clamp(float x, float low, float high) {
    x = x > low ? x : low;
    return x < high ? x : high;
}

/* Zero where |x| < floor, decided on the bits. */
INLINE float flush(float x, float floor) {
    return magnitude_of(x) < magnitude_of(floor) ? 0.0f : x;
}

INLINE float one_for_zero(float x) { return x == 0.0f ? 1.0f : x; }

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ (x >> 16);
}

INLINE uint32_t word_at(uint32_t position, uint32_t low, uint32_t high) {
    return mix(mix(position ^ low) ^ high);
}

/* Words for positions from start on. */
static KERNEL void draw_words(uint32_t low, uint32_t high, uint32_t start, int64_t count,
                              uint32_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = word_at(start + (uint32_t)i, low, high);
}

/* In [-1/2, 1/2]. */
INLINE float centred(uint32_t word) { return (float)(int32_t)word * 0x1p-32f; }

/* In [0, 1). */
INLINE float uniform(uint32_t word) { return (float)(int32_t)(word >> 8) * 0x1p-24f; }

/* Sums over a row, in double. */
typedef float floats __attribute__((vector_size(32)));
typedef int32_t words __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(64)));

INLINE void load(floats *v, const float *x) { memcpy(v, x, sizeof *v); }

INLINE double total_of(const doubles *v) {
    double sum = 0;
    for (int i = 0; i < 8; i++) sum += (*v)[i];
    return sum;
}

INLINE double sum_of_magnitudes(const float *x, int64_t count) {
    doubles sum = {0};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        floats v;
        load(&v, x + i);
        sum += __builtin_convertvector((floats)((words)v & 0x7FFFFFFF), doubles);
    }
    double total = total_of(&sum);
    for (; i < count; i++) total += (double)float_of(bits_of(x[i]) & 0x7FFFFFFFu);
    return total;
}

INLINE double norm_of(const float *x, int64_t count) {
    doubles sum = {0};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        floats v;
        load(&v, x + i);
        doubles wide = __builtin_convertvector(v, doubles);
        sum += wide * wide;
    }
    double total = total_of(&sum);
    for (; i < count; i++) total += (double)x[i] * (double)x[i];
    return sqrt(total);
}

/* Sums of the values above and of those below zero. */
INLINE void sums_of_sides(const float *x, int64_t count, double *above, double *below) {
    doubles high = {0}, low = {0};
    const floats zero = {0};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        floats v;
        load(&v, x + i);
        high += __builtin_convertvector((floats)((words)v & (words)(v > zero)), doubles);
        low += __builtin_convertvector((floats)((words)v & (words)(v < zero)), doubles);
    }
    *above = total_of(&high), *below = total_of(&low);
    for (; i < count; i++) {
        *above += x[i] > 0 ? (double)x[i] : 0;
        *below += x[i] < 0 ? (double)x[i] : 0;
    }
}

INLINE float largest_of(const float *x, int64_t count) {
    int32_t top = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t size = magnitude_of(x[i]);
        top = size > top ? size : top;
    }
    return float_of((uint32_t)top);
}
