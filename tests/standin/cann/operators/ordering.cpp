// Elements in order.
#include "operator.h"

namespace standin {

STANDIN_OPERATOR(aclnnSort,
                 (AclTensor self, bool stable, int64_t dim, bool descending, AclTensor values, AclTensor indices),
                 [self = hold(self), stable, dim, descending, values = hold(values), indices = hold(indices)] {
                     const auto [sorted, order] = self.sort(stable, dim, descending);
                     store(values, sorted);
                     store(indices, order);
                 })

STANDIN_OPERATOR(aclnnTopk,
                 (AclTensor self, int64_t count, int64_t dim, bool largest, bool sorted, AclTensor values,
                  AclTensor indices),
                 [self = hold(self), count, dim, largest, sorted, values = hold(values), indices = hold(indices)] {
                     const auto [top, where] = self.topk(count, dim, largest, sorted);
                     store(values, top);
                     store(indices, where);
                 })

}  // namespace standin
