// Comparisons, logic and bits, element by element, and the choice between two values that they lead to.
#include "families.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/isfinite.h>

#define WITH_TENSOR_OR_NUMBER(symbol, formula)         \
    STANDIN_BINARY(symbol##Tensor, AclTensor, formula) \
    STANDIN_BINARY(symbol##Scalar, AclScalar, formula)

namespace standin {

WITH_TENSOR_OR_NUMBER(aclnnEq, self.eq(other))
WITH_TENSOR_OR_NUMBER(aclnnNe, self.ne(other))
WITH_TENSOR_OR_NUMBER(aclnnLt, self.lt(other))
WITH_TENSOR_OR_NUMBER(aclnnLe, self.le(other))
WITH_TENSOR_OR_NUMBER(aclnnGt, self.gt(other))
WITH_TENSOR_OR_NUMBER(aclnnGe, self.ge(other))

WITH_TENSOR_OR_NUMBER(aclnnBitwiseAnd, self.bitwise_and(other))
WITH_TENSOR_OR_NUMBER(aclnnBitwiseOr, self.bitwise_or(other))
WITH_TENSOR_OR_NUMBER(aclnnBitwiseXor, self.bitwise_xor(other))
STANDIN_UNARY(aclnnBitwiseNot, self.bitwise_not())
STANDIN_BINARY_IN_PLACE(aclnnInplaceBitwiseAndTensor, AclTensor, self.bitwise_and_(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceBitwiseAndScalar, AclScalar, self.bitwise_and_(other))

STANDIN_BINARY(aclnnLogicalAnd, AclTensor, self.logical_and(other))
STANDIN_BINARY(aclnnLogicalOr, AclTensor, self.logical_or(other))
STANDIN_BINARY(aclnnLogicalXor, AclTensor, self.logical_xor(other))
STANDIN_UNARY(aclnnLogicalNot, self.logical_not())
STANDIN_BINARY_IN_PLACE(aclnnInplaceLogicalAnd, AclTensor, self.logical_and_(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceLogicalOr, AclTensor, self.logical_or_(other))

STANDIN_UNARY(aclnnIsFinite, at::isfinite(self))
STANDIN_UNARY(aclnnIsNegInf, self.isneginf())

// Whether two tensors are equal as a whole: one bool.
STANDIN_OPERATOR(aclnnEqual, (AclTensor self, AclTensor other, AclTensor out),
                 [self = hold(self), other = hold(other), out = hold(out)] { out.fill_(at::equal(self, other)); })

STANDIN_OPERATOR(aclnnIsClose,
                 (AclTensor self, AclTensor other, double rtol, double atol, bool equal_nan, AclTensor out),
                 [self = hold(self), other = hold(other), rtol, atol, equal_nan, out = hold(out)] {
                     store(out, at::isclose(self, other, rtol, atol, equal_nan));
                 })

STANDIN_OPERATOR(aclnnSWhere, (AclTensor condition, AclTensor self, AclTensor other, AclTensor out),
                 [condition = hold(condition), self = hold(self), other = hold(other), out = hold(out)] {
                     store(out, self.where(condition, other));
                 })

STANDIN_OPERATOR(aclnnInplaceMaskedFillScalar, (AclTensor self, AclTensor mask, AclScalar value),
                 [self = hold(self), mask = hold(mask), value = hold(value)] { self.masked_fill_(mask, value); })

STANDIN_OPERATOR(aclnnInplaceMaskedFillTensor, (AclTensor self, AclTensor mask, AclTensor value),
                 [self = hold(self), mask = hold(mask), value = hold(value)] { self.masked_fill_(mask, value); })

}  // namespace standin
