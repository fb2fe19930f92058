// How an operator is written here: its parameters as CANN has them, and the kernel that it queues.
//
//   STANDIN_OPERATOR(aclnnGather, (AclTensor self, int64_t dim, AclTensor index, AclTensor out),
//                    [self = hold(self), dim, index = hold(index), out = hold(out)] {
//                        store(out, self.gather(dim, index));
//                    })
//
// CANN's operators run in two phases, and so do these. aclnn...GetWorkspaceSize() looks at the arguments and plans: it
// makes an executor that holds the kernel. aclnn...() launches: it gives the kernel to the stream, whose host thread
// runs it. A kernel in a graph runs once for each replay, so it must not use up what it holds: no `mutable` lambda.
#pragma once

#include <exception>
#include <type_traits>
#include <utility>

#include "../standin.h"
#include "descriptors.h"

struct aclOpExecutor;  // a planned kernel, on its way from the first phase to the second

namespace standin {

// Make the executor; its workspace is always empty.
int plan(const char* name, Kernel kernel, uint64_t* workspace_size, aclOpExecutor** executor);

// Return the error for arguments that cannot be; torch_npu makes an exception of it, with the reason in its text.
int refuse(const char* name, const std::exception& reason);

// Queue the kernel on the stream, by the name without "aclnn", and destroy the executor: as in CANN, it runs once.
int launch(aclOpExecutor* executor, aclrtStream stream);

// Write a result where torch_npu made room for it, in the type it asked for. The sizes must be those it expects.
void store(const at::Tensor& out, const at::Tensor& result);

template <class Body>
Kernel repeatable(Body body) {
    static_assert(std::is_invocable_v<const Body&>, "a kernel in a graph runs many times: no mutable lambda");
    return Kernel(std::move(body));
}

}  // namespace standin

#define STANDIN_PARAMETERS(...) __VA_ARGS__

#define STANDIN_OPERATOR(symbol, parameters, ...)                                                            \
    extern "C" int symbol##GetWorkspaceSize(STANDIN_PARAMETERS parameters, uint64_t* standin_workspace_size, \
                                            aclOpExecutor** standin_executor) {                              \
        try {                                                                                                \
            standin::Kernel kernel = standin::repeatable(__VA_ARGS__);                                       \
            return standin::plan(#symbol, std::move(kernel), standin_workspace_size, standin_executor);      \
        } catch (const std::exception& reason) {                                                             \
            return standin::refuse(#symbol, reason);                                                         \
        }                                                                                                    \
    }                                                                                                        \
    extern "C" int symbol(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {                    \
        return standin::launch(executor, stream);                                                            \
    }
