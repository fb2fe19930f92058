// A task: what a stream or a graph runs, one after another.
#pragma once

#include <string>

#include "../standin.h"
#include "slowdown.h"
#include "trace.h"

namespace standin {

// Work computes or moves data; order only makes streams wait for each other, and is never slowed down.
enum class Kind { work, order };

struct Task {
    std::string name;
    Kind kind;
    Kernel kernel;
};

// Run a task, slowed down as a test asked for, and note it in the trace as one of the stream.
void run_task(const Task& task, int64_t stream, Turn turn, Time queued);

// The process ends: from now on no work runs and nothing waits for a value.
void give_up();
bool has_given_up();

}  // namespace standin
