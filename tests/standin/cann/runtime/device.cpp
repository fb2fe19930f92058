// Setting up and tearing down, devices, and what they say about themselves.
#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "acl/acl.h"
#include "failure.h"
#include "limits.h"
#include "memory.h"
#include "stream.h"

namespace standin {
namespace {

constexpr int MOST_DEVICES = 64;
constexpr int64_t L2_CACHE_BYTES = int64_t{192} << 20;
constexpr const char* CANN_VERSION = "9.0.0";
// Under this name torch_npu says at once which operator is missing; under an older one its task queue fails later.
constexpr const char* SOC_NAME = "Ascend950PR_9589";

std::atomic<bool> is_initialized{false};
thread_local int current_device = -1;
std::array<char, MOST_DEVICES> contexts;  // a context is an address in here, its device the index

bool is_device(int device) { return device >= 0 && device < count_devices(); }

}  // namespace

int get_device() { return std::max(current_device, 0); }

void set_device(int device) { current_device = device; }

int count_devices() {
    const char* count = std::getenv("NPU_STANDIN_DEVICES");
    return count == nullptr ? 1 : std::clamp(std::atoi(count), 1, MOST_DEVICES);
}

}  // namespace standin

extern "C" {

aclError aclInit(const char*) {
    return standin::is_initialized.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}

aclError aclFinalize() {
    standin::end_all_streams();
    standin::is_initialized = false;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t* count) {
    *count = static_cast<uint32_t>(standin::count_devices());
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (!standin::is_device(device)) {
        return standin::fail(ACL_ERROR_RT_INVALID_DEVICEID, "there is no device " + std::to_string(device));
    }
    standin::set_device(device);
    return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
    if (standin::current_device < 0) {
        return standin::fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
    }
    *device = standin::current_device;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (standin::current_device < 0) {
        return standin::fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has set no device");
    }
    *context = &standin::contexts[standin::current_device];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    standin::set_device(static_cast<int>(static_cast<char*>(context) - standin::contexts.data()));
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* is_active) {
    if (flags != nullptr) {
        *flags = 0;
    }
    *is_active = standin::current_device == device;
    return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user_device, int32_t* const logic_device) {
    *logic_device = user_device;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can_access, int32_t, int32_t) {
    *can_access = 0;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    *pid = getpid();
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid* uuid) {
    std::memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = static_cast<char>(device);
    return ACL_SUCCESS;
}

const char* aclrtGetSocName() {
    const char* name = std::getenv("NPU_STANDIN_SOC");
    return name == nullptr ? standin::SOC_NAME : name;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    std::memset(version, 0, sizeof *version);
    std::strcpy(version->version, standin::CANN_VERSION);
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char*, char* version) {
    std::strcpy(version, standin::CANN_VERSION);
    return ACL_SUCCESS;
}

aclError aclGetCannAttributeList(const aclCannAttr** attributes, size_t* count) {
    static const aclCannAttr all[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
    *attributes = all;
    *count = std::size(all);
    return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr, int32_t* is_supported) {
    *is_supported = 1;
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
    *value = info == ACL_DEVICE_INFO_AI_CORE_NUM       ? standin::CUBE_CORES
             : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? standin::VECTOR_CORES
                                                       : standin::L2_CACHE_BYTES;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
    switch (attribute) {
        case ACL_DEV_ATTR_AICORE_CORE_NUM:
        case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = standin::CUBE_CORES; break;
        case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = standin::VECTOR_CORES; break;
        case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = standin::L2_CACHE_BYTES; break;
        case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = static_cast<int64_t>(standin::get_device_bytes()); break;
        default: *value = 0;
    }
    return ACL_SUCCESS;
}

// Settings that change nothing here.
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
    *actual = timeout;
    return ACL_SUCCESS;
}

}  // extern "C"
