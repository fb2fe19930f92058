// CANN's descriptors: how torch_npu hands tensors, numbers and lists to an operator, and the values a kernel keeps.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// ATen's headers one operator at a time: they compile in half the time of <ATen/ATen.h>.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/core/Tensor.h>

#include "acl/acl.h"

struct aclTensor {
    // Shared, because a kernel may find out while it runs how large its result is, when this descriptor may be gone.
    std::shared_ptr<std::vector<int64_t>> sizes;
    std::vector<int64_t> strides;
    int64_t offset;  // in elements
    aclDataType type;
    void* storage;
};

struct aclScalar {
    aclDataType type;
    c10::Scalar value;
};

struct aclIntArray {
    std::vector<int64_t> values;
};

struct aclBoolArray {
    std::vector<char> values;  // not bool: that vector is packed
};

struct aclTensorList {
    std::vector<const aclTensor*> tensors;
};

struct aclScalarList {
    std::vector<const aclScalar*> scalars;
};

namespace standin {

using AclTensor = const aclTensor*;
using AclScalar = const aclScalar*;
using AclIntArray = const aclIntArray*;
using AclTensorList = const aclTensorList*;

// torch_npu destroys the descriptors right after the launch, when the kernel may not even have begun. So a kernel never
// sees them: it holds what hold() makes of them. A tensor so held looks at the device's memory and owns none of it.
at::Tensor hold(AclTensor tensor);  // undefined for null: an optional tensor that was not given
at::Scalar hold(AclScalar scalar);
at::ScalarType hold(aclDataType type);
std::vector<int64_t> hold(AclIntArray array);  // empty for null
std::vector<at::Tensor> hold(AclTensorList list);
std::string hold(const char* text);
std::optional<at::Scalar> hold_optional(AclScalar scalar);

}  // namespace standin
