/* cuBLAS, cuDNN, NCCL and NVRTC, as far as a call that only succeeds would not do: build.py compiles one part at a time. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void stand_in_launched(void);

#ifdef CUBLAS
int cublasCreate_v2(void **handle) { *handle = calloc(1, 64); return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
#endif

#ifdef CUBLASLT
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
int cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *e, void *p, int asked,
                                   Heuristic *result, int *num) {
    memset(result, 0, sizeof *result);
    result->waves = 1, *num = 1;
    return 0;
}
size_t cublasLtGetVersion(void) { return 130401; }
int cublasLtMatmul(void) { stand_in_launched(); return 0; }
#endif

#ifdef CUDNN
int cudnnCreate(void **handle) { *handle = calloc(1, 64); return 0; }
size_t cudnnGetVersion(void) { return 92600; }
size_t cudnnGetCudartVersion(void) { return 13020; }
int cudnnGetProperty(int type, int *value) { *value = type == 0 ? 9 : type == 1 ? 26 : 0; return 0; }
int cudnnGetStream(void *handle, void **stream) { *stream = NULL; return 0; }
const char *cudnnGetErrorString(int error) { return "error of the stand-in"; }
void cudnnGetLastErrorString(char *text, size_t size) { if (size) text[0] = 0; }

/* Its backend interface finds one engine, which needs no workspace and supports all that is asked of it. The numbers
   are those of cudnnBackendAttributeType_t and cudnnBackendAttributeName_t. */
enum { TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_NUMERICAL_NOTE = 11, TYPE_BEHAVIOR_NOTE = 19 };
enum { ENGINECFG_KNOB_CHOICES = 302, ENGINE_NUMERICAL_NOTE = 1303 };
int cudnnBackendCreateDescriptor(int type, void **made) { *made = calloc(1, 256); return 0; }
int cudnnBackendGetAttribute(void *d, int name, int type, int64_t asked, int64_t *num, void *values) {
    int64_t found = type != TYPE_NUMERICAL_NOTE && type != TYPE_BEHAVIOR_NOTE && name != ENGINECFG_KNOB_CHOICES &&
                    name != ENGINE_NUMERICAL_NOTE;
    if (num) *num = found;
    if (found && values && asked > 0 && type == TYPE_INT64) *(int64_t *)values = 0;
    if (found && values && asked > 0 && type == TYPE_BOOLEAN) *(char *)values = 0;
    return 0;
}
int cudnnBackendExecute(void) { stand_in_launched(); return 0; }

typedef struct { int algorithm, status; float time; size_t memory; int determinism, math, reserved[3]; } Performance;
static int one(int *num, Performance *p) {
    memset(p, 0, sizeof *p);
    p->algorithm = p->math = p->determinism = *num = 1;
    return 0;
}
#define CHOICE(kind)                                                                                                    \
    int cudnnGetConvolution##kind##Algorithm_v7(void *h, void *a, void *b, void *c, void *d, int asked, int *num,       \
                                                Performance *p) { return one(num, p); }                                 \
    int cudnnFindConvolution##kind##AlgorithmEx(void *h, void *a, void *x, void *b, void *y, void *c, void *d, void *z, \
                                                int asked, int *num, Performance *p, void *w, size_t n) {               \
        return one(num, p);                                                                                             \
    }                                                                                                                   \
    int cudnnGetConvolution##kind##WorkspaceSize(void *h, void *a, void *b, void *c, void *d, int g, size_t *n) {       \
        *n = 1 << 20;                                                                                                   \
        return 0;                                                                                                       \
    }
CHOICE(Forward)
CHOICE(BackwardData)
CHOICE(BackwardFilter)

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *a, void *b, void *c, void *d,
                                                             void *e, size_t *n) { *n = 1024; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *a, void *b, void *c, void *d, void *e,
                                                      void *f, size_t *n) { *n = 1024; return 0; }
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *n) {
    *n = 1024;
    return 0;
}
#endif

#ifdef NCCL
/* Each rank is alone: collectives give it its own numbers. */
typedef struct { int size, rank; } Communicator;
typedef struct { char bytes[128]; } Id;
static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}
static int move(void *to, const void *from, size_t bytes) {
    stand_in_launched();
    if (to != from && bytes <= (4 << 20)) memmove(to, from, bytes);
    return 0;
}
static void *made(int size, int rank) {
    Communicator *c = calloc(1, 4096);
    c->size = size, c->rank = rank;
    return c;
}
int ncclGetVersion(int *version) { *version = 23007; return 0; }
const char *ncclGetErrorString(int e) { return e ? "error of the stand-in" : "no error"; }
const char *ncclGetLastError(void *c) { return ""; }
int ncclGetUniqueId(Id *id) { memset(id, 7, sizeof *id); return 0; }
int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }
int ncclCommCount(Communicator *c, int *n) { *n = c->size; return 0; }
int ncclCommUserRank(Communicator *c, int *n) { *n = c->rank; return 0; }
int ncclCommInitRank(void **c, int n, Id id, int rank) { *c = made(n, rank); return 0; }
int ncclCommInitRankConfig(void **c, int n, Id id, int rank, void *config) { *c = made(n, rank); return 0; }
int ncclCommInitRankScalable(void **c, int n, int rank, int k, void *ids, void *config) { *c = made(n, rank); return 0; }
static int size; /* of the group that is made next */
void stand_in_size(int num) { size = num; }
int ncclCommSplit(Communicator *c, int color, int key, void **split, void *config) {
    *split = color < 0 ? NULL : made(size ? size : c->size, key);
    return 0;
}
int ncclAllReduce(const void *from, void *to, size_t n, int type) { return move(to, from, n * size_of(type)); }
int ncclReduce(const void *from, void *to, size_t n, int type) { return move(to, from, n * size_of(type)); }
int ncclBroadcast(const void *from, void *to, size_t n, int type) { return move(to, from, n * size_of(type)); }
int ncclReduceScatter(const char *from, void *to, size_t n, int type, int operation, Communicator *c) {
    return move(to, from + n * size_of(type) * c->rank, n * size_of(type));
}
int ncclAllGather(const void *from, char *to, size_t n, int type, Communicator *c) {
    for (int i = 0; i < c->size; i++) move(to + i * n * size_of(type), from, n * size_of(type));
    return 0;
}
int ncclSend(void) { stand_in_launched(); return 0; }
int ncclRecv(void) { stand_in_launched(); return 0; }
#endif

#ifdef NVRTC
int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
int nvrtcCreateProgram(void **program) { *program = calloc(1, 64); return 0; }
int nvrtcDestroyProgram(void **program) { return 0; }
int nvrtcAddNameExpression(void *program, const char *name) { return 0; }
int nvrtcCompileProgram(void *program, int num, const char **options) { return 0; }
int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { *lowered = name; return 0; }
static int one_byte(size_t *size) { *size = 1; return 0; }
int nvrtcGetPTXSize(void *program, size_t *size) { return one_byte(size); }
int nvrtcGetCUBINSize(void *program, size_t *size) { return one_byte(size); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return one_byte(size); }
static int empty(char *text) { *text = 0; return 0; }
int nvrtcGetPTX(void *program, char *text) { return empty(text); }
int nvrtcGetCUBIN(void *program, char *text) { return empty(text); }
int nvrtcGetProgramLog(void *program, char *text) { return empty(text); }
const char *nvrtcGetErrorString(int error) { return error ? "error of the stand-in" : "no error"; }
#endif
