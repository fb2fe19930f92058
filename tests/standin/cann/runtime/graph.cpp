#include "graph.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "device.h"
#include "moment.h"

namespace standin {
namespace {

// In the trace a lane of a graph is the stream LANES_OF_A_GRAPH * id + lane. Ids start at 1, and streams are far fewer.
constexpr int64_t LANES_OF_A_GRAPH = 1'000'000;

std::atomic<uint32_t> last_id{0};

}  // namespace

// What one replay does not share with the next.
struct Graph::Replay {
    int device;
    uint64_t number;
    std::vector<Moment> moments;  // by mark
    Time start = get_time();
    std::mutex lock;
    std::string failure;

    void note_failure(const std::string& text) {
        std::lock_guard<std::mutex> guard(lock);
        failure = failure.empty() ? text : failure;
    }
};

Graph::Graph() : id(++last_id) {}

size_t Graph::add_lane() {
    lane_lengths_.push_back(0);
    return lane_lengths_.size() - 1;
}

size_t Graph::add_task(size_t lane, Task task) {
    lane_lengths_[lane] += task.kind == Kind::work;
    nodes_.push_back({Node::Does::run, lane, 0, std::make_shared<const Task>(std::move(task))});
    return nodes_.size() - 1;
}

size_t Graph::add_record(size_t lane) {
    nodes_.push_back({Node::Does::record, lane, mark_count_, nullptr});
    return mark_count_++;
}

void Graph::add_wait(size_t lane, size_t mark) { nodes_.push_back({Node::Does::wait, lane, mark, nullptr}); }

TaskGroup* Graph::add_group() {
    groups_.push_back(std::make_unique<TaskGroup>(TaskGroup{this, {}}));
    return groups_.back().get();
}

bool Graph::is_joined() const {
    std::vector<bool> is_lane_joined(lane_lengths_.size(), false);
    std::vector<bool> is_awaited(mark_count_, false);
    is_lane_joined[0] = true;
    // From the end: a wait on a joined lane joins all that precedes the record it waits for.
    for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
        if (node->does == Node::Does::record && is_awaited[node->mark]) {
            is_lane_joined[node->lane] = true;
        }
        if (!is_lane_joined[node->lane]) {
            return false;
        }
        if (node->does == Node::Does::wait) {
            is_awaited[node->mark] = true;
        }
    }
    return true;
}

void Graph::replace(const std::vector<size_t>& nodes, std::vector<Task> tasks) {
    std::lock_guard<std::mutex> guard(task_lock_);
    for (size_t i = 0; i < nodes.size(); ++i) {
        nodes_[nodes[i]].task = std::make_shared<const Task>(std::move(tasks[i]));
    }
}

void Graph::replay(int device) {
    std::lock_guard<std::mutex> guard(replay_lock_);
    Replay replay{device, replay_count_++, std::vector<Moment>(mark_count_), get_time(), {}, {}};
    std::vector<std::thread> threads;
    for (size_t lane = 1; lane < lane_lengths_.size(); ++lane) {
        threads.emplace_back([this, lane, &replay] { run_lane(lane, replay); });
    }
    run_lane(0, replay);
    for (std::thread& thread : threads) {
        thread.join();
    }
    if (!replay.failure.empty()) {
        throw std::runtime_error(replay.failure);
    }
}

std::shared_ptr<const Task> Graph::get_task(const Node& node) {
    std::lock_guard<std::mutex> guard(task_lock_);
    return node.task;
}

void Graph::run_lane(size_t lane, Replay& replay) {
    set_device(replay.device);
    // Streams count from 0 up and lanes from -1 down, so that jitter tells them apart. A graph's id is left out: what
    // is captured again shall jitter as before.
    Turn turn{-1 - static_cast<int64_t>(lane), replay.number * lane_lengths_[lane]};
    for (const Node& node : nodes_) {
        if (node.lane != lane) {
            continue;
        }
        switch (node.does) {
            case Node::Does::run: run_task_of(node, turn, replay); break;
            case Node::Does::record: replay.moments[node.mark].come(); break;
            case Node::Does::wait: replay.moments[node.mark].wait(); break;
        }
    }
}

void Graph::run_task_of(const Node& node, Turn& turn, Replay& replay) {
    std::shared_ptr<const Task> task = get_task(node);
    try {
        run_task(*task, LANES_OF_A_GRAPH * id + static_cast<int64_t>(node.lane), turn, replay.start);
    } catch (const std::exception& error) {
        replay.note_failure(task->name + ": " + error.what());  // and go on: other lanes may wait for this one
    }
    turn.number += task->kind == Kind::work;
}

}  // namespace standin
