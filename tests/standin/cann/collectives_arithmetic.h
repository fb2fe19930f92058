// Sums and the like over plain memory, for every data type that HCCL reduces.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "hccl/hccl_types.h"

namespace standin::collectives {

// Call `visit` with a value of the type that `type` stands for.
template <class Visit>
auto with_type(HcclDataType type, Visit visit) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return visit(int8_t{});
        case HCCL_DATA_TYPE_INT16: return visit(int16_t{});
        case HCCL_DATA_TYPE_INT32: return visit(int32_t{});
        case HCCL_DATA_TYPE_INT64: return visit(int64_t{});
        case HCCL_DATA_TYPE_UINT8: return visit(uint8_t{});
        case HCCL_DATA_TYPE_FP16: return visit(c10::Half{});
        case HCCL_DATA_TYPE_BFP16: return visit(c10::BFloat16{});
        case HCCL_DATA_TYPE_FP32: return visit(float{});
        case HCCL_DATA_TYPE_FP64: return visit(double{});
        default: throw std::invalid_argument("no arithmetic for HCCL data type " + std::to_string(type));
    }
}

// Bytes of an element; 0 for a type that the stand-in lacks.
inline uint64_t size_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_FP64: return 8;
        default: return 0;
    }
}

inline std::string name_of(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT8: return "int8";
        case HCCL_DATA_TYPE_INT16: return "int16";
        case HCCL_DATA_TYPE_INT32: return "int32";
        case HCCL_DATA_TYPE_INT64: return "int64";
        case HCCL_DATA_TYPE_UINT8: return "uint8";
        case HCCL_DATA_TYPE_FP16: return "float16";
        case HCCL_DATA_TYPE_BFP16: return "bfloat16";
        case HCCL_DATA_TYPE_FP32: return "float32";
        case HCCL_DATA_TYPE_FP64: return "float64";
        default: return "data type " + std::to_string(type);
    }
}

// total[i] = combine(total[i], other[i]), each step rounded to T.
template <class T, class Combine>
void fold_with(Combine combine, T* total, const T* other, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        total[i] = static_cast<T>(combine(total[i], other[i]));
    }
}

// Take `count` elements of another rank into the total so far.
inline void fold(HcclReduceOp operation, HcclDataType type, void* total, const void* other, uint64_t count) {
    with_type(type, [=](auto value) {
        using T = decltype(value);
        auto* into = static_cast<T*>(total);
        const auto* from = static_cast<const T*>(other);
        switch (operation) {
            case HCCL_REDUCE_SUM: return fold_with([](T a, T b) { return a + b; }, into, from, count);
            case HCCL_REDUCE_PROD: return fold_with([](T a, T b) { return a * b; }, into, from, count);
            case HCCL_REDUCE_MAX: return fold_with([](T a, T b) { return std::max(a, b); }, into, from, count);
            case HCCL_REDUCE_MIN: return fold_with([](T a, T b) { return std::min(a, b); }, into, from, count);
            default: throw std::invalid_argument("no HCCL reduction " + std::to_string(operation));
        }
    });
}

}  // namespace standin::collectives
