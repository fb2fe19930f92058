#include "capture.h"

#include <algorithm>
#include <mutex>
#include <string>

#include "failure.h"
#include "stream.h"

namespace standin {
namespace {

struct Captures {
    std::mutex lock;  // of this, and of what streams know of captures and updates
    std::vector<std::shared_ptr<Capture>> active;
    std::map<aclmdlRI, std::shared_ptr<Graph>> graphs;
};

Captures& get_captures() {
    static auto& captures = *new Captures;  // never destroyed: streams may still run when the process ends
    return captures;
}

thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

void leave_capture(Captures& captures, const std::shared_ptr<Capture>& capture) {
    for (auto& [stream, lane] : capture->lanes) {
        stream->capture.reset();
        stream->open_group = nullptr;
    }
    captures.active.erase(std::find(captures.active.begin(), captures.active.end(), capture));
}

std::shared_ptr<Graph> find_graph(aclmdlRI handle) {
    Captures& captures = get_captures();
    std::lock_guard<std::mutex> guard(captures.lock);
    auto found = captures.graphs.find(handle);
    return found == captures.graphs.end() ? nullptr : found->second;
}

aclError fail_without_stream() {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "a capture on a stream that does not exist");
}

// End a capture and keep its graph, or drop it if it cannot be replayed.
aclError end_capture(Captures& captures, Stream& stream, aclmdlRI* handle) {
    *handle = nullptr;
    std::shared_ptr<Capture> capture = stream.capture;
    if (capture == nullptr) {
        return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "end the capture of a stream that is not captured");
    }
    if (capture->origin != &stream) {
        return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "a capture must end on the stream that it began on");
    }
    bool is_group_open = std::any_of(capture->lanes.begin(), capture->lanes.end(),
                                     [](auto& entry) { return entry.first->open_group != nullptr; });
    leave_capture(captures, capture);
    if (is_group_open) {
        captures.graphs.erase(capture->graph.get());
        return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group was not ended before its capture");
    }
    if (!capture->graph->is_joined()) {
        captures.graphs.erase(capture->graph.get());
        return fail(ACL_ERROR_RT_STREAM_UNJOINED, "the capture's first stream does not wait for all others at its end");
    }
    *handle = capture->graph.get();
    return ACL_SUCCESS;
}

}  // namespace

bool is_captured(Stream& stream) {
    std::lock_guard<std::mutex> guard(get_captures().lock);
    return stream.capture != nullptr;
}

bool is_capturing(const Mark& mark) { return !mark.capture.expired(); }

bool refuses_blocking_calls() {
    Captures& captures = get_captures();
    std::lock_guard<std::mutex> guard(captures.lock);
    return thread_mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED &&
           std::any_of(captures.active.begin(), captures.active.end(), [](const auto& capture) {
               return capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL ||
                      (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL &&
                       capture->thread == std::this_thread::get_id());
           });
}

bool note_in_graph(Stream& stream, Task& task) {
    std::lock_guard<std::mutex> guard(get_captures().lock);
    bool is_work = task.kind == Kind::work;
    if (stream.update != nullptr && is_work) {
        stream.update->tasks.push_back(std::move(task));
        return true;
    }
    if (stream.capture != nullptr) {
        size_t node = stream.capture->graph->add_task(stream.capture->lanes.at(&stream), std::move(task));
        if (stream.open_group != nullptr && is_work) {
            stream.open_group->nodes.push_back(node);
        }
        return true;
    }
    return false;
}

std::optional<Mark> note_record(Stream& stream) {
    std::lock_guard<std::mutex> guard(get_captures().lock);
    if (stream.capture == nullptr) {
        return std::nullopt;
    }
    return Mark{stream.capture, stream.capture->graph->add_record(stream.capture->lanes.at(&stream))};
}

aclError note_wait(Stream& stream, const Mark& mark) {
    std::lock_guard<std::mutex> guard(get_captures().lock);
    std::shared_ptr<Capture> capture = mark.capture.lock();
    if (capture == nullptr || (stream.capture != nullptr && stream.capture != capture)) {
        return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "a wait for an event of another capture");
    }
    if (stream.capture == nullptr) {
        stream.capture = capture;
        capture->lanes[&stream] = capture->graph->add_lane();
    }
    capture->graph->add_wait(capture->lanes.at(&stream), mark.index);
    return ACL_SUCCESS;
}

}  // namespace standin

