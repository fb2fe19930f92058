#include "failure.h"

#include <cstdio>
#include <mutex>
#include <set>

#include "../standin.h"

namespace standin {
namespace {

thread_local std::string recent_text;

// True the first time that it is asked about a name.
bool is_news(const char* name) {
    static auto& lock = *new std::mutex;
    static auto& known = *new std::set<std::string>;
    std::lock_guard<std::mutex> guard(lock);
    return known.insert(name).second;
}

}  // namespace

aclError fail(aclError code, const std::string& text) {
    recent_text = "[standin] " + text;
    return code;
}

}  // namespace standin

extern "C" {

int standin_fail(int code, const char* text) { return standin::fail(code, text); }

void standin_report_missing(const char* name) {
    standin::fail(ACL_ERROR_API_NOT_SUPPORT, std::string(name) + " is not part of the stand-in");
    if (standin::is_news(name)) {
        std::fprintf(stderr, "[standin] %s was called, which is not part of the stand-in\n", name);
    }
}

const char* aclGetRecentErrMsg() {
    return standin::recent_text.empty() ? nullptr : standin::recent_text.c_str();
}

void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

}  // extern "C"
