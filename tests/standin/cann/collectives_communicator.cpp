#include "collectives_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "collectives_arithmetic.h"

namespace standin::collectives {
namespace {

constexpr uint64_t kPage = 4096;  // a multiple of every element's size, so that no piece ends within an element

uint64_t read_setting(const char* variable, uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text && *text ? std::stoull(text) : otherwise;
}

uint64_t round_up(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

std::string Call::describe() const {
    std::string text = std::string(name) + " of " + std::to_string(count) + " x " + name_of(type);
    if (operation != HCCL_REDUCE_RESERVED) {
        text += ", reduction " + std::to_string(operation);
    }
    if (root != kNoRoot) {
        text += ", root " + std::to_string(root);
    }
    return text;
}

bool Call::matches(const Call& other) const {
    return strcmp(met_by, other.name) == 0 && type == other.type && operation == other.operation &&
           root == other.root && count == other.count;
}

Section Piece::overlap(Section section) const {
    const uint64_t first = std::max(section.begin, begin_);
    const uint64_t last = std::min(section.begin + section.length, end_);
    return {first, last > first ? last - first : 0};
}

void Piece::copy(uint32_t rank, Section section, void* to) const {
    const Section held = overlap(section);
    if (held.length == 0) {
        return;
    }
    memcpy(static_cast<char*>(to) + (held.begin - section.begin), at(rank, held.begin), held.length);
}

void Piece::reduce(Section section, void* to) const {
    const Section held = overlap(section);
    if (held.length == 0) {
        return;
    }
    const Call& call = calls_.front();
    void* total = static_cast<char*>(to) + (held.begin - section.begin);
    memcpy(total, at(0, held.begin), held.length);
    for (uint32_t rank = 1; rank < calls_.size(); ++rank) {
        fold(call.operation, call.type, total, at(rank, held.begin), held.length / size_of(call.type));
    }
}

// The beginning of a channel's memory; the ranks' slots follow on the next page.
struct Channel::Table {
    Meeting::Table meeting;
    Call calls[Meeting::kMostRanks];
};

uint64_t Channel::measure(uint32_t ranks, uint64_t slot_bytes) { return round_up(sizeof(Table)) + ranks * slot_bytes; }

Channel::Channel(char* memory, uint32_t ranks, uint32_t me, uint64_t slot_bytes, std::string name)
    : ranks_(ranks),
      me_(me),
      slot_bytes_(slot_bytes),
      name_(std::move(name)),
      table_(reinterpret_cast<Table*>(memory)),
      meeting_(&table_->meeting, ranks, me, std::chrono::seconds(read_setting("NPU_STANDIN_HCCL_TIMEOUT", 60))) {}

Communicator::Invitation Communicator::invite() {
    static std::atomic<int> invitations{0};
    Invitation invitation{};
    const std::string name = "standin-" + std::to_string(getpid()) + "-" + std::to_string(invitations++);
    const std::string address = SharedMemory::create();
    name.copy(invitation.name, sizeof(invitation.name) - 1);
    address.copy(invitation.address, sizeof(invitation.address) - 1);
    invitation.slot_bytes = round_up(read_setting("NPU_STANDIN_HCCL_KIB", 1024) * 1024);
    return invitation;
}

Communicator::Communicator(const Invitation& invitation, uint32_t ranks, uint32_t me)
    : ranks(ranks),
      me(me),
      name(invitation.name),
      slot_bytes_(invitation.slot_bytes),
      memory_(invitation.address,  // of which pages that no rank writes to take no space
              Channel::measure(ranks, slot_bytes_) + ranks * (ranks - 1) / 2 * Channel::measure(2, slot_bytes_)),
      all_(memory_.data(), ranks, me, slot_bytes_, name) {
    all_.meet("HcclCommInitRootInfo of " + name);
    SharedMemory::close_address(invitation.address);
}

Channel& Communicator::open_channel(uint32_t other) {
    const uint32_t low = std::min(me, other), high = std::max(me, other);
    const uint64_t place = high * (high - 1) / 2 + low;  // pairs in order of their higher rank
    const std::string pair = name + ", ranks " + std::to_string(low) + " and " + std::to_string(high);
    char* memory = memory_.data() + Channel::measure(ranks, slot_bytes_) + place * Channel::measure(2, slot_bytes_);
    const std::lock_guard<std::mutex> alone(opening_);
    return pairs_.try_emplace(other, memory, 2, me == low ? 0 : 1, slot_bytes_, pair).first->second;
}

void Channel::exchange(const Call& call, const void* mine, const Use& use) {
    const std::string what = call.describe() + " in " + name_;
    const std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone) {
        meeting_.fail(what + ": another stream of this process is in a collective of this communicator");
    }
    const std::vector<Call> calls = compare(call, what);
    uint64_t longest = 0;
    for (const Call& each : calls) {
        longest = std::max(longest, each.bytes);
    }
    char* slots = reinterpret_cast<char*>(table_) + round_up(sizeof(Table));
    for (uint64_t begin = 0; begin < longest; begin += slot_bytes_) {
        const uint64_t end = std::min(begin + slot_bytes_, longest);
        if (begin < call.bytes) {
            const char* from = static_cast<const char*>(mine) + begin;
            memcpy(slots + me_ * slot_bytes_, from, std::min(end, call.bytes) - begin);
        }
        meeting_.meet(what);
        use(Piece(begin, end, slots, slot_bytes_, calls));
        meeting_.meet(what);
    }
}

// Tell the others of `call` and return what each rank tells, in rank order.
std::vector<Call> Channel::compare(const Call& call, const std::string& what) {
    table_->calls[me_] = call;
    meeting_.meet(what);
    const std::vector<Call> calls(table_->calls, table_->calls + ranks_);
    meeting_.meet(what);  // before a rank overwrites its call with the next one
    const std::string own = "rank " + std::to_string(me_);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
        const std::string other = "rank " + std::to_string(rank);
        const uint64_t sent = calls[rank].parts[me_].length;
        if (rank != me_ && !call.matches(calls[rank])) {
            meeting_.fail("ranks differ: " + own + " is in " + what + ", " + other + " in " + calls[rank].describe());
        }
        if (sent != call.expected[rank]) {
            meeting_.fail(what + ": " + own + " expects " + std::to_string(call.expected[rank]) + " bytes of " + other +
                          ", which sends " + std::to_string(sent));
        }
    }
    return calls;
}

}  // namespace standin::collectives
