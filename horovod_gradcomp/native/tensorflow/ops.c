/* TensorFlow's operations around the kernels, for tensors in the computer's own memory.
 *
 * Loaded by tf.load_op_library, they run where TensorFlow's own do: in its threads, without Python.
 * They are functions of their inputs, so that a graph may drop, fold or repeat them. An error takes
 * the storage of the input where TensorFlow says that nobody else reads that, else fresh storage.
 */
#define _GNU_SOURCE

#include "../kernels.h"

#include "api.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What an operation is told, first in its input "job". */
enum { KERNEL, BITS, HEADERS, FLAG, THREADS, NUMEL, BYTES, SPANS, SETTINGS };

/* Bytes. Smaller storage comes from a heap that is reused, so that its pages are there. */
#define HUGE (4 << 20)

#define MOST_PAYLOADS 4096

static struct {
    int (*encode)(const encode_call *);
    int (*decode)(const decode_call *);
    void (*largest)(const float *, int64_t, int64_t, int64_t, int64_t, int64_t *);
    void (*above)(const float *, int64_t, int32_t, int64_t, int64_t, int64_t, int64_t *);
    int (*scatter)(float *, int64_t, const int64_t *, const float *, int64_t, int);
} kernels;

/* An operation that runs, and the tensors that it must let go of. */
typedef struct {
    TF_OpKernelContext *context;
    TF_Status *status;
    TF_Tensor *held[MOST_PAYLOADS + 8];
    int count;
} run;

static int failed(const run *r) { return TF_GetCode(r->status) != TF_OK; }

static void fail(run *r, int code, const char *text) {
    if (!failed(r)) TF_SetStatus(r->status, code, text);
}

static void *hold(run *r, TF_Tensor *tensor) {
    if (failed(r)) return NULL;
    r->held[r->count++] = tensor;
    return TF_TensorData(tensor);
}

/* The values of an input of at least so many bytes; NULL after a failure. */
static const void *input(run *r, int index, int64_t bytes) {
    TF_Tensor *tensor = NULL;
    if (failed(r)) return NULL;
    TF_GetInput(r->context, index, &tensor, r->status);
    const void *values = hold(r, tensor);
    if (!failed(r) && (int64_t)TF_TensorByteSize(tensor) < bytes)
        fail(r, TF_INVALID_ARGUMENT, "gradcomp: an input is shorter than the settings say");
    return failed(r) ? NULL : values;
}

static void *advised(void *values, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    if (values && bytes >= HUGE) {
        const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)values;
        const uintptr_t first = (at + page - 1) / page * page;
        (void)madvise((void *)first, at + (uintptr_t)bytes - first, MADV_HUGEPAGE);
    }
#else
    (void)bytes;
#endif
    return values;
}

/* A fresh output; NULL after a failure. */
static void *output(run *r, int index, int64_t bytes) {
    if (failed(r)) return NULL;
    const int dtype = TF_ExpectedOutputDataType(r->context, index);
    const int64_t item = dtype == TF_UINT8 ? 1 : dtype == TF_HALF ? 2 : dtype == TF_INT64 ? 8 : 4;
    const int64_t count = bytes / item;
    void *values = hold(r, TF_AllocateOutput(r->context, index, dtype, &count, 1, (size_t)bytes,
                                             r->status));
    return advised(values, bytes);
}

/* An output in the storage of the first input, where that may be and nobody else reads it, else a
 * fresh one. To be asked for before that is held, since then it has one more reader. */
static float *reused(run *r, int may, int index, int64_t count) {
    const int first = 0;
    int from = -1;
    if (failed(r)) return NULL;
    float *values = hold(r, TF_ForwardInputOrAllocateOutput(r->context, &first, may, index, &count,
                                                            1, &from, r->status));
    return from < 0 ? advised(values, count * (int64_t)sizeof *values) : values;
}

static void begin(run *r, TF_OpKernelContext *context, void *self) {
    (void)self;
    r->context = context, r->status = TF_NewStatus(), r->count = 0;
}

static void end(run *r) {
    while (r->count) TF_DeleteTensor(r->held[--r->count]);
    if (failed(r)) TF_OpKernelContext_Failure(r->context, r->status);
    TF_DeleteStatus(r->status);
}

