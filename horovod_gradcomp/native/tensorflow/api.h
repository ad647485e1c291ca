/* The part of TensorFlow's C interface that the operations need, found at run time.
 *
 * Declared here, as tensorflow/c/{kernels,ops,tf_tensor,tf_status}.h declare it, so that building
 * needs no TensorFlow and one build serves all its versions.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8 };
enum { TF_UINT8 = 4, TF_INT64 = 9, TF_HALF = 19 };

typedef void *create_function(TF_OpKernelConstruction *);
typedef void compute_function(void *, TF_OpKernelContext *);
typedef void delete_function(void *);

#define TF_FUNCTIONS(F)                                                                            \
    F(TF_Status *, TF_NewStatus, (void))                                                           \
    F(void, TF_DeleteStatus, (TF_Status *))                                                        \
    F(void, TF_SetStatus, (TF_Status *, int code, const char *message))                            \
    F(int, TF_GetCode, (const TF_Status *))                                                        \
    F(void *, TF_TensorData, (const TF_Tensor *))                                                  \
    F(size_t, TF_TensorByteSize, (const TF_Tensor *))                                              \
    F(void, TF_DeleteTensor, (TF_Tensor *))                                                        \
    F(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *name))                     \
    F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))               \
    F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))              \
    F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))             \
    F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                      \
    F(TF_KernelBuilder *, TF_NewKernelBuilder,                                                     \
      (const char *op, const char *device, create_function *, compute_function *,                  \
       delete_function *))                                                                         \
    F(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))             \
    F(int, TF_NumInputs, (TF_OpKernelContext *))                                                   \
    F(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                   \
    F(int, TF_ExpectedOutputDataType, (TF_OpKernelContext *, int))                                 \
    F(TF_Tensor *, TF_AllocateOutput,                                                              \
      (TF_OpKernelContext *, int index, int dtype, const int64_t *dims, int count, size_t bytes,   \
       TF_Status *))                                                                               \
    F(TF_Tensor *, TF_ForwardInputOrAllocateOutput,                                                \
      (TF_OpKernelContext *, const int *inputs, int count, int output, const int64_t *dims,        \
       int dim_count, int *forwarded, TF_Status *))                                                \
    F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))

#define DECLARE(result, name, arguments) static result(*name) arguments;
TF_FUNCTIONS(DECLARE)
#undef DECLARE

/* Find all of them; returns whether all are there. */
static int find_tensorflow(void) {
    void *library = dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) library = dlopen(NULL, RTLD_LAZY);
#define FIND(result, name, arguments)                                                              \
    if (!(*(void **)&name = dlsym(library, #name))) return 0;
    TF_FUNCTIONS(FIND)
#undef FIND
    return 1;
}
