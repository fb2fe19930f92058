// Functions of the host that a stream calls in its order.
//
// CANN calls them from a thread that subscribed to the stream and asks for reports. Here the stream's own thread, which
// is one of the host, calls them, so that there is never anything to report.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "acl/acl.h"
#include "stream.h"

extern "C" {

int standin_submit_function(void* stream, const char* name, int (*function)(void*), void* data) {
    const std::string kernel(name);
    return standin::submit(stream, {kernel, standin::Kind::work, [=] {
                                        if (function(data) != 0) {
                                            throw std::runtime_error(kernel + " failed: see stderr");
                                        }
                                    }});
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* data) {
    return standin::submit(stream, {"HostFunction", standin::Kind::work, [=] { function(data); }});
}

aclError aclrtLaunchCallback(aclrtCallback function, void* data, aclrtCallbackBlockType, aclrtStream stream) {
    return aclrtLaunchHostFunc(stream, function, data);
}

aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtProcessReport(int32_t milliseconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::clamp(milliseconds, 1, 100)));
    return ACL_ERROR_WAIT_CALLBACK_TIMEOUT;
}

}  // extern "C"
