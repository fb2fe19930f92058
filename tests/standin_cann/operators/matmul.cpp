// Products of matrices. The last number of each chooses how the cube units round float32; there are none here.
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

PRODUCT(aclnnMm, self.mm(other))
PRODUCT(aclnnMatmul, self.matmul(other))
PRODUCT(aclnnBatchMatMul, self.bmm(other))

SUM_WITH_PRODUCT(aclnnAddmm, at::addmm(self, left, right, beta, alpha))
SUM_WITH_PRODUCT(aclnnBaddbmm, at::baddbmm(self, left, right, beta, alpha))

STANDIN_OPERATOR(aclnnInplaceAddmm,
                 (AclTensor self, AclTensor left, AclTensor right, AclScalar beta, AclScalar alpha, int8_t /*cube*/),
                 [self = hold(self), left = hold(left), right = hold(right), beta = hold(beta), alpha = hold(alpha)] {
                     self.addmm_(left, right, beta, alpha);
                 })

STANDIN_OPERATOR(aclnnDot, (AclTensor self, AclTensor other, AclTensor out),
                 [self = hold(self), other = hold(other), out = hold(out)] { store(out, self.dot(other)); })

}  // namespace standin
