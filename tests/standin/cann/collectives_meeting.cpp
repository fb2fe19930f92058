#include "collectives_meeting.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace standin::collectives {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

// Sleep until somebody wakes those who sleep on `word`; return at once if it is no longer `seen`.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, Clock::duration longest) {
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(longest).count();
    const timespec timeout{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string list(const std::vector<uint32_t>& ranks) {
    std::string text;
    for (uint32_t rank : ranks) {
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
    }
    return text;
}

}  // namespace

std::string SharedMemory::create() {
    const int descriptor = memfd_create("standin-hccl", MFD_CLOEXEC);
    if (descriptor < 0) {
        throw_errno("cannot create shared memory");
    }
    return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor);
}

SharedMemory::SharedMemory(const std::string& address, size_t size) : size_(size) {
    const int descriptor = open(address.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) {
        throw_errno("cannot open " + address + ", shared memory of the root rank: is it still alive?");
    }
    void* data = MAP_FAILED;
    if (ftruncate(descriptor, static_cast<off_t>(size)) == 0) {
        data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    }
    close(descriptor);
    if (data == MAP_FAILED) {
        throw_errno("cannot map " + std::to_string(size) + " bytes of " + address);
    }
    data_ = static_cast<char*>(data);
}

SharedMemory::~SharedMemory() { munmap(data_, size_); }

void SharedMemory::close_address(const std::string& address) {
    const std::string own = "/proc/" + std::to_string(getpid()) + "/fd/";
    if (address.rfind(own, 0) == 0) {
        close(std::stoi(address.substr(own.size())));
    }
}

void Meeting::meet(const std::string& what) {
    const uint32_t round = ++table_->arrivals[me_];
    announce();
    const auto deadline = Clock::now() + patience_;
    for (;;) {
        // Read the news before looking round: what happens after the look changes it, and no rank sleeps on old news.
        const uint32_t news = table_->news;
        const auto missing = absent(round);
        if (missing.empty()) {
            return;
        }
        throw_if_failed();
        const auto left = deadline - Clock::now();
        if (left <= Clock::duration::zero()) {
            fail(what + ": rank " + std::to_string(me_) + " waited " + std::to_string(patience_.count()) +
                 " s for rank " + list(missing) + " of " + std::to_string(ranks_) +
                 " (died, behind, or in another order?); NPU_STANDIN_HCCL_TIMEOUT sets the seconds");
        }
        sleep_on(table_->news, news, left);
    }
}

void Meeting::fail(const std::string& reason) {
    uint32_t untold = 0;
    if (table_->failed.compare_exchange_strong(untold, 1)) {
        strncpy(table_->reason, reason.c_str(), sizeof(table_->reason) - 1);
        table_->failed = 2;
        announce();
    }
    throw std::runtime_error(reason);
}

void Meeting::announce() {
    ++table_->news;
    wake_all(table_->news);
}

void Meeting::throw_if_failed() const {
    if (table_->failed == 2) {
        throw std::runtime_error(std::string("the communicator has failed: ") + table_->reason);
    }
}

std::vector<uint32_t> Meeting::absent(uint32_t round) const {
    std::vector<uint32_t> missing;
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
        // The difference, because the count may go round.
        if (static_cast<int32_t>(table_->arrivals[rank] - round) < 0) {
            missing.push_back(rank);
        }
    }
    return missing;
}

}  // namespace standin::collectives
