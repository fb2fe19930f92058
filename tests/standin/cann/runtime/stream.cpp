#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>

#include "capture.h"
#include "device.h"
#include "failure.h"

namespace standin {
namespace {

std::atomic<int> next_id{0};

struct Registry {
    std::mutex lock;
    std::map<aclrtStream, std::shared_ptr<Stream>> streams;
    std::map<int, aclrtStream> defaults;
};

Registry& get_registry() {
    static auto& registry = *new Registry;  // never destroyed: end_all_streams() empties it while it still can
    return registry;
}

// Call with the registry's lock.
Stream* add_stream(Registry& registry, int device) {
    // Threads must be gone before the libraries whose code they run are torn down.
    static const int is_unregistered = std::atexit(end_all_streams);
    (void)is_unregistered;
    auto stream = std::make_shared<Stream>(device);
    registry.streams[stream.get()] = stream;
    return stream.get();
}

std::vector<std::shared_ptr<Stream>> list_streams(int device) {
    Registry& registry = get_registry();
    std::lock_guard<std::mutex> guard(registry.lock);
    std::vector<std::shared_ptr<Stream>> found;
    for (auto& [handle, stream] : registry.streams) {
        if (stream->device == device) {
            found.push_back(stream);
        }
    }
    return found;
}

aclError synchronize_stream(aclrtStream handle, int milliseconds) {
    Stream* stream = find_stream(handle);
    if (stream == nullptr) {
        return fail(ACL_ERROR_RT_INVALID_HANDLE, "synchronize a stream that does not exist");
    }
    if (is_captured(*stream)) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURED, "synchronize a stream that is being captured");
    }
    return stream->synchronize(milliseconds);
}

aclError synchronize_device(int milliseconds) {
    if (refuses_blocking_calls()) {
        return fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "synchronize a device during a capture");
    }
    aclError first = ACL_SUCCESS;
    for (auto& stream : list_streams(get_device())) {
        if (is_captured(*stream)) {
            continue;
        }
        aclError error = stream->synchronize(milliseconds);
        first = first == ACL_SUCCESS ? error : first;
    }
    return first;
}

}  // namespace

Stream::Stream(int device) : id(next_id++), device(device), thread_([this] { run_queue(); }) {}

Stream::~Stream() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        is_ending_ = true;
    }
    has_news_.notify_one();
    thread_.join();
}

void Stream::push(Task task) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        queue_.push_back({std::move(task), get_time()});
    }
    has_news_.notify_one();
}

bool Stream::is_idle() {
    std::lock_guard<std::mutex> guard(lock_);
    return queue_.empty() && !is_busy_;
}

aclError Stream::synchronize(int milliseconds) {
    std::unique_lock<std::mutex> guard(lock_);
    auto is_done = [this] { return queue_.empty() && !is_busy_; };
    if (milliseconds < 0) {
        is_done_.wait(guard, is_done);
    } else if (!is_done_.wait_for(guard, std::chrono::milliseconds(milliseconds), is_done)) {
        return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream " + std::to_string(id) + " is still busy");
    }
    if (failure_.empty()) {
        return ACL_SUCCESS;
    }
    std::string failure;
    failure.swap(failure_);
    return fail(ACL_ERROR_RT_AICORE_EXCEPTION, failure);
}

void Stream::run_queue() {
    set_device(device);
    pthread_setname_np(pthread_self(), ("standin-" + std::to_string(id)).c_str());
    std::unique_lock<std::mutex> guard(lock_);
    while (true) {
        has_news_.wait(guard, [this] { return is_ending_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        {
            Queued queued = std::move(queue_.front());  // dies before the stream says it is done, and tensors with it
            queue_.pop_front();
            is_busy_ = true;
            guard.unlock();
            run(queued);
        }
        guard.lock();
        is_busy_ = false;
        is_done_.notify_all();
    }
}

void Stream::run(const Queued& queued) {
    Turn turn = queued.task.kind == Kind::work ? take_turn() : Turn{};
    try {
        run_task(queued.task, id, turn, queued.time);
    } catch (const std::exception& error) {
        std::lock_guard<std::mutex> guard(lock_);
        if (failure_.empty()) {
            std::string what = error.what();
            what.resize(std::min(what.size(), what.find('\n')));  // torch adds the C++ stack
            failure_ = "kernel " + queued.task.name + " failed on stream " + std::to_string(id) + ": " + what;
        }
    }
}

Turn Stream::take_turn() {
    if (uint64_t epoch = get_jitter_epoch(); epoch != jitter_epoch_) {
        jitter_epoch_ = epoch;
        kernels_since_epoch_ = 0;
    }
    return {id, kernels_since_epoch_++};
}

Stream* find_stream(aclrtStream handle) {
    Registry& registry = get_registry();
    std::lock_guard<std::mutex> guard(registry.lock);
    if (handle == nullptr) {
        aclrtStream& kept = registry.defaults[get_device()];
        handle = kept = kept == nullptr ? add_stream(registry, get_device()) : kept;
    }
    auto found = registry.streams.find(handle);
    return found == registry.streams.end() ? nullptr : found->second.get();
}

aclError submit(aclrtStream handle, Task task) {
    Stream* stream = find_stream(handle);
    if (stream == nullptr) {
        return fail(ACL_ERROR_RT_INVALID_HANDLE, task.name + " on a stream that does not exist");
    }
    if (!note_in_graph(*stream, task)) {
        stream->push(std::move(task));
    }
    return ACL_SUCCESS;
}

void end_all_streams() {
    give_up();
    Registry& registry = get_registry();
    std::map<aclrtStream, std::shared_ptr<Stream>> ending;
    {
        std::lock_guard<std::mutex> guard(registry.lock);
        ending.swap(registry.streams);
        registry.defaults.clear();
    }
    ending.clear();  // without the lock: a kernel that still runs may ask for its stream
}

}  // namespace standin

extern "C" {

int standin_submit(void* stream, const char* name, standin::Kernel* kernel) {
    return standin::submit(stream, {name, standin::Kind::work, std::move(*kernel)});
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t /*priority*/, uint32_t /*flag*/) {
    standin::Registry& registry = standin::get_registry();
    std::lock_guard<std::mutex> guard(registry.lock);
    *stream = standin::add_stream(registry, standin::get_device());
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
    standin::Registry& registry = standin::get_registry();
    std::shared_ptr<standin::Stream> ending;  // ends after the lock is let go: what is queued may need the registry
    std::lock_guard<std::mutex> guard(registry.lock);
    auto found = registry.streams.find(stream);
    if (found == registry.streams.end()) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "destroy a stream that does not exist");
    }
    ending = std::move(found->second);
    registry.streams.erase(found);
    return ACL_SUCCESS;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtSynchronizeStream(aclrtStream stream) { return standin::synchronize_stream(stream, -1); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
    return standin::synchronize_stream(stream, milliseconds);
}

aclError aclrtSynchronizeDevice() { return standin::synchronize_device(-1); }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) { return standin::synchronize_device(milliseconds); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "query a stream that does not exist");
    }
    *status = stream->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "ask the id of a stream that does not exist");
    }
    *id = stream->id;
    return ACL_SUCCESS;
}

// Settings that change nothing here: there is no hardware queue to fail, overflow or cache.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue*) { return ACL_SUCCESS; }

}  // extern "C"
