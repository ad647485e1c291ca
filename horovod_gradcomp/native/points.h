/* Codecs that turn every element into a code of its own; a row is one element. */
#if HAS_F16C
#include <immintrin.h>
#endif

/* Elements that stay in the first cache while the payloads are added. */
#define AT_ONCE 4096

/* Runs value(code) over blocks of elements and all payloads, for codes of a type. */
#define DECODE_POINTS(type, value)                                                                 \
    for (int64_t at = first; at < last; at += AT_ONCE) {                                           \
        const int64_t count = last - at < AT_ONCE ? last - at : AT_ONCE;                           \
        float *restrict out = job->out + at;                                                       \
        for (int64_t p = 0; p < job->number; p++) {                                                \
            const type *restrict codes =                                                           \
                (const type *)(const void *)(job->payloads[p] + job->codes) + at;                  \
            if (p)                                                                                 \
                for (int64_t i = 0; i < count; i++) out[i] += (value);                             \
            else                                                                                   \
                for (int64_t i = 0; i < count; i++) out[i] = (value);                              \
        }                                                                                          \
        if (job->scaled) scale_row(out, count, job->scale);                                        \
    }                                                                                              \
    return GRADCOMP_DONE

/* Encodes elements that are in x. */
typedef void encode_points(const encode_job *job, int64_t first, int64_t last);

/* Copies them there first, where they are not, block by block. */
INLINE int encode_all(const encode_job *job, int64_t first, int64_t last, encode_points *encode) {
    const int64_t step = job->source ? AT_ONCE : last - first;
    for (int64_t at = first; at < last; at += step) {
        const int64_t stop = last - at < step ? last : at + step;
        if (job->source)
            memcpy(job->x + at, job->source + at, (size_t)(stop - at) * sizeof *job->x);
        encode(job, at, stop);
    }
    return GRADCOMP_DONE;
}

#define POINT_ENCODER(name)                                                                        \
    static KERNEL int name##_encode(const encode_job *job, int64_t first, int64_t last) {         \
        return encode_all(job, first, last, name##_points);                                        \
    }

/* natural */

#define NATURAL_SHIFT 63 /* exponents from -63 on have a code */

INLINE float natural_value(uint32_t code) {
    return float_of((code & 0x80) << 24 | (code & 0x7F) << 23) * 0x1p63f;
}

static KERNEL void natural_points(const encode_job *job, int64_t first, int64_t last) {
    float *restrict x = job->x;
    uint8_t *restrict codes = job->codes;
    const uint32_t start = job->start, low = job->low, high = job->high;
    const int want = job->want_error;
    for (int64_t i = first; i < last; i++) {
        const uint32_t draw = word_at(start + (uint32_t)i, low, high) & 0x7FFFFF;
        const uint32_t rounded = bits_of(x[i]) + draw;
        int32_t code = (int32_t)(rounded >> 23 & 0xFF) - NATURAL_SHIFT;
        code = code > 0 ? code : 0;
        code = code < 127 ? code : 127;
        const uint32_t all = (uint32_t)code | (rounded >> 24 & 0x80);
        codes[i] = (uint8_t)all;
        if (want) x[i] -= natural_value(all);
    }
}

POINT_ENCODER(natural)

static KERNEL int natural_decode(const decode_job *job, int64_t first, int64_t last) {
    DECODE_POINTS(uint8_t, natural_value(codes[i]));
}

/* bf16 */

static KERNEL void bf16_points(const encode_job *job, int64_t first, int64_t last) {
    float *restrict x = job->x;
    uint16_t *restrict codes = (uint16_t *)(void *)job->codes;
    const int want = job->want_error;
    for (int64_t i = first; i < last; i++) {
        const uint32_t word = bits_of(x[i]);
        uint32_t code = (word + (word >> 16 & 1) + 0x7FFF) >> 16;
        code -= (code & 0x7FFF) == 0x7F80; /* infinity becomes the largest */
        codes[i] = (uint16_t)code;
        if (want) x[i] -= float_of(code << 16);
    }
}

POINT_ENCODER(bf16)

static KERNEL int bf16_decode(const decode_job *job, int64_t first, int64_t last) {
    DECODE_POINTS(uint16_t, float_of((uint32_t)codes[i] << 16));
}

/* fp16: largest, factor before the cast, factor after it */

INLINE uint16_t half_of(float x) {
    const uint32_t word = bits_of(x), size = word & 0x7FFFFFFFu, sign = word >> 16 & 0x8000;
    const uint32_t normal = (size + 0xFFF + (size >> 13 & 1)) - (112u << 23);
    const uint32_t small = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t half = size < 0x38800000u ? small : normal >> 13; /* 2^-14 */
    half = half < 0x7C00 ? half : 0x7C00;
    half = size > 0x7F800000u ? 0x7E00 : half;
    return (uint16_t)(half | sign);
}

INLINE float float_of_half(uint32_t half) {
    const uint32_t size = half & 0x7FFF, sign = (half & 0x8000) << 16;
    uint32_t word = (size << 13) + (112u << 23);
    word += size >= 0x7C00 ? 112u << 23 : 0;
    const float small = (float)(int32_t)size * 0x1p-24f;
    return float_of((size < 0x400 ? bits_of(small) : word) | sign);
}

/* NaN stays NaN: a sum over ranks must show it. */
INLINE float cut(float x, float most) {
    x = x < -most ? -most : x;
    return x > most ? most : x;
}

static KERNEL void fp16_points(const encode_job *job, int64_t first, int64_t last) {
    float *restrict x = job->x;
    uint16_t *restrict codes = (uint16_t *)(void *)job->codes;
    const float most = (float)job->numbers[0], down = (float)job->numbers[1];
    const float up = (float)job->numbers[2];
    const int want = job->want_error;
    int64_t i = first;
#if HAS_F16C
    const __m256 high = _mm256_set1_ps(most), low = _mm256_set1_ps(-most);
    const __m256 before = _mm256_set1_ps(down), after = _mm256_set1_ps(up);
    for (; i + 8 <= last; i += 8) {
        const __m256 value = _mm256_loadu_ps(x + i);
        const __m256 kept = _mm256_min_ps(high, _mm256_max_ps(low, value)); /* NaN stays */
        const __m128i half =
            _mm256_cvtps_ph(_mm256_mul_ps(kept, before), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(codes + i), half);
        if (!want) continue;
        const __m256 sent = _mm256_mul_ps(_mm256_cvtph_ps(half), after);
        _mm256_storeu_ps(x + i, _mm256_sub_ps(value, sent));
    }
#endif
    for (; i < last; i++) {
        codes[i] = half_of(cut(x[i], most) * down);
        if (want) x[i] -= float_of_half(codes[i]) * up;
    }
}

POINT_ENCODER(fp16)

static KERNEL int fp16_decode(const decode_job *job, int64_t first, int64_t last) {
    const uint16_t *restrict codes =
        (const uint16_t *)(const void *)(job->payloads[0] + job->codes);
    float *restrict out = job->out;
    const float scale = job->scale;
    int64_t i = first;
#if HAS_F16C
    const __m256 factor = _mm256_set1_ps(scale);
    for (; i + 8 <= last; i += 8) {
        const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(codes + i));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_cvtph_ps(half), factor));
    }
#endif
    for (; i < last; i++) out[i] = float_of_half(codes[i]) * scale;
    return GRADCOMP_DONE;
}
