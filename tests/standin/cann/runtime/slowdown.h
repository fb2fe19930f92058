// Extra time that a test gives to kernels, so that they overlap, or overtake, in ways that speed alone would not show.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace standin {

// Which kernel of which queue: what the extra time by jitter depends on, besides the seed.
struct Turn {
    int64_t queue;
    uint64_t number;
};

// The extra time that one run of a kernel takes.
std::chrono::nanoseconds find_extra_time(const std::string& kernel, Turn turn);

// Changes whenever a test sets the jitter anew: streams count their kernels from there.
uint64_t get_jitter_epoch();

}  // namespace standin
