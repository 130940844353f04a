// CUDA's runtime, the part of its driver and NVML that PyTorch asks, and NCCL between processes of
// this machine. The memory of a device is memory of the host, kernels do nothing, and every copy and
// collective is done when the call returns. A collective that a rank doesn't enter leaves its stream
// stuck: what waits for the stream waits for ever, and the process goes on.
//
// Variables of the environment:
//   SIMULATED_GPUS           the number of devices, of which CUDA_VISIBLE_DEVICES may hide some
//   SIMULATED_GPUS_DIRECTORY where each process writes its events, and processes meet. While it has
//                            the file `absent`, no rank waits for another one any more
//   SIMULATED_GPUS_STACKS    if set, SIGUSR1 is raised where a context is created
//
// A line of a process's file is a JSON object. Its "event" is one of
//   context        the process has none yet on the device that the calling thread has
//   thread         the thread has not used the device yet; "is_set": it has chosen one before
//   after_fork     the driver was initialized in the process that this one was forked from
//   communicator   NCCL makes one, or splits one off
//   collective     NCCL enters one; "memory" is the number of a device or "host"
//   stuck          another rank has not entered the collective
//   end            the process ends by itself, with what it has counted
//   unimplemented  a function without a body here was called for the first time
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <net/if.h>
// Headers that `nccl.h` includes and doesn't use, and that aren't installed with all they include.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

const int kMaxDevices = 16;
thread_local int device = 0;
thread_local bool has_set_device = false;
thread_local bool has_used[kMaxDevices];

bool has_context[kMaxDevices];
pid_t process_of_contexts = 0, process_of_driver = 0;
std::atomic<long> launches, waits, copies, collectives;
std::mutex mutex;

const char* environment(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

void write_event(const char* event, const char* format, ...) {
  const char* directory = getenv("SIMULATED_GPUS_DIRECTORY");
  if (!directory) return;
  char path[512], line[1024];
  snprintf(path, sizeof path, "%s/%d.jsonl", directory, getpid());
  int length = snprintf(line, sizeof line, "{\"event\": \"%s\", \"process\": %d, \"is_main\": %s, ",
                        event, getpid(), syscall(SYS_gettid) == getpid() ? "true" : "false");
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, sizeof line - length, format, arguments);
  va_end(arguments);
  line[length++] = '}';
  line[length++] = '\n';
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file >= 0 && write(file, line, length) >= 0) close(file);
}

int num_devices() {
  int count = atoi(environment("SIMULATED_GPUS", "2"));
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return count;
  int num_visible = *visible ? 1 + std::count(visible, visible + strlen(visible), ',') : 0;
  return std::min(count, num_visible);
}

// Returns what a call of the runtime returns if it can't be served.
cudaError_t initialize() {
  static int count;  // the driver reads the variable once
  if (!process_of_driver) {
    process_of_driver = getpid();
    count = num_devices();
  }
  if (process_of_driver != getpid()) {
    write_event("after_fork", "\"of\": %d", process_of_driver);
    return cudaErrorInitializationError;
  }
  return count ? cudaSuccess : cudaErrorNoDevice;
}

void end(int status, void*) {
  fflush(nullptr);
  _exit(status);
}

// Called by what needs a context on the calling thread's device.
void use_device(const char* function) {
  if (initialize() != cudaSuccess) return;
  if (process_of_contexts != getpid()) {
    process_of_contexts = getpid();
    // PyTorch's destructors would ask for what ends before them.
    on_exit(end, nullptr);
  }
  if (!has_context[device]) {
    has_context[device] = true;
    write_event("context", "\"device\": %d, \"by\": \"%s\"", device, function);
    if (getenv("SIMULATED_GPUS_STACKS")) raise(SIGUSR1);
  }
  if (!has_used[device]) {
    has_used[device] = true;
    write_event("thread", "\"device\": %d, \"is_set\": %s, \"by\": \"%s\"", device,
                has_set_device ? "true" : "false", function);
  }
}

// A stream and an event have one flag each. Address 0 is the default stream of each device.
struct Queue {
  std::atomic<bool> is_stuck{false};
};
Queue default_queues[kMaxDevices], any_queue;

