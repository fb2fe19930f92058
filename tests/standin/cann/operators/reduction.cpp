// Many elements to one: sums, extremes, and whether any or all are true. Running sums and counts are here as well.
#include "families.h"

#include <ATen/ops/linalg_vector_norm.h>

#define OVER_DIMS_IN_TYPE(symbol, formula)                                                      \
    STANDIN_OPERATOR(                                                                           \
        symbol, (AclTensor self, AclIntArray dims, bool keep, aclDataType type, AclTensor out), \
        [self = hold(self), dims = hold(dims), keep, type = hold(type), out = hold(out)] { store(out, formula); })

#define OVER_DIMS(symbol, formula)                                                         \
    STANDIN_OPERATOR(symbol, (AclTensor self, AclIntArray dims, bool keep, AclTensor out), \
                     [self = hold(self), dims = hold(dims), keep, out = hold(out)] { store(out, formula); })

#define INDEX_OVER_DIM(symbol, formula)                                               \
    STANDIN_OPERATOR(symbol, (AclTensor self, int64_t dim, bool keep, AclTensor out), \
                     [self = hold(self), dim, keep, out = hold(out)] { store(out, formula); })

#define VALUE_AND_INDEX_OVER_DIM(symbol, formula)                                                           \
    STANDIN_OPERATOR(symbol, (AclTensor self, int64_t dim, bool keep, AclTensor values, AclTensor indices), \
                     [self = hold(self), dim, keep, values = hold(values), indices = hold(indices)] {       \
                         const auto [found, where] = formula;                                               \
                         store(values, found);                                                              \
                         store(indices, where);                                                             \
                     })

namespace standin {

OVER_DIMS_IN_TYPE(aclnnReduceSum, self.sum(dims, keep, type))
OVER_DIMS_IN_TYPE(aclnnMean, self.mean(dims, keep, type))

OVER_DIMS(aclnnAny, self.any(dims, keep))
OVER_DIMS(aclnnAll, self.all(dims, keep))
OVER_DIMS(aclnnAmax, self.amax(dims, keep))
OVER_DIMS(aclnnAmin, self.amin(dims, keep))

STANDIN_UNARY(aclnnMax, self.max())
STANDIN_UNARY(aclnnMin, self.min())

INDEX_OVER_DIM(aclnnArgMax, self.argmax(dim, keep))
INDEX_OVER_DIM(aclnnArgMin, self.argmin(dim, keep))

VALUE_AND_INDEX_OVER_DIM(aclnnMaxDim, self.max(dim, keep))
VALUE_AND_INDEX_OVER_DIM(aclnnMinDim, self.min(dim, keep))

STANDIN_OPERATOR(aclnnProd, (AclTensor self, aclDataType type, AclTensor out),
                 [self = hold(self), type = hold(type), out = hold(out)] { store(out, self.prod(type)); })

STANDIN_OPERATOR(aclnnProdDim, (AclTensor self, int64_t dim, bool keep, aclDataType type, AclTensor out),
                 [self = hold(self), dim, keep, type = hold(type), out = hold(out)] {
                     store(out, self.prod(dim, keep, type));
                 })

STANDIN_OPERATOR(aclnnCumsum, (AclTensor self, int64_t dim, aclDataType type, AclTensor out),
                 [self = hold(self), dim, type = hold(type), out = hold(out)] { store(out, self.cumsum(dim, type)); })

STANDIN_OPERATOR(aclnnHistc, (AclTensor self, int64_t bins, AclScalar low, AclScalar high, AclTensor out),
                 [self = hold(self), bins, low = hold(low), high = hold(high), out = hold(out)] {
                     store(out, self.to(at::kFloat).histc(bins, low, high));
                 })

STANDIN_OPERATOR(aclnnLinalgVectorNorm,
                 (AclTensor self, AclScalar order, AclIntArray dims, bool keep, aclDataType type, AclTensor out),
                 [self = hold(self), order = hold(order), dims = hold(dims), keep, type = hold(type), out = hold(out)] {
                     const auto over =
                         dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);  // empty: over all
                     store(out, at::linalg_vector_norm(self, order, over, keep, type));
                 })

}  // namespace standin