static void judge(run *r, int state) {
    if (state == GRADCOMP_OUT_OF_RANGE)
        fail(r, TF_INVALID_ARGUMENT, "gradcomp: a position is out of range");
    else if (state != GRADCOMP_DONE)
        fail(r, TF_RESOURCE_EXHAUSTED, "gradcomp: no memory for the codes of one block");
}

/* x, key, job, numbers, tables to payload, error */
static void compute_encode(void *self, TF_OpKernelContext *context) {
    run r;
    begin(&r, context, self);
    const int64_t *key = input(&r, 1, 2 * sizeof *key);
    const int64_t *job = input(&r, 2, SETTINGS * sizeof *job);
    const double *numbers = input(&r, 3, 0);
    const float *tables = input(&r, 4, 0);
    if (!failed(&r)) {
        const int64_t bytes = job[NUMEL] * (int64_t)sizeof(float);
        float *error = reused(&r, job[FLAG] ? 1 : 0, 1, job[FLAG] ? job[NUMEL] : 0);
        const float *source = input(&r, 0, bytes);
        uint8_t *payload = output(&r, 0, job[BYTES]);
        if (!failed(&r)) {
            const encode_call call = {
                .source = job[FLAG] && error != source ? source : NULL,
                .x = job[FLAG] ? error : (float *)(uintptr_t)source, /* then it is only read */
                .payload = payload,
                .nbytes = job[BYTES],
                .spans = (const span *)(const void *)(job + SETTINGS),
                .count = job[SPANS],
                .numbers = numbers,
                .tables = tables,
                .kernel = (int32_t)job[KERNEL],
                .threads = (int32_t)job[THREADS],
                .low = (uint32_t)key[0],
                .high = (uint32_t)key[1],
                .bits = (int32_t)job[BITS],
                .headers = (int32_t)job[HEADERS],
                .want_error = (int32_t)job[FLAG],
            };
            judge(&r, kernels.encode(&call));
        }
    }
    end(&r);
}

/* scale, job, numbers, tables, payloads to the scaled sum */
static void compute_decode(void *self, TF_OpKernelContext *context) {
    const uint8_t *payloads[MOST_PAYLOADS];
    const int number = TF_NumInputs(context) - 4;
    run r;
    begin(&r, context, self);
    if (number > MOST_PAYLOADS) fail(&r, TF_INVALID_ARGUMENT, "gradcomp: too many payloads");
    const float *scale = input(&r, 0, sizeof *scale);
    const int64_t *job = input(&r, 1, SETTINGS * sizeof *job);
    const double *numbers = input(&r, 2, 0);
    const float *tables = input(&r, 3, 0);
    for (int i = 0; i < number && !failed(&r); i++) payloads[i] = input(&r, 4 + i, job[BYTES]);
    float *out = failed(&r) ? NULL : output(&r, 0, job[NUMEL] * (int64_t)sizeof(float));
    if (!failed(&r)) {
        const decode_call call = {
            .out = out,
            .payloads = payloads,
            .number = number,
            .spans = (const span *)(const void *)(job + SETTINGS),
            .count = job[SPANS],
            .numbers = numbers,
            .tables = tables,
            .kernel = (int32_t)job[KERNEL],
            .threads = (int32_t)job[THREADS],
            .scale = *scale,
            .scaled = (int32_t)job[FLAG],
            .bits = (int32_t)job[BITS],
            .headers = (int32_t)job[HEADERS],
        };
        judge(&r, kernels.decode(&call));
    }
    end(&r);
}

/* x, (numel, k, limit or -1, rank, stride) to positions */
static void compute_select(void *self, TF_OpKernelContext *context) {
    run r;
    begin(&r, context, self);
    const int64_t *job = input(&r, 1, 5 * sizeof *job);
    if (!failed(&r)) {
        const int64_t numel = job[0], k = job[1], limit = job[2], rank = job[3], stride = job[4];
        const float *x = input(&r, 0, numel * (int64_t)sizeof *x);
        int64_t *out = output(&r, 0, k * (int64_t)sizeof *out);
        if (!failed(&r) && limit < 0) kernels.largest(x, numel, k, rank, stride, out);
        if (!failed(&r) && limit >= 0)
            kernels.above(x, numel, (int32_t)limit, k, rank, stride, out);
    }
    end(&r);
}