Queue* queue(cudaStream_t stream) {
  return (size_t)stream < 8 ? &default_queues[device] : (Queue*)stream;
}

void wait_for(Queue* queue) {
  waits++;
  while (queue->is_stuck) usleep(10000);
}

struct Allocation {
  size_t size;
  int device;
};
std::map<char*, Allocation> on_devices, pinned;

const Allocation* find(std::map<char*, Allocation>& allocations, const void* address) {
  auto next = allocations.upper_bound((char*)address);
  if (next == allocations.begin()) return nullptr;
  --next;
  return (char*)address < next->first + next->second.size ? &next->second : nullptr;
}

void* allocate(std::map<char*, Allocation>& allocations, size_t size) {
  size = std::max<size_t>(size, 1);
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  std::lock_guard<std::mutex> guard(mutex);
  allocations[(char*)address] = {size, device};
  return address;
}

void release(std::map<char*, Allocation>& allocations, void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = allocations.find((char*)address);
  if (found == allocations.end()) return;
  munmap(address, found->second.size);
  allocations.erase(found);
}

const size_t kMemory = 8ull << 30;

long driver_function(...) { return 0; }

}  // namespace

extern "C" {

void _exit(int status) {
  if (process_of_contexts == getpid())
    write_event("end", "\"launches\": %ld, \"waits\": %ld, \"copies\": %ld, \"collectives\": %ld",
                launches.load(), waits.load(), copies.load(), collectives.load());
  while (true) syscall(SYS_exit_group, status);
}

// Launches, waits of the host, copies and collectives of this process so far.
void simulated_gpus_counts(long* counts) {
  counts[0] = launches, counts[1] = waits, counts[2] = copies, counts[3] = collectives;
}

void simulated_gpus_unimplemented(const char* name, bool* is_known) {
  if (!*is_known) write_event("unimplemented", "\"name\": \"%s\"", name);
  *is_known = true;
}

// ------------------------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int* count) {
  cudaError_t error = initialize();
  *count = error ? 0 : num_devices();
  return error;
}
cudaError_t cudaSetDevice(int number) {
  if (cudaError_t error = initialize()) return error;
  if (number < 0 || number >= num_devices()) return cudaErrorInvalidDevice;
  device = number;
  has_set_device = true;
  use_device("cudaSetDevice");
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return initialize();
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
const char* cudaGetErrorName(cudaError_t error) {
  return error ? "simulated error" : "cudaSuccess";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Simulated GPU %d", number);
  properties->major = 9;
  properties->totalGlobalMem = kMemory;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] =
      1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 227 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  properties->pciBusID = number + 1;
  memset(properties->uuid.bytes, number + 1, sizeof properties->uuid.bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> values = {{cudaDevAttrMultiProcessorCount, 132},
                                            {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
                                            {cudaDevAttrMaxGridDimY, 65535},
                                            {cudaDevAttrComputeCapabilityMajor, 9}};
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int number) {
  snprintf(id, size, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  use_device("cudaDeviceSynchronize");
  return wait_for(&any_queue), cudaSuccess;
}

// -------------------------------------------------------------------------------------- memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  use_device("cudaMemGetInfo");
  std::lock_guard<std::mutex> guard(mutex);
  *free = *total = kMemory;
  for (auto& each : on_devices)
    if (each.second.device == device) *free -= each.second.size;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t size) {
  use_device("cudaMalloc");
  return *address = allocate(on_devices, size), cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  use_device("cudaFree");
  return release(on_devices, address), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  use_device("cudaHostAlloc");
  return *address = allocate(pinned, size), cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  use_device("cudaFreeHost");
  return release(pinned, address), cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  use_device("cudaHostRegister");
  std::lock_guard<std::mutex> guard(mutex);
  pinned[(char*)address] = {size, device};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  use_device("cudaHostUnregister");
  std::lock_guard<std::mutex> guard(mutex);
  pinned.erase((char*)address);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> guard(mutex);
  if (const Allocation* found = find(on_devices, address)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = found->device;
    attributes->devicePointer = (void*)address;
  } else if (const Allocation* found = find(pinned, address)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = found->device;
    attributes->hostPointer = (void*)address;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  use_device("cudaMemcpyAsync");
  copies++;
  if (size) memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, size, kind, nullptr);
  return wait_for(&any_queue), cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t) {
  use_device("cudaMemsetAsync");
  launches++;
  memset(address, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t size) {
  return cudaMemsetAsync(address, value, size, nullptr);
}

// -------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  use_device("cudaStreamCreateWithPriority");
  return *stream = (cudaStream_t) new Queue, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return queue(stream)->is_stuck ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  use_device("cudaStreamSynchronize");
  return wait_for(queue(stream)), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (((Queue*)event)->is_stuck) queue(stream)->is_stuck = true;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  return *priority = 0, cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  use_device("cudaEventCreateWithFlags");
  return *event = (cudaEvent_t) new Queue, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  ((Queue*)event)->is_stuck = queue(stream)->is_stuck.load();
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return ((Queue*)event)->is_stuck ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return wait_for((Queue*)event), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  return *milliseconds = 0.1f, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
  return function(argument), cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                  void* argument, unsigned) {
  return function(stream, cudaSuccess, argument), cudaSuccess;
}

// ------------------------------------------------------------------------------------- kernels

static cudaError_t launch(const char* function) {
  use_device(function);
  return launches++, cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch("cudaLaunchKernel");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return launch("cudaLaunchKernelExC");
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch("__cudaLaunchKernel");
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = (cudaKernel_t)function, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->numRegs = 32;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* number, const void*, int,
                                                                   size_t, unsigned) {
  return *number = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* number, const void*, int, size_t) {
  return *number = 2, cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[1 << 20];
  return *address = symbol, cudaSuccess;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* result, int* number) {
  memset(result, 0, 64);
  return *number = 1, 0;
}
int cublasLtMatmul(...) { return launch("cublasLtMatmul"); }
int cublasSgemm_v2(...) { return launch("cublasSgemm"); }
int cublasGemmEx(...) { return launch("cublasGemmEx"); }
int cublasSgemmStridedBatched(...) { return launch("cublasSgemmStridedBatched"); }
int cublasGemmStridedBatchedEx(...) { return launch("cublasGemmStridedBatchedEx"); }
int cublasCreate_v2(void** handle) {
  use_device("cublasCreate");
  return *handle = malloc(64), 0;
}
int cublasLtCreate(void** handle) { return *handle = malloc(64), 0; }
int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
const char* cublasGetStatusString(int) { return "simulated"; }
size_t cublasLtGetVersion() { return 130101; }
size_t cudnnGetVersion() { return 92400; }
const char* cudnnGetErrorString(int) { return "simulated"; }

// ---------------------------------------------------------------------------- driver and NVML

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = (void*)driver_function;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
int cuDevicePrimaryCtxGetState(int number, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = process_of_contexts == getpid() && has_context[number];
  return 0;
}
int cuCtxGetCurrent(void** context) { return *context = &on_devices, 0; }
int cuInit(unsigned) { return initialize(); }
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }

int nvmlInit() { return 0; }
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(int* count) {
  return *count = atoi(environment("SIMULATED_GPUS", "2")), 0;
}
int nvmlDeviceGetHandleByIndex_v2(int index, void** handle) {
  return *handle = (void*)(size_t)(index + 1), 0;
}
int nvmlDeviceGetUUID(void* handle, char* uuid, unsigned size) {
  return snprintf(uuid, size, "GPU-%zu", (size_t)handle), 0;
}

}  // extern "C"

