// Options that torch_npu sets and reads back. The stand-in keeps them; nothing here depends on them.
#include <map>
#include <mutex>
#include <string>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

namespace {

struct Options {
    std::mutex lock;
    std::map<aclSysParamOpt, int64_t> system;
};

Options& get_options() {
    static auto& options = *new Options;
    return options;
}

}  // namespace

extern "C" {

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    Options& options = get_options();
    std::lock_guard<std::mutex> guard(options.lock);
    options.system[option] = value;
    return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
    Options& options = get_options();
    std::lock_guard<std::mutex> guard(options.lock);
    *value = options.system[option];
    return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }

}  // extern "C"
