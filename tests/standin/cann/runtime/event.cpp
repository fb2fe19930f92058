// Events: a record marks a point in a stream, a wait holds another stream until that point has come.
//
// As in CANN, each record of an event makes a new point, and a wait is for the point that was recorded last when the
// wait was queued.
#include <memory>
#include <mutex>
#include <optional>

#include "acl/acl.h"
#include "capture.h"
#include "failure.h"
#include "moment.h"
#include "stream.h"

namespace standin {
namespace {

struct Event {
    explicit Event(uint32_t flags) : flags(flags) {}

    bool has_time() const { return (flags & ACL_EVENT_TIME_LINE) != 0; }

    const uint32_t flags;
    std::mutex lock;
    std::shared_ptr<Moment> moment;  // of the last record that was not captured
    Mark mark;                       // of the last record that was
};

struct Recorded {
    std::shared_ptr<Moment> moment;
    Mark mark;
};

Recorded get_recorded(Event& event) {
    std::lock_guard<std::mutex> guard(event.lock);
    return {event.moment, event.mark};
}

Event& get_event(aclrtEvent handle) { return *static_cast<Event*>(handle); }

aclError fail_without_stream() {
    return fail(ACL_ERROR_RT_INVALID_HANDLE, "an event on a stream that does not exist");
}

// The host can ask nothing of an event of a capture that goes on.
aclError check_host_access(Event& event) {
    if (is_capturing(get_recorded(event).mark)) {
        return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded in a capture that goes on");
    }
    return ACL_SUCCESS;
}

void record(Event& event, Stream& stream) {
    std::optional<Mark> mark = note_record(stream);
    std::lock_guard<std::mutex> guard(event.lock);
    if (mark) {
        event.mark = *mark;
        return;
    }
    event.mark = {};
    event.moment = std::make_shared<Moment>();
    stream.push({"EventRecord", Kind::order, [moment = event.moment] { moment->come(); }});
}

aclError wait(Event& event, Stream& stream) {
    Recorded recorded = get_recorded(event);
    if (is_capturing(recorded.mark)) {
        return note_wait(stream, recorded.mark);
    }
    if (recorded.moment == nullptr) {
        return ACL_SUCCESS;  // never recorded: there is nothing to wait for
    }
    if (is_captured(stream)) {
        return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for an event of outside");
    }
    stream.push({"EventWait", Kind::order, [moment = recorded.moment] { moment->wait(); }});
    return ACL_SUCCESS;
}

std::optional<Time> get_recorded_time(Event& event) {
    std::shared_ptr<Moment> moment = get_recorded(event).moment;
    return moment == nullptr ? std::nullopt : moment->get_time_of_coming();
}

}  // namespace
}  // namespace standin

extern "C" {

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
    if ((flags & (ACL_EVENT_EXTERNAL | ACL_EVENT_IPC)) != 0) {
        // torch_npu makes its external events of aclrtValueWait and aclrtValueWrite.
        return standin::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "external and interprocess events are not provided");
    }
    *event = new standin::Event(flags);
    return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flags) {
    return aclrtCreateEventExWithFlag(event, flags);
}

aclError aclrtDestroyEvent(aclrtEvent event) {
    delete static_cast<standin::Event*>(event);
    return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    standin::Stream* stream = standin::find_stream(stream_handle);
    if (stream == nullptr) {
        return standin::fail_without_stream();
    }
    standin::record(standin::get_event(handle), *stream);
    return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    standin::Event& event = standin::get_event(handle);
    standin::Stream* stream = standin::find_stream(stream_handle);
    if (stream == nullptr) {
        return standin::fail_without_stream();
    }
    if (event.flags == ACL_EVENT_TIME_LINE) {
        return standin::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "a wait for an event that only tells the time");
    }
    return standin::wait(event, *stream);
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }  // the next record makes a new point anyway

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
    standin::Event& event = standin::get_event(handle);
    if (aclError error = standin::check_host_access(event)) {
        return error;
    }
    std::shared_ptr<standin::Moment> moment = standin::get_recorded(event).moment;
    bool is_complete = moment == nullptr || moment->get_time_of_coming().has_value();
    *status = is_complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    standin::Event& event = standin::get_event(handle);
    if (aclError error = standin::check_host_access(event)) {
        return error;
    }
    if (std::shared_ptr<standin::Moment> moment = standin::get_recorded(event).moment) {
        moment->wait();
    }
    return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start_handle, aclrtEvent end_handle) {
    standin::Event& start = standin::get_event(start_handle);
    standin::Event& end = standin::get_event(end_handle);
    if (!start.has_time() || !end.has_time()) {
        return standin::fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "an event that was made without a time");
    }
    std::optional<standin::Time> from = standin::get_recorded_time(start), to = standin::get_recorded_time(end);
    if (!from || !to) {
        return standin::fail(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "the time between events that have not both come");
    }
    *milliseconds = static_cast<float>((static_cast<double>(*to) - static_cast<double>(*from)) / 1e6);
    return ACL_SUCCESS;
}

}  // extern "C"