// ---------------------------------------------------------------------------------------- NCCL

namespace {

const int kMaxRanks = 8;
const size_t kChunk = 1 << 20;

// What the ranks of a communicator share: in which phase each is, and its part of the data.
struct Meeting {
  std::atomic<long> phases[kMaxRanks];
  char data[kMaxRanks][kChunk];
};

struct Communicator {
  int rank, size, device, num_splits;
  long phase;
  bool is_stuck;
  std::string id;
  Meeting* meeting;
};

std::string path_of(const std::string& name) {
  return std::string(environment("SIMULATED_GPUS_DIRECTORY", "/tmp")) + "/" + name;
}

// Returns whether all ranks have entered this phase.
bool meet(Communicator* communicator) {
  if (communicator->is_stuck) return false;
  static const std::string absent = path_of("absent");
  long phase = ++communicator->phase;
  communicator->meeting->phases[communicator->rank] = phase;
  for (int rank = 0; rank < communicator->size; rank++)
    while (communicator->meeting->phases[rank] < phase) {
      usleep(50);
      if (access(absent.c_str(), F_OK) == 0) {
        write_event("stuck", "\"communicator\": \"%s\"", communicator->id.c_str());
        communicator->is_stuck = true;
        return false;
      }
    }
  return true;
}

ncclResult_t create(ncclComm_t* result, const std::string& id, int size, int rank) {
  use_device("ncclCommInitRank");
  auto communicator = new Communicator{rank, size, device, 0, 0, false, id, nullptr};
  write_event("communicator", "\"id\": \"%s\", \"rank\": %d, \"size\": %d, \"device\": %d",
              id.c_str(), rank, size, device);
  const char* interface = getenv("NCCL_SOCKET_IFNAME");
  if (interface && !if_nametoindex(interface)) return ncclSystemError;
  int file = open(path_of("nccl." + id).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (size > kMaxRanks || file < 0 || ftruncate(file, sizeof(Meeting))) return ncclSystemError;
  communicator->meeting = (Meeting*)mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE,
                                         MAP_SHARED, file, 0);
  close(file);
  *result = (ncclComm_t)communicator;
  return meet(communicator) ? ncclSuccess : ncclSystemError;
}

std::string text(const ncclUniqueId& id) {
  char digits[17];
  for (int i = 0; i < 8; i++) snprintf(digits + 2 * i, 3, "%02x", (unsigned char)id.internal[i]);
  return digits;
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

template <class T>
void reduce(T* result, Communicator* communicator, size_t count, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    T value = ((T*)communicator->meeting->data[0])[i];
    for (int rank = 1; rank < communicator->size; rank++) {
      T other = ((T*)communicator->meeting->data[rank])[i];
      value = operation == ncclMax   ? std::max(value, other)
              : operation == ncclMin ? std::min(value, other)
                                     : value + other;
    }
    result[i] = value;
  }
}

void reduce(void* result, Communicator* communicator, size_t count, ncclDataType_t type,
            ncclRedOp_t operation) {
  switch (type) {
    case ncclFloat32:
      return reduce((float*)result, communicator, count, operation);
    case ncclFloat64:
      return reduce((double*)result, communicator, count, operation);
    case ncclInt32:
      return reduce((int*)result, communicator, count, operation);
    case ncclInt64:
      return reduce((long*)result, communicator, count, operation);
    case ncclInt8:
    case ncclUint8:
      return reduce((unsigned char*)result, communicator, count, operation);
    default:  // halves, of which kernels compute none here
      memset(result, 0, count * size_of(type));
  }
}

// Each rank writes, all meet, each rank reads, all meet, for each chunk of at most `kChunk` bytes.
template <class Write, class Read>
ncclResult_t exchange(ncclComm_t handle, const char* name, const void* memory, size_t bytes,
                      cudaStream_t stream, size_t chunk, Write write, Read read) {
  if (bytes == 0) return ncclSuccess;
  auto communicator = (Communicator*)handle;
  char where[16] = "\"host\"";
  {
    std::lock_guard<std::mutex> guard(mutex);
    if (const Allocation* found = find(on_devices, memory))
      snprintf(where, sizeof where, "%d", found->device);
  }
  collectives++;
  write_event("collective", "\"name\": \"%s\", \"communicator\": \"%s\", \"bytes\": %zu, "
              "\"memory\": %s, \"device\": %d",
              name, communicator->id.c_str(), bytes, where, communicator->device);
  for (size_t start = 0; start < bytes; start += chunk) {
    size_t size = std::min(chunk, bytes - start);
    if (!communicator->is_stuck) write(communicator->meeting->data, start, size);
    bool have_met = meet(communicator);
    if (have_met) read(communicator->meeting->data, start, size);
    if (!have_met || !meet(communicator)) {
      queue(stream)->is_stuck = any_queue.is_stuck = true;
      break;
    }
  }
  return ncclSuccess;
}

using Data = char[kMaxRanks][kChunk];

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = 23007, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) {
  return result ? "simulated error" : "no error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return getentropy(id->internal, sizeof id->internal) ? ncclSystemError : ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return create(result, text(id), size, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* result, int size, ncclUniqueId id, int rank) {
  return create(result, text(id), size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* result, int size, int rank, int,
                                      ncclUniqueId* ids, ncclConfig_t*) {
  return create(result, text(ids[0]), size, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* result,
                           ncclConfig_t*) {
  auto parent = (Communicator*)handle;
  int own[2] = {color, key};
  memcpy(parent->meeting->data[parent->rank], own, sizeof own);
  if (!meet(parent)) return ncclSystemError;
  int rank = 0, size = 0;
  for (int i = 0; i < parent->size; i++) {
    int other[2];
    memcpy(other, parent->meeting->data[i], sizeof other);
    size += other[0] == color;
    rank += other[0] == color && std::make_pair(other[1], i) < std::make_pair(key, parent->rank);
  }
  if (!meet(parent)) return ncclSystemError;
  *result = nullptr;
  std::string id = parent->id + "." + std::to_string(parent->num_splits++);
  return color < 0 ? ncclSuccess : create(result, id + "." + std::to_string(color), size, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  return *result = ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t communicator, int* count) {
  return *count = ((Communicator*)communicator)->size, ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  return *rank = ((Communicator*)communicator)->rank, ncclSuccess;
}
// An average is as good as a sum of what no kernel has computed.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t,
                                      ncclScalarResidence_t, ncclComm_t) {
  return *operation = ncclSum, ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t handle, cudaStream_t stream) {
  auto communicator = (Communicator*)handle;
  return exchange(
      handle, "AllReduce", from, count * size_of(type), stream, kChunk,
      [&](Data& data, size_t start, size_t size) {
        memcpy(data[communicator->rank], (char*)from + start, size);
      },
      [&](Data&, size_t start, size_t size) {
        reduce((char*)to + start, communicator, size / size_of(type), type, operation);
      });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int, ncclComm_t handle, cudaStream_t stream) {
  return ncclAllReduce(from, to ? to : (void*)from, count, type, operation, handle, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
  auto communicator = (Communicator*)handle;
  return exchange(
      handle, "Broadcast", from, count * size_of(type), stream, kChunk,
      [&](Data& data, size_t start, size_t size) {
        if (communicator->rank == root) memcpy(data[root], (char*)from + start, size);
      },
      [&](Data& data, size_t start, size_t size) { memcpy((char*)to + start, data[root], size); });
}
ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t type, int root,
                       ncclComm_t handle, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, handle, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
  auto communicator = (Communicator*)handle;
  size_t bytes = count * size_of(type);
  return exchange(
      handle, "AllGather", from, bytes, stream, kChunk,
      [&](Data& data, size_t start, size_t size) {
        memcpy(data[communicator->rank], (char*)from + start, size);
      },
      [&](Data& data, size_t start, size_t size) {
        for (int rank = 0; rank < communicator->size; rank++)
          memcpy((char*)to + rank * bytes + start, data[rank], size);
      });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t handle, cudaStream_t stream) {
  auto communicator = (Communicator*)handle;
  size_t bytes = count * size_of(type);
  size_t offset = communicator->rank * bytes, end = offset + bytes;
  return exchange(
      handle, "ReduceScatter", from, bytes * communicator->size, stream,
      // Chunks end where the parts of ranks do.
      std::max<size_t>(std::min(bytes, kChunk / 8 * 8), 1),
      [&](Data& data, size_t start, size_t size) {
        memcpy(data[communicator->rank], (char*)from + start, size);
      },
      [&](Data&, size_t start, size_t size) {
        if (start >= offset && start < end)
          reduce((char*)to + start - offset, communicator, size / size_of(type), type, operation);
      });
}

}  // extern "C"
