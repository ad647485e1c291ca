/* The kernels in AVX2 and F16C, for x86 only. */
#include "kernels.h"

#if GRADCOMP_X86
#define KERNEL __attribute__((target("avx2,f16c")))
#define LEVEL gradcomp_avx2
#define LEVEL_NAME "avx2"
#define HAS_F16C 1
#include "level.h"
#else
typedef int no_empty_file;
#endif
