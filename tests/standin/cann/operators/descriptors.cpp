// Creates and destroys CANN's descriptors and turns them into values of ATen.
#include "descriptors.h"

#include <algorithm>

#include <ATen/ops/from_blob.h>

namespace standin {
namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t dim = sizes.size(); dim > 1; --dim) {
        strides[dim - 2] = strides[dim - 1] * sizes[dim - 1];
    }
    return strides;
}

template <class Number>
c10::Scalar read(const void* number) {
    return c10::Scalar(*static_cast<const Number*>(number));
}

c10::Scalar read_scalar(const void* number, aclDataType type) {
    switch (type) {
        case ACL_BOOL:
            return read<bool>(number);
        case ACL_UINT8:
            return read<uint8_t>(number);
        case ACL_INT8:
            return read<int8_t>(number);
        case ACL_INT16:
            return read<int16_t>(number);
        case ACL_INT32:
            return read<int32_t>(number);
        case ACL_INT64:
            return read<int64_t>(number);
        case ACL_FLOAT16:
            return read<at::Half>(number);
        case ACL_BF16:
            return read<at::BFloat16>(number);
        case ACL_FLOAT:
            return read<float>(number);
        case ACL_DOUBLE:
            return read<double>(number);
        default:
            return {};  // refused by hold(), which may throw; the C functions below may not
    }
}

}  // namespace

at::ScalarType hold(aclDataType type) {
    switch (type) {
        case ACL_BOOL:
            return at::kBool;
        case ACL_UINT8:
            return at::kByte;
        case ACL_INT8:
            return at::kChar;
        case ACL_INT16:
            return at::kShort;
        case ACL_INT32:
            return at::kInt;
        case ACL_INT64:
            return at::kLong;
        case ACL_FLOAT16:
            return at::kHalf;
        case ACL_BF16:
            return at::kBFloat16;
        case ACL_FLOAT:
            return at::kFloat;
        case ACL_DOUBLE:
            return at::kDouble;
        default:
            TORCH_CHECK(false, "the stand-in does not know aclDataType ", static_cast<int>(type));
    }
}

at::Tensor hold(AclTensor tensor) {
    if (tensor == nullptr) {
        return {};
    }
    const at::ScalarType type = hold(tensor->type);
    char* first = static_cast<char*>(tensor->storage) + tensor->offset * static_cast<int64_t>(c10::elementSize(type));
    return at::from_blob(first, *tensor->sizes, tensor->strides, at::TensorOptions().dtype(type));
}

at::Scalar hold(AclScalar scalar) {
    TORCH_CHECK(scalar != nullptr, "a number is missing");
    hold(scalar->type);  // refuses a type that was not read
    return scalar->value;
}

std::optional<at::Scalar> hold_optional(AclScalar scalar) {
    return scalar == nullptr ? std::nullopt : std::optional<at::Scalar>(hold(scalar));
}

std::vector<int64_t> hold(AclIntArray array) { return array == nullptr ? std::vector<int64_t>() : array->values; }

std::vector<at::Tensor> hold(AclTensorList list) {
    std::vector<at::Tensor> tensors;
    if (list != nullptr) {
        for (AclTensor tensor : list->tensors) {
            tensors.push_back(hold(tensor));
        }
    }
    return tensors;
}

std::string hold(const char* text) { return text == nullptr ? std::string() : std::string(text); }

}  // namespace standin

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* storage) {
    auto shape = std::make_shared<std::vector<int64_t>>(sizes, sizes + dims);
    auto steps =
        strides == nullptr ? standin::contiguous_strides(*shape) : std::vector<int64_t>(strides, strides + dims);
    return new aclTensor{std::move(shape), std::move(steps), offset, type, storage};
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
    return new aclScalar{type, standin::read_scalar(value, type)};
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
    return new aclIntArray{{values, values + count}};
}

aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
    return new aclBoolArray{{values, values + count}};
}

aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t count) {
    return new aclTensorList{{tensors, tensors + count}};
}

aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t count) {
    return new aclScalarList{{scalars, scalars + count}};
}

// The sizes of a tensor, in an array that the caller deletes: how torch_npu learns how much nonzero() found.
int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
    *dims = tensor->sizes->size();
    *sizes = new int64_t[*dims];
    std::copy(tensor->sizes->begin(), tensor->sizes->end(), *sizes);
    return ACL_SUCCESS;
}

int aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return ACL_SUCCESS;
}

int aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return ACL_SUCCESS;
}

int aclDestroyIntArray(const aclIntArray* array) {
    delete array;
    return ACL_SUCCESS;
}

int aclDestroyBoolArray(const aclBoolArray* array) {
    delete array;
    return ACL_SUCCESS;
}

// A list owns its members: torch_npu destroys only the list.
int aclDestroyTensorList(const aclTensorList* list) {
    for (const aclTensor* tensor : list->tensors) {
        delete tensor;
    }
    delete list;
    return ACL_SUCCESS;
}

int aclDestroyScalarList(const aclScalarList* list) {
    for (const aclScalar* scalar : list->scalars) {
        delete scalar;
    }
    delete list;
    return ACL_SUCCESS;
}

}  // extern "C"
