// A communicator: one way of passing data between ranks, from which every collective is made.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives_meeting.h"
#include "hccl/hccl_types.h"

namespace standin::collectives {

constexpr uint32_t kNoRoot = UINT32_MAX;

// A part of a buffer, in bytes.
struct Section {
    uint64_t begin, length;
};

// What a rank tells the others of the collective it is in.
struct Call {
    char name[24];    // as HCCL's function is called
    char met_by[24];  // what the other ranks are in: the same, but for the two ends of a message
    HcclDataType type;
    HcclReduceOp operation;
    uint32_t root;  // or kNoRoot
    uint64_t count;
    uint64_t bytes;                          // how much of its buffer the rank lays before the others
    Section parts[Meeting::kMostRanks];      // HcclAlltoAllV: which part of that is for each rank,
    uint64_t expected[Meeting::kMostRanks];  // and how many bytes come from each

    std::string describe() const;
    bool matches(const Call& other) const;
};

// The same piece of all ranks' buffers: bytes `begin` to `end` of each. A collective is a description of which sections
// of whose buffer go where; a piece carries out as much of that as it holds.
class Piece {
public:
    Piece(uint64_t begin, uint64_t end, const char* slots, uint64_t slot_bytes, const std::vector<Call>& calls)
        : begin_(begin), end_(end), slots_(slots), slot_bytes_(slot_bytes), calls_(calls) {}

    // Copy `section` of the buffer of `rank` to `to`.
    void copy(uint32_t rank, Section section, void* to) const;

    // Reduce `section` of all ranks' buffers into `to`: in rank order, so that all ranks get the same bits.
    void reduce(Section section, void* to) const;

    const std::vector<Call>& calls() const { return calls_; }

private:
    Section overlap(Section section) const;
    const char* at(uint32_t rank, uint64_t byte) const { return slots_ + rank * slot_bytes_ + (byte - begin_); }

    uint64_t begin_, end_;
    const char* slots_;
    uint64_t slot_bytes_;
    const std::vector<Call>& calls_;
};

using Use = std::function<void(const Piece&)>;

// Shared memory in which some ranks exchange what each lays before the others, one collective at a time.
class Channel {
public:
    // How much shared memory `ranks` need, in whole pages.
    static uint64_t measure(uint32_t ranks, uint64_t slot_bytes);

    // Take `memory`, which is zeros before any rank has come. `me` is this rank's number among those of the channel.
    Channel(char* memory, uint32_t ranks, uint32_t me, uint64_t slot_bytes, std::string name);

    // Return when all ranks have come.
    void meet(const std::string& what) { meeting_.meet(what); }

    // See Communicator::exchange.
    void exchange(const Call& call, const void* mine, const Use& use);

private:
    struct Table;

    std::vector<Call> compare(const Call& call, const std::string& what);

    const uint32_t ranks_, me_;
    const uint64_t slot_bytes_;
    const std::string name_;
    Table* table_;
    Meeting meeting_;
    std::mutex busy_;
};

class Communicator {
public:
    // What the root tells the other ranks, within HcclRootInfo.
    struct Invitation {
        char name[COMM_NAME_MAX_LENGTH];
        char address[64];
        uint64_t slot_bytes;
    };

    static Invitation invite();

    // Join the others; returns when all have come.
    Communicator(const Invitation& invitation, uint32_t ranks, uint32_t me);

    // Lay `mine`, call.bytes long, before the other ranks, and let `use` take what it needs of all ranks' buffers, in
    // as many pieces as the shared memory demands. Throws if ranks differ about the call or one does not come in time.
    void exchange(const Call& call, const void* mine, const Use& use) { all_.exchange(call, mine, use); }

    // Return the channel to one other rank, of which the one with the lower number is rank 0. The ranks that are in
    // messages between two need not be all.
    Channel& open_channel(uint32_t other);

    const uint32_t ranks, me;
    const std::string name;

private:
    const uint64_t slot_bytes_;
    SharedMemory memory_;
    Channel all_;
    std::map<uint32_t, Channel> pairs_;
    std::mutex opening_;
};

}  // namespace standin::collectives
