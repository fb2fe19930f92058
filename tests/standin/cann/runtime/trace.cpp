#include "trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

namespace standin {
namespace {

struct Trace {
    std::mutex lock;
    std::vector<Interval> intervals;
    std::atomic<bool> is_on{false};
};

Trace& get_trace() {
    static auto& kept = *new Trace;  // never destroyed: streams may still run when the process ends
    return kept;
}

}  // namespace

Time get_time() {
    auto since_epoch = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<Time>(std::chrono::duration_cast<std::chrono::nanoseconds>(since_epoch).count());
}

void trace(Interval interval) {
    Trace& kept = get_trace();
    if (kept.is_on) {
        std::lock_guard<std::mutex> guard(kept.lock);
        kept.intervals.push_back(std::move(interval));
    }
}

}  // namespace standin

extern "C" {

// One interval as Python reads it; cann.py declares the same.
struct standin_Kernel {
    int64_t stream;
    uint64_t queued, start, end;
    char name[104];
};

void standin_trace_start() {
    standin::Trace& kept = standin::get_trace();
    std::lock_guard<std::mutex> guard(kept.lock);
    kept.intervals.clear();
    kept.is_on = true;
}

// Stop tracing; returns how many kernels there are to read.
size_t standin_trace_stop() {
    standin::Trace& kept = standin::get_trace();
    std::lock_guard<std::mutex> guard(kept.lock);
    kept.is_on = false;
    return kept.intervals.size();
}

void standin_trace_read(standin_Kernel* kernels, size_t count) {
    standin::Trace& kept = standin::get_trace();
    std::lock_guard<std::mutex> guard(kept.lock);
    for (size_t i = 0; i < std::min(count, kept.intervals.size()); ++i) {
        const standin::Interval& from = kept.intervals[i];
        kernels[i] = {from.stream, from.queued, from.start, from.end, {}};
        from.kernel.copy(kernels[i].name, sizeof kernels[i].name - 1);
    }
}

}  // extern "C"
