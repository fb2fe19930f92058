// How a call says that it failed: an aclError as its result, and a text for aclGetRecentErrMsg.
#pragma once

#include <string>

#include "acl/acl.h"

namespace standin {

// Keep the text for the calling thread's aclGetRecentErrMsg, and hand the code back for the caller to return.
aclError fail(aclError code, const std::string& text);

}  // namespace standin