/* x, positions, values, (numel, count, whether to add) to x with values at positions */
static void compute_scatter(void *self, TF_OpKernelContext *context) {
    run r;
    begin(&r, context, self);
    const int64_t *job = input(&r, 3, 3 * sizeof *job);
    if (!failed(&r)) {
        float *out = reused(&r, 1, 0, job[0]);
        const size_t bytes = (size_t)job[0] * sizeof *out;
        const float *x = input(&r, 0, (int64_t)bytes);
        const int64_t *positions = input(&r, 1, job[1] * (int64_t)sizeof *positions);
        const float *values = input(&r, 2, job[1] * (int64_t)sizeof *values);
        if (!failed(&r)) {
            if (out != x) memcpy(out, x, bytes);
            judge(&r, kernels.scatter(out, job[0], positions, values, job[1], (int)job[2]));
        }
    }
    end(&r);
}

/* like, (numel) to zeros; what they are like only keeps a graph from holding them as a constant */
static void compute_zeros(void *self, TF_OpKernelContext *context) {
    run r;
    begin(&r, context, self);
    const int64_t *job = input(&r, 1, sizeof *job);
    if (!failed(&r)) {
        const int64_t bytes = job[0] * (int64_t)sizeof(float);
        float *out = output(&r, 0, bytes);
        if (!failed(&r)) memset(out, 0, (size_t)bytes);
    }
    end(&r);
}

static int define(const char *name, compute_function *compute, const char *const *attributes,
                  const char *const *inputs, const char *const *outputs) {
    TF_Status *status = TF_NewStatus();
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(name);
    for (; *attributes; attributes++) TF_OpDefinitionBuilderAddAttr(op, *attributes);
    for (; *inputs; inputs++) TF_OpDefinitionBuilderAddInput(op, *inputs);
    for (; *outputs; outputs++) TF_OpDefinitionBuilderAddOutput(op, *outputs);
    TF_RegisterOpDefinition(op, status);
    int good = TF_GetCode(status) == TF_OK;
    if (good) {
        TF_KernelBuilder *builder = TF_NewKernelBuilder(name, "CPU", NULL, compute, NULL);
        TF_RegisterKernelBuilder(name, builder, status);
        good = TF_GetCode(status) == TF_OK;
    }
    TF_DeleteStatus(status);
    return good;
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})
#define SETTINGS_INPUTS "job: int64", "numbers: double", "tables: float"

/* TensorFlow takes for a library's operations what is registered while it is loaded. */
__attribute__((constructor)) static void define_all(void) {
    if (!find_tensorflow()) return;
    (void)(define("GradcompEncode", compute_encode, LIST("T: {uint8, half}"),
                  LIST("x: float", "key: int64", SETTINGS_INPUTS), LIST("payload: T", "error: float")) &&
           define("GradcompDecode", compute_decode, LIST("T: {uint8, half}", "N: int >= 1"),
                  LIST("scale: float", SETTINGS_INPUTS, "payloads: N * T"), LIST("out: float")) &&
           define("GradcompSelect", compute_select, LIST(NULL),
                  LIST("x: float", "job: int64"), LIST("positions: int64")) &&
           define("GradcompScatter", compute_scatter, LIST(NULL),
                  LIST("x: float", "positions: int64", "values: float", "job: int64"),
                  LIST("out: float")) &&
           define("GradcompZeros", compute_zeros, LIST("T: type"), LIST("like: T", "job: int64"),
                  LIST("out: float")));
}

/* Take the kernels from the library that has them. */
EXPORT void gradcomp_bind(void *encode, void *decode, void *largest, void *above, void *scatter) {
    *(void **)&kernels.encode = encode;
    *(void **)&kernels.decode = decode;
    *(void **)&kernels.largest = largest;
    *(void **)&kernels.above = above;
    *(void **)&kernels.scatter = scatter;
}
