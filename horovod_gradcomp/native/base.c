/* The kernels in whatever every processor of the target has. */
#include "kernels.h"

#define KERNEL
#define LEVEL gradcomp_base
#define LEVEL_NAME "base"
#define HAS_F16C 0
#include "level.h"
