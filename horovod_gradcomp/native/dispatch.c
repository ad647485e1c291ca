/* Choice of the best level of instructions that the processor has. */
#include "kernels.h"

#include <string.h>

#if GRADCOMP_X86
#include <cpuid.h>
#endif

/* Levels, the best one first. */
static const level *const LEVELS[] = {
#if GRADCOMP_X86
    &gradcomp_avx512,
    &gradcomp_avx2,
#endif
    &gradcomp_base,
};
#define COUNT ((int)(sizeof LEVELS / sizeof *LEVELS))

static const level *active = &gradcomp_base;

const level *gradcomp_active(void) { return active; }

static int runs_here(const level *candidate) {
#if GRADCOMP_X86
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (candidate == &gradcomp_base) return 1;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_F16C)) return 0;
    if (!__builtin_cpu_supports("avx2")) return 0;
    return candidate == &gradcomp_avx2 ||
           (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
#else
    return candidate == &gradcomp_base;
#endif
}

/* Use a level by name, or the best one for an empty name; returns the name in use, else NULL. */
EXPORT const char *gradcomp_use(const char *name) {
    for (int i = 0; i < COUNT; i++)
        if (runs_here(LEVELS[i]) && (!*name || !strcmp(name, LEVELS[i]->name)))
            return (active = LEVELS[i])->name;
    return NULL;
}

/* Index of a kernel, or -1. */
EXPORT int gradcomp_find(const char *name) {
    for (int i = 0; gradcomp_base.kernels[i].name; i++)
        if (!strcmp(name, gradcomp_base.kernels[i].name)) return i;
    return -1;
}
