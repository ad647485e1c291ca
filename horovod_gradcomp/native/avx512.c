/* The kernels in AVX-512 and F16C, for x86 only. */
#include "kernels.h"

#if GRADCOMP_X86
#define KERNEL __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define LEVEL gradcomp_avx512
#define LEVEL_NAME "avx512"
#define HAS_F16C 1
#include "level.h"
#else
typedef int no_empty_file;
#endif
