/* A CUDA driver that runs nothing and writes down what it is asked, for tests on machines without a GPU.
 * One device, "Fake GPU", of the compute capability in FAKE_ARCH (80); the log goes to the file FAKE_LOG. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int context_mark, other_mark;
static void* current;

static void note(const char* format, unsigned long long a, unsigned long long b, unsigned long long c) {
  FILE* file = fopen(getenv("FAKE_LOG"), "a");
  fprintf(file, format, a, b, c);
  fputc('\n', file);
  fclose(file);
}
static int number(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuGetErrorName(int code, const char** text) { return *text = code ? "CUDA_ERROR_FAKE" : "CUDA_SUCCESS", 0; }
int cuGetErrorString(int code, const char** text) { return *text = code ? "made up" : "no error", 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) { return (void)device, strncpy(name, "Fake GPU", size), 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  const int arch = number("FAKE_ARCH", 80);
  (void)device;
  *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : which == 97 ? 101376 : which == 16 ? 108 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &context_mark;
  return note("retain %llu", device, 0, 0), 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(void* context) { return current = context, note("push", 0, 0, 0), 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = NULL, note("pop", 0, 0, 0), 0; }
int cuModuleLoadData(void** module, const void* image) {
  *module = &other_mark;
  return note("load %llx", *(const unsigned*)image, 0, 0), number("FAKE_LOAD_RESULT", 0);
}
int cuModuleUnload(void* module) { return (void)module, note("unload", 0, 0, 0), 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  *function = strdup(name);
  return strcmp(name, "missing") == 0 ? 500 : 0;
}
int cuFuncSetAttribute(void* function, int which, int value) {
  return (void)function, note("attribute %llu %llu", which, value, 0), 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  (void)stream, (void)extra, (void)gy, (void)gz, (void)by, (void)bz;
  note("launch", 0, 0, 0);
  FILE* file = fopen(getenv("FAKE_LOG"), "a");
  fprintf(file, "kernel %s %u %u %u %d\n", (const char*)function, gx, bx, shared, *(const int*)params[0]);
  fclose(file);
  return number("FAKE_LAUNCH_RESULT", 0);
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t size, void* stream) {
  return (void)stream, note("memset %llx %llu %llu", address, value, size), 0;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const unsigned long long* dims,
                           const unsigned long long* strides, const unsigned* box, const unsigned* element_strides,
                           int interleave, int swizzle, int promotion, int fill) {
  (void)element_strides, (void)interleave, (void)promotion, (void)fill, (void)address, (void)box;
  note("map %llu %llu %llu", (unsigned long long)type, rank, (unsigned long long)swizzle);
  note("map sizes %llu %llu strides %llu", dims[0], dims[3], strides[2]);
  return memset(map, 7, 128), (size_t)map % 64 != 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int kept;
  const int before = kept;
  note("capture mode %llu", *mode, 0, 0);
  return kept = *mode, *mode = before, 0;
}
/* NVRTC asks for this one, and takes a refusal but not its absence. */
int cuGetExportTable(const void** table, const void* id) { return (void)id, *table = NULL, 500; }
