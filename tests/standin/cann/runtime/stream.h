// A stream: one host thread that runs tasks in the order queued.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "acl/acl.h"
#include "task.h"

namespace standin {

struct Capture;
struct TaskGroup;
struct TaskUpdate;

class Stream {
public:
    explicit Stream(int device);
    ~Stream();  // after all that is queued

    void push(Task task);
    bool is_idle();

    // Block until idle; negative milliseconds mean for as long as that takes. Reports the first failure since the last
    // time that somebody asked.
    aclError synchronize(int milliseconds);

    const int id;
    const int device;

    // capture.cpp reads and writes these under its own lock.
    std::shared_ptr<Capture> capture;
    TaskGroup* open_group = nullptr;
    std::unique_ptr<TaskUpdate> update;

    // Cube and vector cores; 0 where the device's own limit holds.
    std::array<uint32_t, 2> core_limits{};

private:
    struct Queued {
        Task task;
        Time time;
    };

    void run_queue();
    void run(const Queued& queued);
    Turn take_turn();

    std::mutex lock_;
    std::condition_variable has_news_, is_done_;
    std::deque<Queued> queue_;
    bool is_busy_ = false;
    bool is_ending_ = false;
    std::string failure_;
    uint64_t jitter_epoch_ = 0;
    uint64_t kernels_since_epoch_ = 0;
    std::thread thread_;  // the last member: it uses all others
};

// The stream of a handle; the null handle is the default stream of the calling thread's device. Null if there is none.
Stream* find_stream(aclrtStream handle);

// Queue a task, or note it in the graph while the stream is captured.
aclError submit(aclrtStream handle, Task task);

// End all streams; what waits stops waiting.
void end_all_streams();

}  // namespace standin
