/* The frame of all block quantisers: packing as in core/bits.py, rows, and the sum over payloads. */

/* Bytes of codes that fit the stack; longer rows get storage of their own. */
#define ON_STACK 8192

INLINE int64_t padded(int64_t width) { return (width + 7) / 8 * 8; }

INLINE void pack_part(uint8_t *restrict out, const uint8_t *restrict codes, int64_t step, int part,
                      int shift) {
    const int mask = (1 << part) - 1;
    for (int64_t i = 0; i < step; i++) {
        int byte = 0;
        for (int j = 0; j < 8 / part; j++)
            byte |= (codes[i + j * step] >> shift & mask) << (j * part);
        out[i] = (uint8_t)byte;
    }
}

/* Codes of a padded row to its bytes. */
static KERNEL void pack_row(uint8_t *out, const uint8_t *codes, int64_t width, int bits) {
    int shift = 0;
    if (bits & 4) {
        pack_part(out, codes, width / 2, 4, shift);
        out += width / 2, shift += 4;
    }
    if (bits & 2) {
        pack_part(out, codes, width / 4, 2, shift);
        out += width / 4, shift += 2;
    }
    if (bits & 1) pack_part(out, codes, width / 8, 1, shift);
}

INLINE void unpack_part(uint8_t *restrict codes, const uint8_t *restrict packed, int64_t step,
                        int part, int shift) {
    const int mask = (1 << part) - 1;
    for (int j = 0; j < 8 / part; j++) {
        uint8_t *restrict to = codes + j * step;
        if (shift)
            for (int64_t i = 0; i < step; i++)
                to[i] = (uint8_t)(to[i] | (packed[i] >> (j * part) & mask) << shift);
        else
            for (int64_t i = 0; i < step; i++) to[i] = (uint8_t)(packed[i] >> (j * part) & mask);
    }
}

static KERNEL void unpack_row(uint8_t *codes, const uint8_t *packed, int64_t width, int bits) {
    int shift = 0;
    if (bits & 4) {
        unpack_part(codes, packed, width / 2, 4, shift);
        packed += width / 2, shift += 4;
    }
    if (bits & 2) {
        unpack_part(codes, packed, width / 4, 2, shift);
        packed += width / 4, shift += 2;
    }
    if (bits & 1) unpack_part(codes, packed, width / 8, 1, shift);
}

INLINE void scale_row(float *x, int64_t count, float scale) {
    for (int64_t i = 0; i < count; i++) x[i] *= scale;
}

/* x: a row; header; codes: to be filled; position: of the row's first element. */
typedef void quantise_row(const encode_job *job, float *restrict x, float *restrict head,
                          uint8_t *restrict codes, uint32_t position);

/* Adds to out where add is true, else sets it. */
typedef void dequantise_row(const decode_job *job, float *restrict out, const float *restrict head,
                            const uint8_t *restrict codes, int add);

INLINE int encode_rows(const encode_job *job, int64_t first, int64_t last, quantise_row *quantise) {
    const int64_t width = job->width, full = padded(width);
    const int direct = job->bits == 8 && full == width;
    uint8_t stack[ON_STACK], *codes = stack;
    if (!direct && full > ON_STACK && !(codes = malloc((size_t)full))) return GRADCOMP_NO_MEMORY;
    if (!direct) memset(codes + full - 8, 0, 8); /* the padding */
    for (int64_t row = first; row < last; row++) {
        uint8_t *packed = job->codes + row * job->row_bytes;
        float *x = job->x + row * width;
        if (job->source) memcpy(x, job->source + row * width, (size_t)width * sizeof *x);
        quantise(job, x, job->head + row * job->headers,
                 direct ? packed : codes, job->start + (uint32_t)(row * width));
        if (direct) continue;
        if (job->bits == 8)
            memcpy(packed, codes, (size_t)full);
        else
            pack_row(packed, codes, full, job->bits);
    }
    if (codes != stack) free(codes);
    return GRADCOMP_DONE;
}

INLINE int decode_rows(const decode_job *job, int64_t first, int64_t last,
                       dequantise_row *dequantise) {
    const int64_t width = job->width, full = padded(width);
    uint8_t stack[ON_STACK], *codes = stack;
    if (job->bits < 8 && full > ON_STACK && !(codes = malloc((size_t)full)))
        return GRADCOMP_NO_MEMORY;
    for (int64_t row = first; row < last; row++) {
        float *out = job->out + row * width;
        for (int64_t p = 0; p < job->number; p++) {
            const uint8_t *packed = job->payloads[p] + job->codes + row * job->row_bytes;
            const float *heads = (const float *)(const void *)(job->payloads[p] + job->head);
            if (job->bits < 8) unpack_row(codes, packed, full, job->bits);
            dequantise(job, out, heads + row * job->headers, job->bits < 8 ? codes : packed, p > 0);
        }
        if (job->scaled) scale_row(out, width, job->scale);
    }
    if (codes != stack) free(codes);
    return GRADCOMP_DONE;
}

#define ENCODER(name)                                                                              \
    static KERNEL int name##_encode(const encode_job *job, int64_t first, int64_t last) {         \
        return encode_rows(job, first, last, name##_quantise);                                     \
    }
#define DECODER(name)                                                                              \
    static KERNEL int name##_decode(const decode_job *job, int64_t first, int64_t last) {         \
        return decode_rows(job, first, last, name##_dequantise);                                   \
    }

/* out = value, or out += value, for every i of a row. */
#define EACH(value)                                                                                \
    do {                                                                                           \
        const int64_t count = job->width;                                                          \
        if (add)                                                                                   \
            for (int64_t i = 0; i < count; i++) out[i] += (value);                                 \
        else                                                                                       \
            for (int64_t i = 0; i < count; i++) out[i] = (value);                                  \
    } while (0)
