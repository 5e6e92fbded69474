/* The CUDA runtime as torch calls it, without a device: memory is host memory that nothing is written to, streams,
   events and graphs are numbers, and kernels do nothing. What is launched and waited for is counted.

   Functions that only have to succeed are not here: build.py makes them. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#undef cudaEventElapsedTime
#undef cudaGetDriverEntryPointByVersion
#undef cudaGraphAddNode
#undef cudaGraphNodeGetDependencies
#undef cudaStreamAddCallback
#undef cudaStreamGetCaptureInfo

typedef cudaError_t E;
#define GIB (1ul << 30)
#define MOST_COPIED (1ul << 16) /* bytes between places on the device that are really copied: indices and flags */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device = 0;
static __thread E last_error = cudaSuccess;

/* ---- what tests ask ---- */
static uint64_t launches;
static void (*tell)(void); /* called where the host would wait for the device, by the thread that would */
uint64_t stand_in_launches(void) { return launches; }
void stand_in_tell_of_waits(void (*listener)(void)) { tell = listener; }
static void waited(void) {
    void (*listener)(void) = tell;
    if (listener) listener();
}
void stand_in_launched(void) { __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED); }

/* ---- kernels ---- */
void **__cudaRegisterFatBinary(void *code) { static void *handle[4]; return handle; }
E __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return 0; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared, *(void **)stream = configuration.stream;
    return 0;
}
static E launch(void) { stand_in_launched(); return 0; }
E __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch(); }
E cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t st) { return launch(); }
E cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch(); }
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 64, a->binaryVersion = a->ptxVersion = 90;
    a->maxDynamicSharedSizeBytes = 227 << 10;
    return 0;
}
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return 0; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
    *n = 2;
    return 0;
}

/* ---- devices: those of STAND_IN_DEVICES, as an H200 describes itself ---- */
static int num_devices(void) { const char *text = getenv("STAND_IN_DEVICES"); return text ? atoi(text) : 1; }
E cudaGetDeviceCount(int *n) { *n = num_devices(); return 0; }
E cudaGetDevice(int *d) { *d = device; return 0; }
E cudaSetDevice(int d) {
    if (d < 0 || d >= num_devices()) return last_error = cudaErrorInvalidDevice;
    device = d;
    return 0;
}
int stand_in_attribute(int attribute) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrConcurrentKernels:
    case cudaDevAttrMemoryPoolsSupported: return 1;
    }
    return 0;
}
E cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int d) { *value = stand_in_attribute(a); return 0; }
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= num_devices()) return last_error = cudaErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "stand-in");
    p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32, p->totalGlobalMem = 139 * GIB;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->textureAlignment = 512, p->memoryBusWidth = 6144;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 60 << 20, p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->canMapHostMemory = p->memoryPoolsSupported = p->streamPrioritiesSupported = 1;
    p->pciBusID = p->uuid.bytes[0] = d + 1;
    return 0;
}
E cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
E cudaDeviceGetPCIBusId(char *text, int size, int d) { snprintf(text, size, "0000:%02x:00.0", d + 1); return 0; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
E cudaDeviceSynchronize(void) { waited(); return 0; }
E cudaDriverGetVersion(int *v) { *v = 13020; return 0; }
E cudaRuntimeGetVersion(int *v) { *v = 13020; return 0; }
E cudaGetLastError(void) { E error = last_error; last_error = 0; return error; }
E cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(E e) { return e ? "cudaErrorOfStandIn" : "cudaSuccess"; }
const char *cudaGetErrorString(E e) {
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorInvalidDevice ? "invalid device ordinal"
           : e ? "error of the stand-in" : "no error";
}

/* ---- memory: pages that cost nothing until they are touched ---- */
typedef struct { char *start; size_t size; enum cudaMemoryType type; int device; } Block;
static Block *blocks;
static size_t num_blocks, room_for_blocks, bytes_on_device;

static void add(void *start, size_t size, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    if (num_blocks == room_for_blocks) {
        room_for_blocks = room_for_blocks ? 2 * room_for_blocks : 1024;
        blocks = realloc(blocks, room_for_blocks * sizeof *blocks);
    }
    blocks[num_blocks++] = (Block){start, size, type, device};
    if (type == cudaMemoryTypeDevice) bytes_on_device += size;
    pthread_mutex_unlock(&lock);
}
static size_t take(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks && !size; i++)
        if (blocks[i].start == start) {
            size = blocks[i].size;
            if (blocks[i].type == cudaMemoryTypeDevice) bytes_on_device -= size;
            blocks[i] = blocks[--num_blocks];
        }
    pthread_mutex_unlock(&lock);
    return size;
}
static E allocate(void **start, size_t size, enum cudaMemoryType type) {
    size = size ? (size + 4095) & ~4095ul : 4096;
    *start = NULL;
    if (type == cudaMemoryTypeDevice && bytes_on_device + size > 139 * GIB) return last_error = cudaErrorMemoryAllocation;
    void *found = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return last_error = cudaErrorMemoryAllocation;
    add(*start = found, size, type);
    return 0;
}
static E release(void *start) {
    size_t size = start ? take(start) : 0;
    if (size) munmap(start, size);
    return 0;
}
E cudaMalloc(void **p, size_t n) { return allocate(p, n, cudaMemoryTypeDevice); }
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return allocate(p, n, cudaMemoryTypeDevice); }
E cudaFree(void *p) { waited(); return release(p); }
E cudaFreeAsync(void *p, cudaStream_t s) { return release(p); }
E cudaHostAlloc(void **p, size_t n, unsigned flags) { return allocate(p, n, cudaMemoryTypeHost); }
E cudaMallocHost(void **p, size_t n) { return allocate(p, n, cudaMemoryTypeHost); }
E cudaFreeHost(void *p) { waited(); return release(p); }
E cudaHostRegister(void *p, size_t n, unsigned flags) { add(p, n, cudaMemoryTypeHost); return 0; }
E cudaHostUnregister(void *p) { take(p); return 0; }
E cudaMemGetInfo(size_t *available, size_t *total) {
    *total = 139 * GIB, *available = *total - bytes_on_device;
    return 0;
}
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_blocks; i++)
        if ((char *)p >= blocks[i].start && (char *)p < blocks[i].start + blocks[i].size) {
            a->type = blocks[i].type, a->device = blocks[i].device, a->devicePointer = (void *)p;
            a->hostPointer = a->type == cudaMemoryTypeDevice ? NULL : (void *)p;
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
static int on_device(const void *p) {
    struct cudaPointerAttributes a;
    cudaPointerGetAttributes(&a, p);
    return a.type == cudaMemoryTypeDevice;
}
static E copy(void *to, const void *from, size_t n) {
    if (n <= MOST_COPIED || !on_device(to) || !on_device(from)) memmove(to, from, n);
    return 0;
}
E cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { waited(); return copy(d, s, n); }
E cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { return copy(d, s, n); }
E cudaMemcpyPeerAsync(void *d, int to, const void *s, int from, size_t n, cudaStream_t st) { return copy(d, s, n); }
static E fill(void *p, int value, size_t n) {
    if (n <= MOST_COPIED) memset(p, value, n);
    return 0;
}
E cudaMemset(void *p, int value, size_t n) { return fill(p, value, n); }
E cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return fill(p, value, n); }
E cudaGetSymbolAddress(void **p, const void *symbol) { static char room[1 << 16]; *p = room; return 0; }
E cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int d) { *pool = (void *)1; return 0; }
E cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(uint64_t *)v = 0; return 0; }
E cudaDeviceGetGraphMemAttribute(int d, enum cudaGraphMemAttributeType a, void *v) { *(uint64_t *)v = 0; return 0; }

