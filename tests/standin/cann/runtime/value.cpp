// Words in device memory that streams write and wait for.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "acl/acl.h"
#include "stream.h"

namespace standin {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::microseconds POLL_INTERVAL{50};
constexpr Seconds DEFAULT_WAIT_LIMIT{120};

Seconds get_wait_limit() {
    const char* seconds = std::getenv("NPU_STANDIN_WAIT_SECONDS");
    return seconds == nullptr ? DEFAULT_WAIT_LIMIT : Seconds{std::atof(seconds)};
}

// Whether a word in device memory is what a stream waits for.
bool is_met(const uint64_t* word, uint64_t value, uint32_t condition) {
    uint64_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    switch (condition) {
        case ACL_STREAM_WAIT_VALUE_EQ: return now == value;
        case ACL_STREAM_WAIT_VALUE_AND: return (now & value) != 0;
        case ACL_STREAM_WAIT_VALUE_NOR: return ~(now | value) != 0;
        default: return static_cast<int64_t>(now - value) >= 0;
    }
}

// Poll, because nothing says when a word is written: a kernel may write it too. Throws after a while: a test that
// forgets to write shall fail, not hang.
void wait_for_value(const uint64_t* word, uint64_t value, uint32_t condition) {
    auto end = std::chrono::steady_clock::now() + get_wait_limit();
    while (!is_met(word, value, condition) && !has_given_up()) {
        if (std::chrono::steady_clock::now() > end) {
            throw std::runtime_error("the value was not written within NPU_STANDIN_WAIT_SECONDS");
        }
        std::this_thread::sleep_for(POLL_INTERVAL);
    }
}

}  // namespace
}  // namespace standin

extern "C" {

aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
    auto write = [=] { __atomic_store_n(static_cast<uint64_t*>(address), value, __ATOMIC_RELEASE); };
    return standin::submit(stream, {"ValueWrite", standin::Kind::order, write});
}

aclError aclrtValueWait(void* address, uint64_t value, uint32_t condition, aclrtStream stream) {
    auto word = static_cast<const uint64_t*>(address);
    auto wait = [=] { standin::wait_for_value(word, value, condition); };
    return standin::submit(stream, {"ValueWait", standin::Kind::order, wait});
}

}  // extern "C"
