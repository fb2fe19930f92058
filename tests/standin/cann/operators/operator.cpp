// The two phases that all operators share.
#include "operator.h"

#include <cstring>
#include <memory>
#include <string>

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

struct aclOpExecutor {
    const char* name;
    standin::Kernel kernel;
};

namespace standin {
namespace {

constexpr int kInvalidArgument = 161002;  // CANN's ACLNN_ERR_PARAM_INVALID

}  // namespace

int plan(const char* name, Kernel kernel, uint64_t* workspace_size, aclOpExecutor** executor) {
    // The caller may be in inference mode, and its tensors may be changed by one that is in it, too.
    Kernel in_mode = [kernel = std::move(kernel)] {
        const c10::InferenceMode guard;
        kernel();
    };
    *executor = new aclOpExecutor{name, std::move(in_mode)};
    *workspace_size = 0;
    return ACL_SUCCESS;
}

int refuse(const char* name, const std::exception& reason) {
    const auto* error = dynamic_cast<const c10::Error*>(&reason);
    const std::string text = error == nullptr ? reason.what() : error->what_without_backtrace();
    return standin_fail(kInvalidArgument, (std::string(name) + ": " + text).c_str());
}

int launch(aclOpExecutor* executor, aclrtStream stream) {
    const std::unique_ptr<aclOpExecutor> owned(executor);
    return standin_submit(stream, owned->name + std::strlen("aclnn"), &owned->kernel);
}

void store(const at::Tensor& out, const at::Tensor& result) {
    TORCH_CHECK(out.sizes() == result.sizes(), "the result is ", result.sizes(), ", the output is ", out.sizes());
    out.copy_(result);
}

}  // namespace standin

extern "C" int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    delete executor;
    return ACL_SUCCESS;
}
