// The size of a device's memory, which is ordinary memory of the host.
#pragma once

#include <cstddef>

namespace standin {

// NPU_STANDIN_MEMORY_MB, or 8 GiB.
size_t get_device_bytes();

}  // namespace standin
