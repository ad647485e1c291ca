/* Selection by magnitude: the bits of |x| as whole numbers, in histograms, without a copy of x. */

/* Elements that are looked at together, before any of them alone. */
#define GROUP 32
#define TOP_BITS 11
#define TOP_SHIFT 20
#define MIDDLE_SHIFT 9

/* Whether any of a group is above. */
INLINE int any_above(const float *x, int32_t limit) {
    uint32_t any = 0;
    for (int i = 0; i < GROUP; i++) any |= (uint32_t)(limit - magnitude_of(x[i]));
    return (int)(any >> 31); /* limit - size is negative; neither has a sign, so nothing overflows */
}

/* Write ascending positions of what is above; returns how many, room + 1 if there are more. */
static KERNEL int64_t select_above(const float *x, int64_t count, int32_t limit, int64_t *out,
                                   int64_t room) {
    int64_t found = 0, i = 0;
    for (; i + GROUP <= count && found + GROUP <= room; i += GROUP) {
        if (!any_above(x + i, limit)) continue;
        for (int64_t j = i; j < i + GROUP; j++) {
            out[found] = j;
            found += magnitude_of(x[j]) > limit;
        }
    }
    for (; i < count; i++) {
        if (magnitude_of(x[i]) <= limit) continue;
        if (found == room) return room + 1;
        out[found++] = i;
    }
    return found;
}

/* Whether any of a group has the prefix in its bits from high on. */
INLINE int any_with(const float *x, int high, int32_t prefix) {
    uint32_t any = 0;
    for (int i = 0; i < GROUP; i++) any |= (uint32_t)(magnitude_of(x[i]) >> high == prefix);
    return (int)any;
}

/* Which bin holds the k-th from above; *k becomes its rank there. */
INLINE int32_t bin_of(const int64_t *counts, int32_t bins, int64_t *k) {
    for (int32_t bin = bins - 1; bin > 0; bin--) {
        if (*k <= counts[bin]) return bin;
        *k -= counts[bin];
    }
    return 0;
}

/* Counts by the bits of [low, high), of those whose bits from high on are the prefix. */
static KERNEL void count_bits(const float *x, int64_t count, int high, int32_t prefix, int low,
                              int64_t *counts) {
    const int32_t mask = (1 << (high - low)) - 1;
    uint32_t kept[AT_ONCE + 1];
    for (int64_t at = 0; at < count; at += AT_ONCE) {
        const int64_t stop = count - at < AT_ONCE ? count : at + AT_ONCE;
        int64_t found = 0, i = at;
        for (; i + GROUP <= stop; i += GROUP) {
            if (!any_with(x + i, high, prefix)) continue;
            for (int j = 0; j < GROUP; j++) {
                kept[found] = (uint32_t)magnitude_of(x[i + j]);
                found += (int32_t)(kept[found] >> high) == prefix;
            }
        }
        for (; i < stop; i++) {
            kept[found] = (uint32_t)magnitude_of(x[i]);
            found += (int32_t)(kept[found] >> high) == prefix;
        }
        for (i = 0; i < found; i++) counts[(int32_t)(kept[i] >> low) & mask]++;
    }
}

/* The k-th largest magnitude, and how many are greater. */
static KERNEL int32_t select_kth(const float *x, int64_t count, int64_t k, int64_t *greater) {
    int64_t counts[1 << TOP_BITS] = {0}, rank = k;
    uint32_t tops[4][1 << TOP_BITS] = {{0}}; /* four, as equal bins in a row wait for each other */
    int64_t i = 0;
    while (i < count) {
        const int64_t stop = count - i < (int64_t)1 << 31 ? count : i + ((int64_t)1 << 31);
        for (; i + 4 <= stop; i += 4)
            for (int j = 0; j < 4; j++) tops[j][magnitude_of(x[i + j]) >> TOP_SHIFT]++;
        for (; i < stop; i++) tops[0][magnitude_of(x[i]) >> TOP_SHIFT]++;
        for (int bin = 0; bin < 1 << TOP_BITS; bin++)
            for (int j = 0; j < 4; j++) counts[bin] += tops[j][bin];
        memset(tops, 0, sizeof tops);
    }
    int32_t prefix = bin_of(counts, 1 << TOP_BITS, &rank);
    memset(counts, 0, sizeof counts);
    count_bits(x, count, TOP_SHIFT, prefix, MIDDLE_SHIFT, counts);
    prefix = prefix << (TOP_SHIFT - MIDDLE_SHIFT)
             | bin_of(counts, 1 << (TOP_SHIFT - MIDDLE_SHIFT), &rank);
    memset(counts, 0, sizeof counts);
    count_bits(x, count, MIDDLE_SHIFT, prefix, 0, counts);
    prefix = prefix << MIDDLE_SHIFT | bin_of(counts, 1 << MIDDLE_SHIFT, &rank);
    *greater = k - rank;
    return prefix;
}

/* Ascending positions of exactly k elements, 1 <= k <= count; ties by lowest position. */
static KERNEL void select_largest(const float *x, int64_t count, int64_t k, int64_t *out) {
    int64_t greater, found = 0;
    const int32_t kth = select_kth(x, count, k, &greater);
    int64_t ties = k - greater;
    for (int64_t i = 0; found < k; i++) {
        if (i + GROUP <= count && !any_above(x + i, ties ? kth - 1 : kth)) {
            i += GROUP - 1;
            continue;
        }
        const int32_t size = magnitude_of(x[i]);
        if (size > kth || (size == kth && ties)) {
            out[found++] = i;
            ties -= size == kth;
        }
    }
}
