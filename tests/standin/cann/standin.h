// What the stand-in's libraries share: the way of a kernel to a stream.
#pragma once

#include <functional>

namespace standin {
using Kernel = std::function<void()>;
}

// Queue a kernel on a stream (null: the default stream of the calling thread's device), or, while the stream is being
// captured, note it in the graph. Takes the kernel away from the caller. Returns an aclError.
extern "C" int standin_submit(void* stream, const char* name, standin::Kernel* kernel);

// The same for a kernel written in another language: a function and what it is called with. Not 0 says that it failed.
extern "C" int standin_submit_function(void* stream, const char* name, int (*function)(void*), void* data);

// Keep a text for the calling thread's aclGetRecentErrMsg, which torch_npu adds to its exceptions; returns the code.
extern "C" int standin_fail(int code, const char* text);

// Say, once for each name, that something was called that the stand-in does not provide.
extern "C" void standin_report_missing(const char* name);
