// A graph: the tasks of a capture on lanes, one lane for each stream that took part. Each replay runs them all again.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "task.h"

namespace standin {

class Graph;

// Nodes that can be given new kernels later.
struct TaskGroup {
    Graph* graph;
    std::vector<size_t> nodes;
};

class Graph : public std::enable_shared_from_this<Graph> {
public:
    Graph();

    // While it is captured. Lane 0 is that of the stream where the capture began.
    size_t add_lane();
    size_t add_task(size_t lane, Task task);  // returns the node
    size_t add_record(size_t lane);           // returns the mark to wait for
    void add_wait(size_t lane, size_t mark);
    TaskGroup* add_group();

    // Whether lane 0 ends after all that the other lanes do.
    bool is_joined() const;

    // Give nodes new kernels; replays that began before keep the old ones where they have passed.
    void replace(const std::vector<size_t>& nodes, std::vector<Task> tasks);

    // Run it all, lane 0 on the calling thread; one replay at a time. Throws the first failure once all have ended.
    void replay(int device);

    const uint32_t id;

private:
    struct Node {
        enum class Does { run, record, wait } does;
        size_t lane;
        size_t mark;                       // of a record or a wait
        std::shared_ptr<const Task> task;  // of a run
    };
    struct Replay;

    std::shared_ptr<const Task> get_task(const Node& node);
    void run_lane(size_t lane, Replay& replay);
    void run_task_of(const Node& node, Turn& turn, Replay& replay);

    std::vector<Node> nodes_;
    std::vector<size_t> lane_lengths_;  // how many tasks each lane runs
    std::vector<std::unique_ptr<TaskGroup>> groups_;
    size_t mark_count_ = 0;
    uint64_t replay_count_ = 0;
    std::mutex replay_lock_;
    std::mutex task_lock_;  // of the nodes' tasks
};

}  // namespace standin
