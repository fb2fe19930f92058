// Arithmetic and functions, element by element.
#include "families.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/silu.h>

// Sums, where the other operand is multiplied by alpha.
#define SUM(symbol, Operand, formula)                                            \
    STANDIN_OPERATOR(                                                            \
        symbol, (AclTensor self, Operand other, AclScalar alpha, AclTensor out), \
        [self = hold(self), other = hold(other), alpha = hold(alpha), out = hold(out)] { store(out, formula); })

#define SUM_IN_PLACE(symbol, Operand, formula)                                 \
    STANDIN_OPERATOR(symbol, (AclTensor self, Operand other, AclScalar alpha), \
                     [self = hold(self), other = hold(other), alpha = hold(alpha)] { formula; })

namespace standin {

SUM(aclnnAdd, AclTensor, self.add(other, alpha))
SUM(aclnnAdds, AclScalar, self.add(other, alpha))
SUM(aclnnSub, AclTensor, self.sub(other, alpha))
SUM(aclnnSubs, AclScalar, self.sub(other, alpha))
SUM(aclnnRsubs, AclScalar, self.mul(alpha).neg().add(other))
SUM_IN_PLACE(aclnnInplaceAdd, AclTensor, self.add_(other, alpha))
SUM_IN_PLACE(aclnnInplaceAdds, AclScalar, self.add_(other, alpha))
SUM_IN_PLACE(aclnnInplaceSub, AclTensor, self.sub_(other, alpha))
SUM_IN_PLACE(aclnnInplaceSubs, AclScalar, self.sub_(other, alpha))

STANDIN_BINARY(aclnnMul, AclTensor, self.mul(other))
STANDIN_BINARY(aclnnDiv, AclTensor, self.div(other))
STANDIN_BINARY(aclnnFloorDivide, AclTensor, self.floor_divide(other))
STANDIN_BINARY(aclnnRemainderTensorTensor, AclTensor, self.remainder(other))
STANDIN_BINARY(aclnnPowTensorTensor, AclTensor, self.pow(other))
STANDIN_BINARY(aclnnMaximum, AclTensor, self.maximum(other))
STANDIN_BINARY(aclnnMinimum, AclTensor, self.minimum(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceMul, AclTensor, self.mul_(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceDiv, AclTensor, self.div_(other))

STANDIN_BINARY(aclnnMuls, AclScalar, self.mul(other))
STANDIN_BINARY(aclnnDivs, AclScalar, self.div(other))
STANDIN_BINARY(aclnnFloorDivides, AclScalar, self.floor_divide(other))
STANDIN_BINARY(aclnnRemainderTensorScalar, AclScalar, self.remainder(other))
STANDIN_BINARY(aclnnPowTensorScalar, AclScalar, self.pow(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceMuls, AclScalar, self.mul_(other))
STANDIN_BINARY_IN_PLACE(aclnnInplaceDivs, AclScalar, self.div_(other))

STANDIN_OPERATOR(aclnnPowScalarTensor, (AclScalar base, AclTensor exponent, AclTensor out),
                 [base = hold(base), exponent = hold(exponent), out = hold(out)] {
                     store(out, at::pow(base, exponent));
                 })

STANDIN_OPERATOR(aclnnClamp, (AclTensor self, AclScalar least, AclScalar most, AclTensor out),
                 [self = hold(self), least = hold_optional(least), most = hold_optional(most), out = hold(out)] {
                     store(out, self.clamp(least, most));
                 })

STANDIN_BINARY(aclnnClampMin, AclScalar, self.clamp_min(other))

STANDIN_OPERATOR(aclnnNanToNum, (AclTensor self, float nan, float most, float least, AclTensor out),
                 [self = hold(self), nan, most, least, out = hold(out)] {
                     store(out, self.nan_to_num(nan, most, least));
                 })

STANDIN_UNARY(aclnnAbs, self.abs())
STANDIN_UNARY(aclnnNeg, self.neg())
STANDIN_UNARY(aclnnReciprocal, self.reciprocal())
STANDIN_UNARY(aclnnFloor, self.floor())
STANDIN_UNARY(aclnnCeil, self.ceil())
STANDIN_UNARY(aclnnRound, self.round())
STANDIN_UNARY(aclnnSqrt, self.sqrt())
STANDIN_UNARY(aclnnRsqrt, self.rsqrt())
STANDIN_UNARY(aclnnExp, self.exp())
STANDIN_UNARY(aclnnLog, self.log())
STANDIN_UNARY(aclnnSin, self.sin())
STANDIN_UNARY(aclnnCos, self.cos())
STANDIN_UNARY(aclnnTanh, self.tanh())
STANDIN_UNARY(aclnnSigmoid, self.sigmoid())
STANDIN_UNARY(aclnnRelu, self.relu())
STANDIN_UNARY(aclnnSilu, at::silu(self))
STANDIN_UNARY_IN_PLACE(aclnnInplaceExp, self.exp_())
STANDIN_UNARY_IN_PLACE(aclnnInplaceRsqrt, self.rsqrt_())
STANDIN_UNARY_IN_PLACE(aclnnInplaceTanh, self.tanh_())
STANDIN_UNARY_IN_PLACE(aclnnInplaceSigmoid, self.sigmoid_())
STANDIN_UNARY_IN_PLACE(aclnnInplaceRelu, self.relu_())

STANDIN_OPERATOR(aclnnGeluV2, (AclTensor self, int64_t approximate, AclTensor out),
                 [self = hold(self), approximate, out = hold(out)] {
                     store(out, at::gelu(self, approximate == 0 ? "none" : "tanh"));
                 })

}  // namespace standin
