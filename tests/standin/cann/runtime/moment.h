// A point that a stream comes to once; others wait until it has.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "trace.h"

namespace standin {

class Moment {
public:
    void come() {
        std::lock_guard<std::mutex> guard(lock_);
        time_ = get_time();
        has_come_.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> guard(lock_);
        has_come_.wait(guard, [this] { return time_.has_value(); });
    }

    // When it came; nothing while it is still to come.
    std::optional<Time> get_time_of_coming() {
        std::lock_guard<std::mutex> guard(lock_);
        return time_;
    }

private:
    std::mutex lock_;
    std::condition_variable has_come_;
    std::optional<Time> time_;
};

}  // namespace standin
