// Products of matrices. The last number of each chooses how the cube units round float32; there are none here.
//
// Floats are added up in float64: in their own type the CPU adds in an order that depends on how many rows there are,
// and a row's result would then tell how its batch was cut.
#include "operator.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>

#define PRODUCT(symbol, formula)                                                                \
    STANDIN_OPERATOR(symbol, (AclTensor self, AclTensor other, AclTensor out, int8_t /*cube*/), \
                     [self = hold(self), other = hold(other), out = hold(out)] { store(out, formula); })

#define SUM_WITH_PRODUCT(symbol, formula)                                                                              \
    STANDIN_OPERATOR(symbol,                                                                                           \
                     (AclTensor self, AclTensor left, AclTensor right, AclScalar beta, AclScalar alpha, AclTensor out, \
                      int8_t /*cube*/),                                                                                \
                     [self = hold(self), left = hold(left), right = hold(right), beta = hold(beta),                    \
                      alpha = hold(alpha), out = hold(out)] { store(out, formula); })

namespace standin {
namespace {

at::Tensor widen(const at::Tensor& x) { return at::isFloatingType(x.scalar_type()) ? x.to(at::kDouble) : x; }

}  // namespace

PRODUCT(aclnnMm, widen(self).mm(widen(other)))
PRODUCT(aclnnMatmul, widen(self).matmul(widen(other)))
PRODUCT(aclnnBatchMatMul, widen(self).bmm(widen(other)))

SUM_WITH_PRODUCT(aclnnAddmm, at::addmm(widen(self), widen(left), widen(right), beta, alpha))
SUM_WITH_PRODUCT(aclnnBaddbmm, at::baddbmm(widen(self), widen(left), widen(right), beta, alpha))

STANDIN_OPERATOR(aclnnInplaceAddmm,
                 (AclTensor self, AclTensor left, AclTensor right, AclScalar beta, AclScalar alpha, int8_t /*cube*/),
                 [self = hold(self), left = hold(left), right = hold(right), beta = hold(beta), alpha = hold(alpha)] {
                     store(self, at::addmm(widen(self), widen(left), widen(right), beta, alpha));
                 })

STANDIN_OPERATOR(aclnnDot, (AclTensor self, AclTensor other, AclTensor out),
                 [self = hold(self), other = hold(other), out = hold(out)] { store(out, widen(self).dot(widen(other))); })

}  // namespace standin
