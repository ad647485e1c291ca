/* The block quantisers, each named as its codec; the settings in numbers[] stand above each. */

/* linear: levels, 1 / levels, largest, smallest step */

/* Floats in the order of their values, as whole numbers. */
INLINE int32_t order_of(float x) {
    int32_t word = (int32_t)bits_of(x);
    return word ^ (int32_t)((uint32_t)(word >> 31) >> 1);
}

INLINE float float_at(int32_t order) {
    return float_of((uint32_t)(order ^ (int32_t)((uint32_t)(order >> 31) >> 1)));
}

INLINE void linear_any(const encode_job *job, float *restrict x, float *restrict head,
                       uint8_t *restrict codes, uint32_t position, int drawn) {
    const float levels = (float)job->numbers[0], largest = (float)job->numbers[2];
    const float smallest = (float)job->numbers[3];
    const int64_t width = job->width;
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t i = 0; i < width; i++) {
        int32_t at = order_of(x[i]);
        least = at < least ? at : least;
        most = at > most ? at : most;
    }
    const float low = flush(clamp(float_at(least), -largest, largest), smallest);
    const float high = clamp(float_at(most), -largest, largest);
    const float step = flush((high - low) * (float)job->numbers[1], smallest);
    const float unit = one_for_zero(step);
    const uint32_t key_low = job->low, key_high = job->high;
    const int want = job->want_error;
    head[0] = low, head[1] = step;
    for (int64_t i = 0; i < width; i++) {
        float place = (x[i] - low) / unit, whole;
        if (drawn) {
            place += uniform(word_at(position + (uint32_t)i, key_low, key_high));
            int32_t code = (int32_t)clamp(place, 0.0f, levels);
            codes[i] = (uint8_t)code;
            whole = (float)code;
        } else {
            float rounded = clamp(place, 0.0f, levels) + ROUNDER;
            codes[i] = (uint8_t)bits_of(rounded);
            whole = rounded - ROUNDER;
        }
        if (want) x[i] -= whole * step + low;
    }
}

static KERNEL void linear_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                   uint8_t *restrict codes, uint32_t position) {
    linear_any(job, x, head, codes, position, 0);
}

static KERNEL void linear_random_quantise(const encode_job *job, float *restrict x,
                                          float *restrict head, uint8_t *restrict codes,
                                          uint32_t position) {
    linear_any(job, x, head, codes, position, 1);
}

static KERNEL void linear_dequantise(const decode_job *job, float *restrict out,
                                     const float *restrict head, const uint8_t *restrict codes,
                                     int add) {
    const float low = head[0], step = head[1];
    EACH((float)codes[i] * step + low);
}

/* qsgd and terngrad: levels, smallest, largest norm, clip; codes are levels plus an offset */

INLINE void offset_any(const encode_job *job, float *restrict x, float step, float levels,
                       uint8_t *restrict codes, uint32_t position) {
    const int64_t width = job->width;
    const uint32_t key_low = job->low, key_high = job->high;
    const int want = job->want_error;
    const float unit = one_for_zero(step);
    const uint32_t offset = (uint32_t)levels;
    for (int64_t i = 0; i < width; i++) {
        float draw = centred(word_at(position + (uint32_t)i, key_low, key_high));
        float rounded = clamp(x[i] / unit + draw, -levels, levels) + ROUNDER;
        codes[i] = (uint8_t)(bits_of(rounded) + offset);
        if (want) x[i] -= (rounded - ROUNDER) * step;
    }
}

static KERNEL void qsgd_max_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                     uint8_t *restrict codes, uint32_t position) {
    const float levels = (float)job->numbers[0];
    head[0] = flush(largest_of(x, job->width) * (float)(1.0 / job->numbers[0]),
                    (float)job->numbers[1]);
    offset_any(job, x, head[0], levels, codes, position);
}

static KERNEL void qsgd_l2_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                    uint8_t *restrict codes, uint32_t position) {
    const float levels = (float)job->numbers[0];
    double norm = norm_of(x, job->width);
    norm = norm < job->numbers[2] ? norm : job->numbers[2];
    head[0] = flush((float)norm * (float)(1.0 / job->numbers[0]), (float)job->numbers[1]);
    offset_any(job, x, head[0], levels, codes, position);
}

