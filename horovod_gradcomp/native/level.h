/* One level of instructions: all kernels, with KERNEL on every function. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline)) KERNEL

/* Each needs the ones before it. */
#include "words.h"

#include "frame.h"

#include "affine.h"

#include "floats.h"

#include "signs.h"

#include "points.h"

#include "select.h"

static const kernel KERNELS[] = {
    {"linear", linear_encode, linear_decode},
    {"linear_random", linear_random_encode, linear_decode},
    {"qsgd_max", qsgd_max_encode, offset_decode},
    {"qsgd_l2", qsgd_l2_encode, offset_decode},
    {"terngrad", terngrad_encode, offset_decode},
    {"sign_mean", sign_mean_encode, sign_decode},
    {"sign_rms", sign_rms_encode, sign_decode},
    {"onebit", onebit_encode, onebit_decode},
    {"fp8", fp8_encode, fp8_decode},
    {"logarithmic", logarithmic_encode, logarithmic_decode},
    {"natural", natural_encode, natural_decode},
    {"bf16", bf16_encode, bf16_decode},
    {"fp16", fp16_encode, fp16_decode},
    {NULL, NULL, NULL},
};

const level LEVEL = {LEVEL_NAME, KERNELS, select_above, select_kth, select_largest,
                     draw_words};
