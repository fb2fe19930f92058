// Normalisations and gated activations: the fused operators between the matrix products of a transformer.
#include "operator.h"

#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/silu.h>

namespace standin {
namespace {

// Divide by the root of the mean square over the last dimensions, those of gamma, in float32. The reciprocal of that
// root is a result too: a backward pass would use it.
void rms_norm(const at::Tensor& x, const at::Tensor& gamma, double epsilon, const at::Tensor& y,
              const at::Tensor& reciprocal_rms) {
    std::vector<int64_t> dims;
    for (int64_t dim = x.dim() - gamma.dim(); dim < x.dim(); ++dim) {
        dims.push_back(dim);
    }
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor scale = wide.square().mean(dims, /*keepdim=*/true).add(epsilon).rsqrt();
    store(y, wide.mul(scale).mul(gamma.to(at::kFloat)));
    store(reciprocal_rms, scale);
}

}  // namespace

STANDIN_OPERATOR(aclnnRmsNorm, (AclTensor x, AclTensor gamma, double epsilon, AclTensor y, AclTensor reciprocal_rms),
                 [x = hold(x), gamma = hold(gamma), epsilon, y = hold(y), reciprocal_rms = hold(reciprocal_rms)] {
                     rms_norm(x, gamma, epsilon, y, reciprocal_rms);
                 })

// RmsNorm of a sum, which is a result as well: the residual that the next layer adds to.
STANDIN_OPERATOR(aclnnAddRmsNorm,
                 (AclTensor x, AclTensor residual, AclTensor gamma, double epsilon, AclTensor y,
                  AclTensor reciprocal_rms, AclTensor sum),
                 [x = hold(x), residual = hold(residual), gamma = hold(gamma), epsilon, y = hold(y),
                  reciprocal_rms = hold(reciprocal_rms), sum = hold(sum)] {
                     store(sum, x.add(residual));
                     rms_norm(sum, gamma, epsilon, y, reciprocal_rms);
                 })

STANDIN_OPERATOR(aclnnLayerNorm,
                 (AclTensor x, AclIntArray shape, AclTensor weight, AclTensor bias, double epsilon, AclTensor y,
                  AclTensor mean, AclTensor reciprocal_deviation),
                 [x = hold(x), shape = hold(shape), weight = hold(weight), bias = hold(bias), epsilon, y = hold(y),
                  mean = hold(mean), reciprocal_deviation = hold(reciprocal_deviation)] {
                     const auto [normed, centre, scale] = at::native_layer_norm(x, shape, weight, bias, epsilon);
                     store(y, normed);
                     if (mean.defined()) {
                         store(mean, centre);
                     }
                     if (reciprocal_deviation.defined()) {
                         store(reciprocal_deviation, scale);
                     }
                 })

STANDIN_OPERATOR(aclnnSoftmax, (AclTensor self, int64_t dim, AclTensor out),
                 [self = hold(self), dim, out = hold(out)] { store(out, self.softmax(dim, out.scalar_type())); })

STANDIN_OPERATOR(aclnnLogSoftmax, (AclTensor self, int64_t dim, AclTensor out),
                 [self = hold(self), dim, out = hold(out)] { store(out, self.log_softmax(dim, out.scalar_type())); })

// The first half gates the second.
STANDIN_OPERATOR(aclnnSwiGlu, (AclTensor x, int64_t dim, AclTensor out), [x = hold(x), dim, out = hold(out)] {
    const std::vector<at::Tensor> halves = x.chunk(2, dim);
    store(out, at::silu(halves[0]).mul(halves[1]));
})

}  // namespace standin
