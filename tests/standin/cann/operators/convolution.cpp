// Convolutions in one, two or three dimensions; the last number chooses how the cube units round float32. Floats are
// added up in float64, as in matmul.cpp.
#include "operator.h"

#include <ATen/ops/convolution.h>

namespace standin {
namespace {

c10::optional<at::Tensor> widen(const at::Tensor& x) {
    return x.defined() ? c10::optional<at::Tensor>(x.to(at::kDouble)) : c10::nullopt;
}

}  // namespace

STANDIN_OPERATOR(aclnnConvolution,
                 (AclTensor input, AclTensor weight, AclTensor bias, AclIntArray stride, AclIntArray padding,
                  AclIntArray dilation, bool transposed, AclIntArray output_padding, int64_t groups, AclTensor out,
                  int8_t /*cube*/),
                 [input = hold(input), weight = hold(weight), bias = hold(bias), stride = hold(stride),
                  padding = hold(padding), dilation = hold(dilation), transposed,
                  output_padding = hold(output_padding), groups, out = hold(out)] {
                     store(out, at::convolution(*widen(input), *widen(weight), widen(bias), stride, padding, dilation,
                                                transposed, output_padding, groups));
                 })

}  // namespace standin