/* ---- streams and events ---- */
typedef struct { int priority, capturing; uint64_t capture; } Stream;
typedef struct { Stream *stream; struct timespec time; } Event;
static Stream default_stream;
static Stream *stream_of(cudaStream_t s) { return (uintptr_t)s <= 2 ? &default_stream : (Stream *)s; }
E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    Stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    *s = (cudaStream_t)made;
    return 0;
}
E cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
E cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = stream_of(s)->priority; return 0; }
E cudaStreamSynchronize(cudaStream_t s) { waited(); return 0; }
E cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned f) { call(s, 0, data); return 0; }
E cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { call(data); return 0; }
E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = (cudaEvent_t)calloc(1, sizeof(Event)); return 0; }
E cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    ((Event *)e)->stream = stream_of(s);
    clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->time);
    return 0;
}
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
E cudaEventSynchronize(cudaEvent_t e) { waited(); return 0; }
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    Stream *from = ((Event *)e)->stream, *to = stream_of(s);
    if (from && from->capturing) to->capturing = 1, to->capture = from->capture; /* a capture spreads over streams */
    return 0;
}
E cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    struct timespec *a = &((Event *)begin)->time, *b = &((Event *)end)->time;
    *milliseconds = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) * 1e-6f;
    return 0;
}

/* ---- graphs ---- */
static uint64_t captures;
static enum cudaStreamCaptureStatus status_of(cudaStream_t s) {
    return stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
E cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    stream_of(s)->capturing = 1, stream_of(s)->capture = ++captures;
    return 0;
}
E cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    stream_of(s)->capturing = 0;
    *graph = (cudaGraph_t)calloc(1, 64);
    return 0;
}
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = status_of(s); return 0; }
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                           cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                           size_t *num) {
    static cudaGraphNode_t none[1];
    *status = status_of(s);
    if (id) *id = stream_of(s)->capture;
    if (graph) *graph = (cudaGraph_t)&default_stream;
    if (nodes) *nodes = none;
    if (edges) *edges = NULL;
    if (num) *num = 0;
    return 0;
}
E cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = (void *)g; return 0; }
E cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long flags) { *e = (void *)g; return 0; }
E cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return launch(); }
E cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *num) {
    *num = 1;
    if (nodes) nodes[0] = (void *)1;
    return 0;
}
E cudaGraphNodeGetDependencies(cudaGraphNode_t n, cudaGraphNode_t *d, cudaGraphEdgeData *e, size_t *num) {
    *num = 0;
    return 0;
}
E cudaUserObjectCreate(cudaUserObject_t *o, void *p, cudaHostFn_t destroy, unsigned count, unsigned flags) {
    *o = (void *)1;
    return 0;
}

/* ---- code that is loaded while the program runs ---- */
E cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **values, unsigned n,
                      enum cudaLibraryOption *options, void **option_values, unsigned num_options) {
    *library = (void *)1;
    return 0;
}
E cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    *kernel = (void *)strdup(name);
    return 0;
}
E cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *result) {
    static void *driver;
    char later[128];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : NULL;
    snprintf(later, sizeof later, "%s_v2", name);
    if (driver && !*function) *function = dlsym(driver, later);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? 0 : cudaErrorSymbolNotFound;
}
