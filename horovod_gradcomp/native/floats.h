/* Block quantisers whose levels are the closer the smaller they are: fp8, logarithmic. */

/* fp8: bits of mantissa, exponents, least exponent */

#define ONE_EXPONENT (1u << 23)

/* The value of a code whose scale is 1; subnormals of the format are no subnormals of float. */
INLINE float fp8_value(uint32_t code, int mantissa, uint32_t bias) {
    const uint32_t size = code & 0x7F;
    const uint32_t normal = (size << (23 - mantissa)) + bias;
    const float small = (float)(int32_t)size * float_of(bias - (uint32_t)(mantissa - 1) * ONE_EXPONENT);
    return float_of((size >> mantissa ? normal : bits_of(small)) | (code & 0x80) << 24);
}

/* Exponent of 1 in the format, as the difference to float's. */
INLINE uint32_t fp8_bias(const double *numbers) {
    return (uint32_t)(126 + (int)numbers[2]) * ONE_EXPONENT;
}

static KERNEL void fp8_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                uint8_t *restrict codes, uint32_t position) {
    const int mantissa = (int)job->numbers[0];
    const uint32_t exponents = (uint32_t)job->numbers[1], bias = fp8_bias(job->numbers);
    const int32_t largest = 0x7F600000; /* 1.75 * 2^127 */
    const int32_t least_top = (127 - 80) * (int32_t)ONE_EXPONENT;
    const int64_t width = job->width;
    const int want = job->want_error;
    int32_t most = magnitude_of(largest_of(x, width));
    (void)position;
    most = most < largest ? most : largest;
    most = most > least_top ? most : least_top;
    const int32_t top = (most + (int32_t)ONE_EXPONENT / 4 - 1) & 0x7F800000; /* more above 1.75 */
    const int32_t least = top - (int32_t)((exponents - 1) * ONE_EXPONENT);
    const float scale = float_of((uint32_t)(least - (int)job->numbers[2] * (int32_t)ONE_EXPONENT));
    head[0] = scale;
    for (int64_t i = 0; i < width; i++) {
        const uint32_t word = bits_of(x[i]);
        int32_t size = (int32_t)(word & 0x7FFFFFFFu);
        size = size < largest ? size : largest;
        int32_t exponent = size & 0x7F800000;
        exponent = exponent > least ? exponent : least;
        const float per_value =
            float_of((uint32_t)(254 + mantissa) * ONE_EXPONENT - (uint32_t)exponent);
        const float rounded = per_value * float_of((uint32_t)size) + ROUNDER;
        const uint32_t steps = bits_of(rounded) - bits_of(ROUNDER);
        const uint32_t code = ((uint32_t)(exponent - least) >> (23 - mantissa)) + steps;
        const uint32_t all = (code & 0x7F) | (word >> 24 & 0x80);
        codes[i] = (uint8_t)all;
        if (want) x[i] -= fp8_value(all, mantissa, bias) * scale;
    }
}

static KERNEL void fp8_dequantise(const decode_job *job, float *restrict out,
                                  const float *restrict head, const uint8_t *restrict codes,
                                  int add) {
    const int mantissa = (int)job->numbers[0];
    const uint32_t bias = fp8_bias(job->numbers);
    const float scale = head[0];
    EACH(fp8_value(codes[i], mantissa, bias) * scale);
}

/* logarithmic: 1 / range, smallest, largest, bits of mantissa that a bin has, number of bins;
 * tables: the sizes of all levels in units, and of each bin of 1 + size the level, and the size at
 * which the next one begins */

static KERNEL void logarithmic_quantise(const encode_job *job, float *restrict x,
                                        float *restrict head, uint8_t *restrict codes,
                                        uint32_t position) {
    const int bits = job->bits, shift = 23 - (int)job->numbers[3];
    const uint32_t bins = (uint32_t)job->numbers[4], origin = 127u << (23 - shift);
    const float *restrict sizes = job->tables, *restrict levels = sizes + (1 << (bits - 1));
    const float *restrict limits = levels + bins;
    const float largest = (float)job->numbers[2];
    const int64_t width = job->width;
    const int want = job->want_error;
    float top = largest_of(x, width);
    (void)position;
    top = top < largest ? top : largest;
    const float scale = flush(top * (float)job->numbers[0], (float)job->numbers[1]);
    const float unit = one_for_zero(scale);
    head[0] = scale;
    for (int64_t i = 0; i < width; i++) {
        const uint32_t word = bits_of(x[i]);
        float size = float_of(word & 0x7FFFFFFFu);
        size = (size < largest ? size : largest) / unit;
        uint32_t bin = (bits_of(1.0f + size) >> shift) - origin;
        bin = bin < bins ? bin : bins - 1;
        const int32_t code = (int32_t)levels[bin] + (size >= limits[bin]);
        codes[i] = (uint8_t)((uint32_t)code | word >> 31 << (bits - 1));
        if (want) x[i] -= float_of(bits_of(sizes[code] * scale) | (word & 0x80000000u));
    }
}

static KERNEL void logarithmic_dequantise(const decode_job *job, float *restrict out,
                                          const float *restrict head, const uint8_t *restrict codes,
                                          int add) {
    const int half = 1 << (job->bits - 1);
    float values[256];
    for (int i = 0; i < half; i++) {
        values[i] = job->tables[i] * head[0];
        values[i + half] = float_of(bits_of(values[i]) ^ 0x80000000u);
    }
    EACH(values[codes[i]]);
}

ENCODER(fp8)
ENCODER(logarithmic)
DECODER(fp8)
DECODER(logarithmic)
