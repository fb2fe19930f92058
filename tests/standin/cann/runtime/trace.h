// What ran when: kept while a test asks for it.
#pragma once

#include <cstdint>
#include <string>

namespace standin {

// Nanoseconds of the steady clock (CLOCK_MONOTONIC, which is Python's time.monotonic too).
using Time = uint64_t;

Time get_time();

constexpr int64_t NO_STREAM = -1;  // of a copy that the host makes, and waits for

struct Interval {
    int64_t stream;
    std::string kernel;
    Time queued, start, end;
};

// Note that a kernel ran, if somebody traces.
void trace(Interval interval);

}  // namespace standin
