/* Block quantisers of one bit: sign, onebit. */

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

ENCODER(sign_mean)
ENCODER(sign_rms)
ENCODER(onebit)
DECODER(sign)
DECODER(onebit)
