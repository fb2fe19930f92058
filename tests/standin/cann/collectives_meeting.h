// Where the ranks of a communicator meet: memory that their processes share, and a barrier that tells who did not come.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace standin::collectives {

// Memory that processes share. It has no name in the file system, only an open descriptor in the process that created
// it, which the others reach through /proc. So nothing is left behind, whichever process dies and whenever.
class SharedMemory {
public:
    // Create memory without a size yet, and return the address that `SharedMemory` takes in any process.
    static std::string create();

    // Attach to the memory at `address`, grown to `size` bytes (zeros at first).
    SharedMemory(const std::string& address, size_t size);
    ~SharedMemory();
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    char* data() const { return data_; }

    // Close the descriptor of the process that created the memory; what is attached stays attached.
    static void close_address(const std::string& address);

private:
    size_t size_;
    char* data_;
};

// A barrier between ranks that may die. It owns no lock that a dead process could keep: every rank only counts its own
// arrivals, and sleeps on one word that changes with all news.
class Meeting {
public:
    static constexpr uint32_t kMostRanks = 16;

    // What lies in shared memory. All zeros is a valid beginning, so no rank has to be first.
    struct Table {
        std::atomic<uint32_t> news;
        std::atomic<uint32_t> arrivals[kMostRanks];
        std::atomic<uint32_t> failed;  // 0: no; 1: the reason is being written; 2: it can be read
        char reason[1024];
    };

    Meeting(Table* table, uint32_t ranks, uint32_t me, std::chrono::seconds patience)
        : table_(table), ranks_(ranks), me_(me), patience_(patience) {}

    // Return when all ranks have come. Throws when one has not come in time or the communicator has failed: `what` is
    // named in the error.
    void meet(const std::string& what);

    // Mark the communicator as failed for all ranks, for ever, and throw. The first reason given is the one that stays.
    [[noreturn]] void fail(const std::string& reason);

private:
    void announce();
    void throw_if_failed() const;
    std::vector<uint32_t> absent(uint32_t round) const;

    Table* table_;
    uint32_t ranks_, me_;
    std::chrono::seconds patience_;
};

}  // namespace standin::collectives
