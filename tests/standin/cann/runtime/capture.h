// Capturing: which streams note their tasks in a graph instead of running them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "graph.h"

namespace standin {

class Stream;

struct Capture {
    std::shared_ptr<Graph> graph;
    Stream* origin;
    std::map<Stream*, size_t> lanes;
    aclmdlRICaptureMode mode;
    std::thread::id thread;
};

// A record within a capture, which other streams of the same capture can wait for.
struct Mark {
    std::weak_ptr<Capture> capture;  // gone when the capture has ended
    size_t index = 0;
};

// The kernels that a stream is given to replace those of a group.
struct TaskUpdate {
    TaskGroup* group;
    std::vector<Task> tasks;
};

bool is_captured(Stream& stream);
bool is_capturing(const Mark& mark);

// Whether the calling thread must not block, for the sake of a capture.
bool refuses_blocking_calls();

// Note a task where the stream is captured or updates a graph; then the task is moved from. False if it is to run.
bool note_in_graph(Stream& stream, Task& task);

// Note an event's record; nothing if the stream is not captured.
std::optional<Mark> note_record(Stream& stream);

// Note an event's wait. The stream takes part in the capture from then on.
aclError note_wait(Stream& stream, const Mark& mark);

}  // namespace standin