extern "C" {

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode* mode) {
    std::swap(*mode, standin::thread_mode);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail_without_stream();
    }
    standin::Captures& captures = standin::get_captures();
    std::lock_guard<std::mutex> guard(captures.lock);
    if (stream->capture != nullptr) {
        return standin::fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is being captured already");
    }
    auto graph = std::make_shared<standin::Graph>();
    standin::Capture capture{graph, stream, {{stream, graph->add_lane()}}, mode, std::this_thread::get_id()};
    stream->capture = std::make_shared<standin::Capture>(std::move(capture));
    captures.active.push_back(stream->capture);
    captures.graphs[graph.get()] = graph;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* graph) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail_without_stream();
    }
    standin::Captures& captures = standin::get_captures();
    std::lock_guard<std::mutex> guard(captures.lock);
    return standin::end_capture(captures, *stream, graph);
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus* status, aclmdlRI* graph) {
    standin::Stream* stream = standin::find_stream(handle);
    if (stream == nullptr) {
        return standin::fail_without_stream();
    }
    std::lock_guard<std::mutex> guard(standin::get_captures().lock);
    bool is_captured = stream->capture != nullptr;
    *status = is_captured ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (graph != nullptr) {
        *graph = is_captured ? stream->capture->graph.get() : nullptr;
    }
    return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
    std::shared_ptr<standin::Graph> graph = standin::find_graph(handle);
    if (graph == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "ask the id of a graph that does not exist");
    }
    *id = graph->id;
    return ACL_SUCCESS;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream) {
    std::shared_ptr<standin::Graph> graph = standin::find_graph(handle);
    standin::Stream* onto = standin::find_stream(stream);
    if (graph == nullptr || onto == nullptr) {
        return standin::fail(ACL_ERROR_RT_INVALID_HANDLE, "replay a graph, or on a stream, that does not exist");
    }
    auto replay = [graph, device = onto->device] { graph->replay(device); };
    return standin::submit(stream, {"GraphReplay", standin::Kind::order, replay});
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
    standin::Captures& captures = standin::get_captures();
    std::shared_ptr<standin::Graph> ending = standin::find_graph(handle);  // ends after the lock is let go
    std::lock_guard<std::mutex> guard(captures.lock);
    captures.graphs.erase(handle);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    standin::Stream* stream = standin::find_stream(handle);
    std::lock_guard<std::mutex> guard(standin::get_captures().lock);
    if (stream == nullptr || stream->capture == nullptr || stream->open_group != nullptr) {
        return standin::fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group begins once, within a capture");
    }
    stream->open_group = stream->capture->graph->add_group();
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* group) {
    standin::Stream* stream = standin::find_stream(handle);
    std::lock_guard<std::mutex> guard(standin::get_captures().lock);
    if (stream == nullptr || stream->open_group == nullptr) {
        return standin::fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "end a task group that was not begun");
    }
    *group = stream->open_group;
    stream->open_group = nullptr;
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group) {
    standin::Stream* stream = standin::find_stream(handle);
    std::lock_guard<std::mutex> guard(standin::get_captures().lock);
    if (stream == nullptr || stream->capture != nullptr || stream->update != nullptr || group == nullptr) {
        return standin::fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update of a task group cannot begin here");
    }
    auto tasks = static_cast<standin::TaskGroup*>(group);
    stream->update = std::make_unique<standin::TaskUpdate>(standin::TaskUpdate{tasks, {}});
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    standin::Stream* stream = standin::find_stream(handle);
    std::unique_ptr<standin::TaskUpdate> update;
    if (stream != nullptr) {
        std::lock_guard<std::mutex> guard(standin::get_captures().lock);
        update = std::move(stream->update);
    }
    if (update == nullptr || update->tasks.size() != update->group->nodes.size()) {
        return standin::fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "an update must launch what its task group launched");
    }
    // In the stream's order, as on the device: a replay that does not wait for it may run the old kernels.
    auto replace = [graph = update->group->graph->shared_from_this(), update = std::shared_ptr(std::move(update))] {
        graph->replace(update->group->nodes, update->tasks);
    };
    return standin::submit(handle, {"TaskUpdate", standin::Kind::order, replace});
}

}  // extern "C"
