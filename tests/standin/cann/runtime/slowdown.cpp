#include "slowdown.h"

#include <atomic>
#include <map>
#include <mutex>

namespace standin {
namespace {

using Seconds = std::chrono::duration<double>;

struct Settings {
    std::mutex lock;
    std::map<std::string, Seconds> delays;
    uint64_t seed = 0;
    Seconds most_jitter{0};
};

Settings& get_settings() {
    static auto& settings = *new Settings;  // never destroyed: streams may still run when the process ends
    return settings;
}

std::atomic<uint64_t> epoch{0};

// One step of the generator SplitMix64: every bit of the result depends on every bit of the value.
uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

// A number from 0 to below 1 that is the same for the same seed and turn.
double draw(uint64_t seed, Turn turn) {
    uint64_t bits = mix(mix(mix(seed) ^ static_cast<uint64_t>(turn.queue)) ^ turn.number);
    return static_cast<double>(bits >> 11) / static_cast<double>(uint64_t{1} << 53);
}

}  // namespace

std::chrono::nanoseconds find_extra_time(const std::string& kernel, Turn turn) {
    Settings& settings = get_settings();
    std::lock_guard<std::mutex> guard(settings.lock);
    auto found = settings.delays.find(kernel);
    Seconds extra = found == settings.delays.end() ? Seconds{0} : found->second;
    if (settings.most_jitter.count() > 0) {
        extra += settings.most_jitter * draw(settings.seed, turn);
    }
    return std::chrono::duration_cast<std::chrono::nanoseconds>(extra);
}

uint64_t get_jitter_epoch() { return epoch; }

}  // namespace standin

extern "C" {

void standin_delay(const char* kernel, double seconds) {
    standin::Settings& settings = standin::get_settings();
    std::lock_guard<std::mutex> guard(settings.lock);
    settings.delays[kernel] = standin::Seconds{seconds};
}

void standin_jitter(uint64_t seed, double seconds) {
    standin::Settings& settings = standin::get_settings();
    std::lock_guard<std::mutex> guard(settings.lock);
    settings.seed = seed;
    settings.most_jitter = standin::Seconds{seconds};
    ++standin::epoch;
}

double standin_find_extra_time(const char* kernel, int64_t queue, uint64_t number) {
    return standin::Seconds{standin::find_extra_time(kernel, {queue, number})}.count();
}

void standin_calm() {
    standin_jitter(0, 0);
    standin::Settings& settings = standin::get_settings();
    std::lock_guard<std::mutex> guard(settings.lock);
    settings.delays.clear();
}

}  // extern "C"
