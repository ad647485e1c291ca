/* Block quantisers with evenly spaced levels: linear, qsgd, terngrad. */

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

ENCODER(linear)
ENCODER(linear_random)
ENCODER(qsgd_max)
ENCODER(qsgd_l2)
ENCODER(terngrad)
DECODER(linear)
DECODER(offset)
