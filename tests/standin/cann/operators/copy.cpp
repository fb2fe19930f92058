// Copies, fills, and tensors put together from others.
#include "operator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/stack.h>

namespace standin {

STANDIN_OPERATOR(aclnnInplaceCopy, (AclTensor self, AclTensor source),
                 [self = hold(self), source = hold(source)] { self.copy_(source); })

STANDIN_OPERATOR(aclnnCast, (AclTensor self, aclDataType /*of out*/, AclTensor out),
                 [self = hold(self), out = hold(out)] { store(out, self); })

STANDIN_OPERATOR(aclnnInplaceFillScalar, (AclTensor self, AclScalar value),
                 [self = hold(self), value = hold(value)] { self.fill_(value); })

STANDIN_OPERATOR(aclnnInplaceFillTensor, (AclTensor self, AclTensor value),
                 [self = hold(self), value = hold(value)] { self.fill_(value); })

STANDIN_OPERATOR(aclnnInplaceZero, (AclTensor self), [self = hold(self)] { self.zero_(); })

STANDIN_OPERATOR(aclnnInplaceOne, (AclTensor self), [self = hold(self)] { self.fill_(1); })

STANDIN_OPERATOR(aclnnArange, (AclScalar start, AclScalar end, AclScalar step, AclTensor out),
                 [start = hold(start), end = hold(end), step = hold(step), out = hold(out)] {
                     store(out, at::arange(start, end, step, out.options()));
                 })

STANDIN_OPERATOR(aclnnLinspace, (AclScalar start, AclScalar end, int64_t steps, AclTensor out),
                 [start = hold(start), end = hold(end), steps, out = hold(out)] {
                     store(out, at::linspace(start, end, steps, out.options()));
                 })

STANDIN_OPERATOR(aclnnCat, (AclTensorList tensors, int64_t dim, AclTensor out),
                 [tensors = hold(tensors), dim, out = hold(out)] { store(out, at::cat(tensors, dim)); })

STANDIN_OPERATOR(aclnnStack, (AclTensorList tensors, int64_t dim, AclTensor out),
                 [tensors = hold(tensors), dim, out = hold(out)] { store(out, at::stack(tensors, dim)); })

STANDIN_OPERATOR(aclnnRepeat, (AclTensor self, AclIntArray repeats, AclTensor out),
                 [self = hold(self), repeats = hold(repeats), out = hold(out)] { store(out, self.repeat(repeats)); })

STANDIN_OPERATOR(aclnnRepeatInterleave, (AclTensor self, AclTensor repeats, int64_t /*size*/, AclTensor out),
                 [self = hold(self), repeats = hold(repeats), out = hold(out)] {
                     store(out, self.repeat_interleave(repeats));
                 })

STANDIN_OPERATOR(aclnnRepeatInterleaveIntWithDim,
                 (AclTensor self, int64_t repeats, int64_t dim, int64_t /*size of out*/, AclTensor out),
                 [self = hold(self), repeats, dim, out = hold(out)] {
                     store(out, self.repeat_interleave(repeats, dim));
                 })

STANDIN_OPERATOR(aclnnRoll, (AclTensor self, AclIntArray shifts, AclIntArray dims, AclTensor out),
                 [self = hold(self), shifts = hold(shifts), dims = hold(dims), out = hold(out)] {
                     store(out, self.roll(shifts, dims));
                 })

STANDIN_OPERATOR(aclnnFlip, (AclTensor self, AclIntArray dims, AclTensor out),
                 [self = hold(self), dims = hold(dims), out = hold(out)] { store(out, self.flip(dims)); })

STANDIN_OPERATOR(aclnnTril, (AclTensor self, int64_t diagonal, AclTensor out),
                 [self = hold(self), diagonal, out = hold(out)] { store(out, self.tril(diagonal)); })

STANDIN_OPERATOR(aclnnTriu, (AclTensor self, int64_t diagonal, AclTensor out),
                 [self = hold(self), diagonal, out = hold(out)] { store(out, self.triu(diagonal)); })

STANDIN_OPERATOR(aclnnConstantPadNd, (AclTensor self, AclIntArray pad, AclScalar value, AclTensor out),
                 [self = hold(self), pad = hold(pad), value = hold(value), out = hold(out)] {
                     store(out, at::constant_pad_nd(self, pad, value));
                 })

}  // namespace standin
