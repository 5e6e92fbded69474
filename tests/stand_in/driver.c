/* The CUDA driver as torch, Triton and the runtime beside this call it. What is not here is not found. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaDeviceSynchronize(void), cudaFree(void *), cudaGetDevice(int *), cudaGetDeviceCount(int *), cudaMalloc(void **, size_t);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaStreamIsCapturing(void *, int *);
int stand_in_attribute(int);
void stand_in_launched(void);

#define CONTEXT ((void *)0x1000)
#define SUCCEEDS(name) int name(void) { return 0; }
#define NOT_SUPPORTED(name) int name(void) { return 801; }

SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxDestroy_v2) SUCCEEDS(cuDevicePrimaryCtxRelease_v2) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuMemsetD8_v2) SUCCEEDS(cuMemsetD8Async)
SUCCEEDS(cuMemsetD32Async) SUCCEEDS(cuStreamWriteValue32) SUCCEEDS(cuStreamWriteValue32_v2) SUCCEEDS(cuStreamWriteValue64)
SUCCEEDS(cuTensorMapEncodeTiled) SUCCEEDS(cudaLaunchCooperativeKernel)
NOT_SUPPORTED(cuLinkCreate_v2) NOT_SUPPORTED(cuLinkAddData_v2) NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuMemGetAddressRange_v2) NOT_SUPPORTED(cuMulticastCreate) NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem) NOT_SUPPORTED(cuMulticastUnbind) NOT_SUPPORTED(cuMemCreate) NOT_SUPPORTED(cuMemMap)
NOT_SUPPORTED(cuMemUnmap) NOT_SUPPORTED(cuMemRelease) NOT_SUPPORTED(cuMemSetAccess) NOT_SUPPORTED(cuMemAddressReserve)
NOT_SUPPORTED(cuMemAddressFree) NOT_SUPPORTED(cuMemGetHandleForAddressRange) NOT_SUPPORTED(cuMemExportToShareableHandle)
NOT_SUPPORTED(cuMemImportFromShareableHandle) NOT_SUPPORTED(cuGreenCtxCreate) NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuDeviceGetDevResource) NOT_SUPPORTED(cuDevResourceGenerateDesc) NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuGreenCtxStreamCreate) NOT_SUPPORTED(cuGreenCtxDestroy) NOT_SUPPORTED(cuCtxRecordEvent)
NOT_SUPPORTED(cuCtxWaitEvent)

int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *text, int size, int d) { snprintf(text, size, "stand-in"); return 0; }
int cuDeviceGetUuid_v2(void *uuid, int d) { memset(uuid, d + 1, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int d) { *value = stand_in_attribute(attribute); return 0; }
int cuDeviceGetPCIBusId(char *text, int size, int d) { snprintf(text, size, "0000:%02x:00.0", d + 1); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = 139ul << 30; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = CONTEXT; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
int cuCtxGetCurrent(void **c) { *c = CONTEXT; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = CONTEXT; return 0; }
int cuCtxCreate_v2(void **c, unsigned flags, int d) { *c = CONTEXT; return 0; }
int cuCtxGetDevice(int *d) { return cudaGetDevice(d); }
int cuCtxGetLimit(size_t *value, int limit) { *value = 1 << 20; return 0; }
int cuStreamGetCtx(void *stream, void **c) { *c = CONTEXT; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { return cudaStreamIsCapturing(stream, status); }
int cuEventCreate(void **e, unsigned flags) { *e = calloc(1, 64); return 0; }
int cuGetErrorString(int e, const char **text) { *text = e ? "error of the stand-in" : "no error"; return 0; }
int cuGetErrorName(int e, const char **text) { *text = e ? "CUDA_ERROR_OF_STAND_IN" : "CUDA_SUCCESS"; return 0; }

int cuModuleLoadData(void **module, const void *code) { *module = calloc(1, 64); return 0; }
int cuModuleLoadDataEx(void **module, const void *code, unsigned n, void *options, void *values) {
    return cuModuleLoadData(module, code);
}
int cuModuleLoad(void **module, const char *file) { return cuModuleLoadData(module, file); }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuModuleGetGlobal_v2(void **p, size_t *size, void *module, const char *name) {
    static char room[4096];
    if (p) *p = room;
    if (size) *size = sizeof room;
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *f) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0; /* threads of a block; registers */
    return 0;
}
int cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int cuLaunchKernel(void *f) { stand_in_launched(); return 0; }
int cuLaunchKernelEx(void *configuration) { stand_in_launched(); return 0; }
int cuLaunchCooperativeKernel(void *f) { stand_in_launched(); return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { *n = 2; return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *configuration) { *n = 16; return 0; }

int cuPointerGetAttribute(void *data, int attribute, uint64_t p) {
    if (attribute == 2) *(int *)data = 2; /* memory type: device */
    else if (attribute == 1 || attribute == 4) *(uint64_t *)data = p; /* context; device pointer */
    return 0;
}
int cuMemAlloc_v2(void **p, size_t n) { return cudaMalloc(p, n); }
int cuMemFree_v2(void *p) { return cudaFree(p); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, void *s) { return cudaMemcpyAsync(to, from, n, 4, s); }
int cuMemGetAllocationGranularity(size_t *n, void *p, int option) { *n = 2 << 20; return 0; }

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    static void *driver;
    char later[128];
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    snprintf(later, sizeof later, "%s_v2", name);
    *function = dlsym(driver, name);
    if (!*function) *function = dlsym(driver, later);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : 500;
}
