// Stand-in for libhccl.so: collectives between processes of one machine, run on the threads of the stand-in's streams.
//
// Every kernel is a std::function that holds its arguments by value and the communicator by a shared pointer, so that a
// captured graph can run it again, even after HcclCommDestroy.

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "collectives_arithmetic.h"
#include "collectives_communicator.h"
#include "hccl/hccl.h"
#include "standin.h"

using standin::collectives::Call;
using standin::collectives::Communicator;
using standin::collectives::kNoRoot;
using standin::collectives::Meeting;
using standin::collectives::name_of;
using standin::collectives::Piece;
using standin::collectives::Section;
using standin::collectives::size_of;
using standin::collectives::Use;

namespace {

using Handle = std::shared_ptr<Communicator>;

// Communicators that kernels which communicate by themselves find by their names.
class Directory {
public:
    void add(const Handle& handle) {
        const std::lock_guard<std::mutex> alone(busy_);
        named_[handle->name] = handle;
    }

    Handle find(const std::string& name) {
        const std::lock_guard<std::mutex> alone(busy_);
        const auto found = named_.find(name);
        const Handle handle = found == named_.end() ? nullptr : found->second.lock();
        if (!handle) {
            throw std::invalid_argument("no communicator is called " + name);
        }
        return handle;
    }

private:
    std::mutex busy_;
    std::map<std::string, std::weak_ptr<Communicator>> named_;
};

Directory& directory() {
    static Directory all;
    return all;
}

const Handle& open_handle(HcclComm comm) { return *static_cast<const Handle*>(comm); }

// Run `work`, and turn what it throws into an error with a text.
template <class Work>
HcclResult answer(Work work) {
    try {
        return work();
    } catch (const std::exception& error) {
        standin_fail(HCCL_E_INTERNAL, error.what());
        return HCCL_E_INTERNAL;
    }
}

Call describe(const char* name, uint64_t count, HcclDataType type) {
    Call call{};
    strncpy(call.name, name, sizeof(call.name) - 1);
    strncpy(call.met_by, name, sizeof(call.met_by) - 1);
    call.type = type;
    call.operation = HCCL_REDUCE_RESERVED;
    call.root = kNoRoot;
    call.count = count;
    return call;
}

// Queue a failure in place of a collective. An error that is returned instead makes torch_npu drop, without a word, all
// that is launched later on.
HcclResult refuse(aclrtStream stream, const char* name, const std::string& why) {
    standin::Kernel kernel = [text = std::string(name) + ": " + why] { throw std::invalid_argument(text); };
    return standin_submit(stream, name, &kernel) == 0 ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// Queue a collective: this rank lays `bytes` of `mine` before the others, and `use` takes what it needs of all.
HcclResult launch(HcclComm comm, aclrtStream stream, Call call, const void* mine, uint64_t bytes,
                  Use use) {
    if (size_of(call.type) == 0) {
        return refuse(stream, call.name, "the stand-in has no HCCL " + name_of(call.type));
    }
    call.bytes = bytes;
    standin::Kernel kernel = [communicator = open_handle(comm), call, mine, use = std::move(use)] {
        communicator->exchange(call, mine, use);
    };
    return standin_submit(stream, call.name, &kernel) == 0 ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// HCCL's arrays of counts hold one uint64_t for each rank.
uint64_t entry(const void* counts, uint32_t rank) { return static_cast<const uint64_t*>(counts)[rank]; }

void* advance(const void* buffer, uint64_t bytes) { return static_cast<char*>(const_cast<void*>(buffer)) + bytes; }

HcclResult join(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const char* name, HcclComm* comm) {
    return answer([=] {
        if (ranks > Meeting::kMostRanks) {
            throw std::invalid_argument("a communicator of " + std::to_string(ranks) + " ranks: the stand-in has " +
                                        std::to_string(Meeting::kMostRanks) + " at most");
        }
        Communicator::Invitation invitation;
        memcpy(&invitation, info->internal, sizeof(invitation));
        if (*name) {
            strncpy(invitation.name, name, sizeof(invitation.name) - 1);
        }
        Handle* handle = new Handle(std::make_shared<Communicator>(invitation, ranks, rank));
        directory().add(*handle);
        *comm = handle;
        return HCCL_SUCCESS;
    });
}

// One end of a message. ProcessGroupHCCL makes a communicator of two ranks for every pair that sends and receives.
HcclResult pass_message(bool sends, void* buffer, uint64_t count, HcclDataType type, HcclComm comm,
                        aclrtStream stream) {
    const Communicator& communicator = *open_handle(comm);
    const char* name = sends ? "HcclSend" : "HcclRecv";
    if (communicator.ranks != 2) {
        return refuse(stream, name, "the stand-in sends and receives only in communicators of two ranks");
    }
    const uint64_t bytes = count * size_of(type);
    const uint32_t other = 1 - communicator.me;
    Call call = describe(name, count, type);
    strncpy(call.met_by, sends ? "HcclRecv" : "HcclSend", sizeof(call.met_by) - 1);
    return launch(comm, stream, call, buffer, sends ? bytes : 0, [=](const Piece& piece) {
        if (!sends) {
            piece.copy(other, {0, bytes}, buffer);
        }
    });
}

using Messages = std::vector<HcclSendRecvItem>;

uint64_t measure(const HcclSendRecvItem& message) { return message.count * size_of(message.dataType); }

// Exchange all messages between this rank and another, in their order.
void pass_between_two(Communicator& communicator, uint32_t other, const Messages& messages) {
    const bool is_first = communicator.me < other;
    std::vector<char> sent;
    std::vector<std::pair<Section, void*>> expected;
    uint64_t received = 0;
    for (const HcclSendRecvItem& message : messages) {
        const uint64_t bytes = measure(message);
        if (message.sendRecvType == HCCL_SEND) {
            const char* from = static_cast<const char*>(message.buf);
            sent.insert(sent.end(), from, from + bytes);
        } else {
            expected.push_back({{received, bytes}, message.buf});
            received += bytes;
        }
    }
    Call call = describe("HcclBatchSendRecv", 0, HCCL_DATA_TYPE_INT8);
    const uint32_t there = is_first ? 1 : 0;
    call.bytes = sent.size();
    call.parts[there] = {0, sent.size()};
    call.expected[there] = received;
    communicator.open_channel(other).exchange(call, sent.data(), [&](const Piece& piece) {
        for (const auto& [section, to] : expected) {
            piece.copy(there, section, to);
        }
    });
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
    return answer([=] {
        const Communicator::Invitation invitation = Communicator::invite();
        static_assert(sizeof(invitation) <= sizeof(info->internal), "the invitation has to fit into HCCL's root info");
        memcpy(info->internal, &invitation, sizeof(invitation));
        return HCCL_SUCCESS;
    });
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* comm) {
    return join(ranks, info, rank, "", comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* comm) {
    return join(ranks, info, rank, config->hcclCommName, comm);
}

// The configuration's fields up to this one are understood: of these, only the name changes anything here.
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }

HcclResult HcclCommDestroy(HcclComm comm) {
    delete static_cast<Handle*>(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm comm, char* name) {
    strncpy(name, open_handle(comm)->name.c_str(), COMM_NAME_MAX_LENGTH);
    return HCCL_SUCCESS;
}

// A collective that fails fails its stream, as on a device; HCCL's own report is for faults of the network.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}

// Determinism is what can be asked for, and nothing else is done here.
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
                         HcclComm comm, aclrtStream stream) {
    const uint64_t bytes = count * size_of(type);
    Call call = describe("HcclAllReduce", count, type);
    call.operation = operation;
    return launch(comm, stream, call, send, bytes,
                  [=](const Piece& piece) { piece.reduce({0, bytes}, receive); });
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
                      uint32_t root, HcclComm comm, aclrtStream stream) {
    const uint64_t bytes = count * size_of(type);
    const bool receives = open_handle(comm)->me == root;
    Call call = describe("HcclReduce", count, type);
    call.operation = operation;
    call.root = root;
    return launch(comm, stream, call, send, bytes, [=](const Piece& piece) {
        if (receives) {
            piece.reduce({0, bytes}, receive);
        }
    });
}

HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp operation,
                             HcclComm comm, aclrtStream stream) {
    const uint64_t bytes = count * size_of(type);
    const Communicator& communicator = *open_handle(comm);
    const Section own{communicator.me * bytes, bytes};
    Call call = describe("HcclReduceScatter", count, type);
    call.operation = operation;
    return launch(comm, stream, call, send, communicator.ranks * bytes,
                  [=](const Piece& piece) { piece.reduce(own, receive); });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm,
                         aclrtStream stream) {
    const uint64_t bytes = count * size_of(type);
    const bool sends = open_handle(comm)->me == root;
    Call call = describe("HcclBroadcast", count, type);
    call.root = root;
    return launch(comm, stream, call, buffer, sends ? bytes : 0, [=](const Piece& piece) {
        if (!sends) {
            piece.copy(root, {0, bytes}, buffer);
        }
    });
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm comm,
                         aclrtStream stream) {
    const uint64_t bytes = count * size_of(type);
    const uint32_t ranks = open_handle(comm)->ranks;
    return launch(comm, stream, describe("HcclAllGather", count, type), send, bytes, [=](const Piece& piece) {
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            piece.copy(rank, {0, bytes}, advance(receive, rank * bytes));
        }
    });
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    if (send_count != receive_count || send_type != receive_type) {
        return refuse(stream, "HcclAlltoAll", "what is sent and what is received differ in count or type");
    }
    const uint64_t bytes = send_count * size_of(send_type);
    const Communicator& communicator = *open_handle(comm);
    const Call call = describe("HcclAlltoAll", send_count, send_type);
    const Section own{communicator.me * bytes, bytes};
    const uint32_t ranks = communicator.ranks;
    return launch(comm, stream, call, send, ranks * bytes, [=](const Piece& piece) {
        for (uint32_t rank = 0; rank < ranks; ++rank) {
            piece.copy(rank, own, advance(receive, rank * bytes));
        }
    });
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                         const void* receive, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
    if (send_type != receive_type) {
        return refuse(stream, "HcclAlltoAllV", "what is sent and what is received differ in type");
    }
    const Communicator& communicator = *open_handle(comm);
    const uint64_t size = size_of(send_type);
    Call call = describe("HcclAlltoAllV", 0, send_type);
    uint64_t bytes = 0;
    std::vector<void*> places;
    for (uint32_t rank = 0; rank < communicator.ranks; ++rank) {
        call.parts[rank] = {entry(send_offsets, rank) * size, entry(send_counts, rank) * size};
        call.expected[rank] = entry(receive_counts, rank) * size;
        bytes = std::max(bytes, call.parts[rank].begin + call.parts[rank].length);
        places.push_back(advance(receive, entry(receive_offsets, rank) * size));
    }
    return launch(comm, stream, call, send, bytes, [places, me = communicator.me](const Piece& piece) {
        for (uint32_t rank = 0; rank < places.size(); ++rank) {
            piece.copy(rank, piece.calls()[rank].parts[me], places[rank]);
        }
    });
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
    return launch(comm, stream, describe("HcclBarrier", 0, HCCL_DATA_TYPE_INT8), nullptr, 0, [](const Piece&) {});
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t, HcclComm comm, aclrtStream stream) {
    return pass_message(true, buffer, count, type, comm, stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t, HcclComm comm, aclrtStream stream) {
    return pass_message(false, buffer, count, type, comm, stream);
}

// Only ranks that have messages call it. Each takes the others in the order of their numbers, so no two wait for each
// other in a circle.
HcclResult HcclBatchSendRecv(HcclSendRecvItem* messages, uint32_t count, HcclComm comm, aclrtStream stream) {
    std::map<uint32_t, Messages> by_rank;
    for (uint32_t number = 0; number < count; ++number) {
        const HcclSendRecvItem& message = messages[number];
        if (size_of(message.dataType) == 0 || message.remoteRank == open_handle(comm)->me) {
            return refuse(stream, "HcclBatchSendRecv", "a message to itself, or of HCCL " + name_of(message.dataType));
        }
        by_rank[message.remoteRank].push_back(message);
    }
    standin::Kernel kernel = [communicator = open_handle(comm), by_rank = std::move(by_rank)] {
        for (const auto& [other, between] : by_rank) {
            pass_between_two(*communicator, other, between);
        }
    };
    return standin_submit(stream, "HcclBatchSendRecv", &kernel) == 0 ? HCCL_SUCCESS : HCCL_E_RUNTIME;
}

// For kernels that communicate by themselves, on the thread of their stream: lay `bytes` of `mine` before the ranks of
// the communicator called `group`, as part of a kernel `name`, and copy those of all, in rank order, to `all`.
int standin_exchange(const char* group, const char* name, const void* mine, uint64_t bytes, void* all) {
    return answer([=] {
        const Handle communicator = directory().find(group);
        Call call = describe(name, bytes, HCCL_DATA_TYPE_INT8);
        call.bytes = bytes;
        communicator->exchange(call, mine, [=](const Piece& piece) {
            for (uint32_t rank = 0; rank < communicator->ranks; ++rank) {
                piece.copy(rank, {0, bytes}, advance(all, rank * bytes));
            }
        });
        return HCCL_SUCCESS;
    });
}

// This process's rank in the communicator called `group`; -1 without one.
int standin_find_rank(const char* group) {
    int rank = -1;
    answer([&] {
        rank = static_cast<int>(directory().find(group)->me);
        return HCCL_SUCCESS;
    });
    return rank;
}

}  // extern "C"