static KERNEL void terngrad_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                     uint8_t *restrict codes, uint32_t position) {
    float s = largest_of(x, job->width);
    if (job->numbers[3] > 0) {
        double limit = norm_of(x, job->width) * (job->numbers[3] / sqrt((double)job->width));
        limit = limit < job->numbers[2] ? limit : job->numbers[2];
        s = s < (float)limit ? s : (float)limit;
    }
    head[0] = flush(s, (float)job->numbers[1]);
    offset_any(job, x, head[0], 1.0f, codes, position);
}

static KERNEL void offset_dequantise(const decode_job *job, float *restrict out,
                                     const float *restrict head, const uint8_t *restrict codes,
                                     int add) {
    const float step = head[0], levels = (float)job->numbers[0];
    EACH(((float)codes[i] - levels) * step);
}

/* sign: smallest */

INLINE void sign_any(const encode_job *job, float *restrict x, float scale, float *restrict head,
                     uint8_t *restrict codes) {
    const float smallest = (float)job->numbers[0];
    const int64_t width = job->width;
    const uint32_t bits = bits_of(flush(scale, smallest));
    const int want = job->want_error;
    head[0] = float_of(bits);
    for (int64_t i = 0; i < width; i++) {
        uint32_t negative = bits_of(x[i] + smallest) >> 31;
        codes[i] = (uint8_t)negative;
        if (want) x[i] -= float_of(bits ^ negative << 31);
    }
}

static KERNEL void sign_mean_quantise(const encode_job *job, float *restrict x,
                                      float *restrict head, uint8_t *restrict codes,
                                      uint32_t position) {
    (void)position;
    double sum = sum_of_magnitudes(x, job->width);
    sign_any(job, x, (float)(sum * (1.0 / (double)job->width)), head, codes);
}

static KERNEL void sign_rms_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                     uint8_t *restrict codes, uint32_t position) {
    (void)position;
    double norm = norm_of(x, job->width);
    sign_any(job, x, (float)(norm * (1.0 / sqrt((double)job->width))), head, codes);
}

static KERNEL void sign_dequantise(const decode_job *job, float *restrict out,
                                   const float *restrict head, const uint8_t *restrict codes,
                                   int add) {
    const uint32_t bits = bits_of(head[0]);
    EACH(float_of(bits ^ (uint32_t)codes[i] << 31));
}

/* onebit: smallest */

INLINE float side_of(uint32_t above, uint32_t either, uint32_t code) {
    return float_of(above ^ ((0u - code) & either));
}

static KERNEL void onebit_quantise(const encode_job *job, float *restrict x, float *restrict head,
                                   uint8_t *restrict codes, uint32_t position) {
    const float smallest = (float)job->numbers[0];
    const int64_t width = job->width;
    int64_t count = 0;
    double above, below;
    (void)position;
    sums_of_sides(x, width, &above, &below);
    for (int64_t i = 0; i < width; i++) {
        uint32_t negative = bits_of(x[i] + smallest) >> 31;
        codes[i] = (uint8_t)negative;
        count += negative;
    }
    const int64_t rest = width - count;
    head[0] = flush(rest ? (float)(above / (double)rest) : 0.0f, smallest);
    head[1] = flush(count ? (float)(below / (double)count) : 0.0f, smallest);
    const uint32_t high = bits_of(head[0]), either = high ^ bits_of(head[1]);
    if (job->want_error)
        for (int64_t i = 0; i < width; i++) x[i] -= side_of(high, either, codes[i]);
}

static KERNEL void onebit_dequantise(const decode_job *job, float *restrict out,
                                     const float *restrict head, const uint8_t *restrict codes,
                                     int add) {
    const uint32_t above = bits_of(head[0]), either = above ^ bits_of(head[1]);
    EACH(side_of(above, either, codes[i]));
}

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

ENCODER(linear)
ENCODER(linear_random)
ENCODER(qsgd_max)
ENCODER(qsgd_l2)
ENCODER(terngrad)
ENCODER(sign_mean)
ENCODER(sign_rms)
ENCODER(onebit)
ENCODER(fp8)
ENCODER(logarithmic)
DECODER(linear)
DECODER(offset)
DECODER(sign)
DECODER(onebit)
DECODER(fp8)
DECODER(logarithmic)
