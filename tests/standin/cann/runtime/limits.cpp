// Limits on the cores that a device's, a stream's or a thread's kernels may use: kept and given back, not obeyed.
#include "limits.h"

#include <array>
#include <map>
#include <mutex>
#include <string>

#include "acl/acl.h"
#include "failure.h"
#include "stream.h"

namespace standin {
namespace {

using Cores = std::array<uint32_t, 2>;  // by aclrtDevResLimitType
constexpr Cores ALL_CORES{CUBE_CORES, VECTOR_CORES};

std::mutex lock;  // of all limits
thread_local aclrtStream used_stream = nullptr;  // whose limits hold for what this thread launches

// Of the devices that have a limit.
std::map<int, Cores>& get_limited_devices() {
    static auto& devices = *new std::map<int, Cores>;
    return devices;
}

Cores get_device_cores(int device) {
    auto found = get_limited_devices().find(device);
    return found == get_limited_devices().end() ? ALL_CORES : found->second;
}

uint32_t get_stream_cores(const Stream& stream, aclrtDevResLimitType type) {
    return stream.core_limits[type] != 0 ? stream.core_limits[type] : get_device_cores(stream.device)[type];
}

aclError check_cores(aclrtDevResLimitType type, uint32_t cores) {
    if (cores == 0 || cores > ALL_CORES[type]) {
        return fail(ACL_ERROR_INVALID_PARAM, "a limit of " + std::to_string(cores) + " cores; there are 1 to " +
                                                 std::to_string(ALL_CORES[type]));
    }
    return ACL_SUCCESS;
}

}  // namespace
}  // namespace standin

extern "C" {

aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t cores) {
    aclError error = standin::check_cores(type, cores);
    if (error == ACL_SUCCESS) {
        std::lock_guard<std::mutex> guard(standin::lock);
        standin::get_limited_devices().emplace(device, standin::ALL_CORES).first->second[type] = cores;
    }
    return error;
}

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t* cores) {
    std::lock_guard<std::mutex> guard(standin::lock);
    *cores = standin::get_device_cores(device)[type];
    return ACL_SUCCESS;
}

aclError aclrtResetDeviceResLimit(int32_t device) {
    std::lock_guard<std::mutex> guard(standin::lock);
    standin::get_limited_devices().erase(device);
    return ACL_SUCCESS;
}

aclError aclrtSetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t cores) {
    aclError error = standin::check_cores(type, cores);
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "limit the cores of a stream that does not exist");
    }
    if (error == ACL_SUCCESS) {
        std::lock_guard<std::mutex> guard(standin::lock);
        stream->core_limits[type] = cores;
    }
    return error;
}

aclError aclrtGetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t* cores) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "ask the core limit of a stream that does not exist");
    }
    std::lock_guard<std::mutex> guard(standin::lock);
    *cores = standin::get_stream_cores(*stream, type);
    return ACL_SUCCESS;
}

aclError aclrtResetStreamResLimit(aclrtStream handle) {
    if (standin::Stream* stream = standin::find_stream(handle)) {
        std::lock_guard<std::mutex> guard(standin::lock);
        stream->core_limits = {};
    }
    return ACL_SUCCESS;
}

aclError aclrtUseStreamResInCurrentThread(aclrtStream handle) {
    standin::used_stream = handle;
    return ACL_SUCCESS;
}

aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
    standin::used_stream = nullptr;
    return ACL_SUCCESS;
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* cores) {
    return aclrtGetStreamResLimit(standin::used_stream, type, cores);
}

}  // extern "C"
