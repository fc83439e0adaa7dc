// CUDA's driver of a machine without a device, which notes when it is initialized: a line in the file $FAKE_DRIVER_LOG.

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

extern "C" {
int cuInit(unsigned) {
  if (const char* path = std::getenv("FAKE_DRIVER_LOG")) {
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    (void)!write(file, "cuInit\n", 7);
    close(file);
  }
  return 100;  // CUDA_ERROR_NO_DEVICE
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
static int other() { return 3; }  // CUDA_ERROR_NOT_INITIALIZED
int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, void*) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  *function = is("cuInit")               ? reinterpret_cast<void*>(&cuInit)
              : is("cuDriverGetVersion") ? reinterpret_cast<void*>(&cuDriverGetVersion)
              : is("cuGetProcAddress")   ? reinterpret_cast<void*>(&cuGetProcAddress_v2)
                                         : reinterpret_cast<void*>(&other);
  return 0;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
}
