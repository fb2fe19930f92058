// Memory of devices and pinned memory of the host, and copies between them.
#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "acl/acl.h"
#include "capture.h"
#include "device.h"
#include "failure.h"
#include "stream.h"
#include "trace.h"

namespace standin {
namespace {

constexpr size_t ALIGNMENT = 512;  // that of CANN
constexpr size_t SLACK = 64;  // CANN lets kernels read a little beyond the end
constexpr size_t DEFAULT_MEGABYTES = 8192;

struct Block {
    size_t bytes;
    int device;
    aclrtMemLocationType place;
};

struct Heap {
    std::mutex lock;
    std::map<const char*, Block> blocks;
    std::map<int, size_t> used;  // bytes in use on each device
};

Heap& get_heap() {
    static auto& heap = *new Heap;  // never destroyed: torch frees memory after destructors have begun to run
    return heap;
}

aclError allocate(void** address, size_t bytes, aclrtMemLocationType place) {
    Heap& heap = get_heap();
    std::lock_guard<std::mutex> guard(heap.lock);
    int device = get_device();
    if (place == ACL_MEM_LOCATION_TYPE_DEVICE && heap.used[device] + bytes > get_device_bytes()) {
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "device " + std::to_string(device) + " is out of memory");
    }
    *address = std::aligned_alloc(ALIGNMENT, (bytes + SLACK + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    if (*address == nullptr) {
        return fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host is out of memory");
    }
    heap.blocks[static_cast<char*>(*address)] = {bytes, device, place};
    if (place == ACL_MEM_LOCATION_TYPE_DEVICE) {
        heap.used[device] += bytes;
    }
    return ACL_SUCCESS;
}

aclError release(void* address) {
    Heap& heap = get_heap();
    std::lock_guard<std::mutex> guard(heap.lock);
    auto found = heap.blocks.find(static_cast<char*>(address));
    if (found == heap.blocks.end()) {
        return fail(ACL_ERROR_RT_PARAM_INVALID, "free memory that was not allocated");
    }
    if (found->second.place == ACL_MEM_LOCATION_TYPE_DEVICE) {
        heap.used[found->second.device] -= found->second.bytes;
    }
    heap.blocks.erase(found);
    std::free(address);
    return ACL_SUCCESS;
}

const char* get_copy_name(aclrtMemcpyKind kind) {
    switch (kind) {
        case ACL_MEMCPY_HOST_TO_HOST: return "MemcpyHostToHost";
        case ACL_MEMCPY_HOST_TO_DEVICE: return "MemcpyHostToDevice";
        case ACL_MEMCPY_DEVICE_TO_HOST: return "MemcpyDeviceToHost";
        case ACL_MEMCPY_DEVICE_TO_DEVICE: return "MemcpyDeviceToDevice";
        default: return "Memcpy";
    }
}

}  // namespace

size_t get_device_bytes() {
    const char* megabytes = std::getenv("NPU_STANDIN_MEMORY_MB");
    return (megabytes == nullptr ? DEFAULT_MEGABYTES : std::strtoull(megabytes, nullptr, 10)) << 20;
}

}  // namespace standin

extern "C" {

// Bytes in use on all devices.
size_t standin_count_allocated() {
    standin::Heap& heap = standin::get_heap();
    std::lock_guard<std::mutex> guard(heap.lock);
    size_t bytes = 0;
    for (auto& [device, used] : heap.used) {
        bytes += used;
    }
    return bytes;
}

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
    return standin::allocate(address, bytes, ACL_MEM_LOCATION_TYPE_DEVICE);
}

aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy) {
    return standin::allocate(address, bytes, ACL_MEM_LOCATION_TYPE_DEVICE);
}

aclError aclrtMallocHost(void** address, size_t bytes) {
    return standin::allocate(address, bytes, ACL_MEM_LOCATION_TYPE_HOST);
}

aclError aclrtMallocHostWithCfg(void** address, uint64_t bytes, aclrtMallocConfig*) {
    return standin::allocate(address, bytes, ACL_MEM_LOCATION_TYPE_HOST);
}

aclError aclrtFree(void* address) { return standin::release(address); }

aclError aclrtFreeHost(void* address) { return standin::release(address); }

// Memory of the host is memory of all devices here, also before it is registered.
aclError aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t) {
    return address && bytes ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM;
}

aclError aclrtHostGetDevicePointer(void* address, void** on_device, uint32_t) {
    *on_device = address;
    return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* all_bytes) {
    standin::Heap& heap = standin::get_heap();
    std::lock_guard<std::mutex> guard(heap.lock);
    *all_bytes = standin::get_device_bytes();
    *free_bytes = *all_bytes - heap.used[standin::get_device()];
    return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    standin::Heap& heap = standin::get_heap();
    std::lock_guard<std::mutex> guard(heap.lock);
    auto after = heap.blocks.upper_bound(static_cast<const char*>(address));
    if (after != heap.blocks.begin()) {
        auto& [start, block] = *std::prev(after);
        if (address < start + block.bytes) {
            attributes->location = {static_cast<uint32_t>(block.device), block.place};
        }
    }
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
    if (standin::refuses_blocking_calls()) {
        return standin::fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a copy that blocks, during a capture");
    }
    if (bytes > room) {
        return standin::fail(ACL_ERROR_RT_PARAM_INVALID, "a copy larger than its destination");
    }
    standin::Time start = standin::get_time();
    std::memmove(to, from, bytes);
    standin::trace({standin::NO_STREAM, standin::get_copy_name(kind), start, start, standin::get_time()});
    return ACL_SUCCESS;
}

aclError aclrtMemset(void* address, size_t, int32_t value, size_t bytes) {
    std::memset(address, value, bytes);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    if (bytes > room) {
        return standin::fail(ACL_ERROR_RT_PARAM_INVALID, "a copy larger than its destination");
    }
    auto copy = [=] { std::memmove(to, from, bytes); };
    return standin::submit(stream, {standin::get_copy_name(kind), standin::Kind::work, copy});
}

aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

aclError aclrtMemsetAsync(void* address, size_t, int32_t value, size_t bytes, aclrtStream stream) {
    return standin::submit(stream, {"Memset", standin::Kind::work, [=] { std::memset(address, value, bytes); }});
}

}  // extern "C"
