// Reads and writes at places that other tensors name.
#include "operator.h"

#include <algorithm>

#include <ATen/ops/embedding.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

namespace standin {
namespace {

using Indices = c10::List<std::optional<at::Tensor>>;

// torch_npu puts an empty tensor where a dimension is taken whole. So an empty index means that, unless all are empty:
// one must be an index, and it names no element.
bool names_nothing(const std::vector<at::Tensor>& tensors) {
    return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.numel() == 0; });
}

Indices indices_of(const std::vector<at::Tensor>& tensors) {
    Indices indices;
    for (const at::Tensor& tensor : tensors) {
        indices.push_back(tensor.numel() == 0 ? std::nullopt : std::optional<at::Tensor>(tensor));
    }
    return indices;
}

// Write a result whose size only the run reveals to the start of a buffer made for the largest case, and note the size
// in the buffer's descriptor. torch_npu waits for the stream before it asks.
void store_found(const at::Tensor& buffer, std::vector<int64_t>& sizes, const at::Tensor& found) {
    at::from_blob(buffer.data_ptr(), found.sizes(), buffer.options()).copy_(found);
    sizes = found.sizes().vec();
}

}  // namespace

STANDIN_OPERATOR(aclnnIndex, (AclTensor self, AclTensorList indices, AclTensor out),
                 [self = hold(self), indices = hold(indices), out = hold(out)] {
                     if (!names_nothing(indices)) {
                         store(out, self.index(indices_of(indices)));
                     }
                 })

STANDIN_OPERATOR(aclnnIndexPutImpl,
                 (AclTensor self, AclTensorList indices, AclTensor values, bool accumulate, bool /*unsafe*/),
                 [self = hold(self), indices = hold(indices), values = hold(values), accumulate] {
                     if (!names_nothing(indices)) {
                         self.index_put_(indices_of(indices), values, accumulate);
                     }
                 })

STANDIN_OPERATOR(aclnnIndexSelect, (AclTensor self, int64_t dim, AclTensor index, AclTensor out),
                 [self = hold(self), dim, index = hold(index), out = hold(out)] {
                     store(out, self.index_select(dim, index));
                 })

STANDIN_OPERATOR(aclnnEmbedding, (AclTensor weight, AclTensor indices, AclTensor out),
                 [weight = hold(weight), indices = hold(indices), out = hold(out)] {
                     store(out, at::embedding(weight, indices));
                 })

STANDIN_OPERATOR(aclnnGather, (AclTensor self, int64_t dim, AclTensor index, AclTensor out),
                 [self = hold(self), dim, index = hold(index), out = hold(out)] {
                     store(out, self.gather(dim, index));
                 })

STANDIN_OPERATOR(aclnnIndexAdd,
                 (AclTensor self, int64_t dim, AclTensor index, AclTensor source, AclScalar alpha, AclTensor out),
                 [self = hold(self), dim, index = hold(index), source = hold(source), alpha = hold(alpha),
                  out = hold(out)] { store(out, self.index_add(dim, index, source, alpha)); })

STANDIN_OPERATOR(aclnnInplaceIndexCopy, (AclTensor self, int64_t dim, AclTensor index, AclTensor source),
                 [self = hold(self), dim, index = hold(index), source = hold(source)] {
                     self.index_copy_(dim, index.to(at::kLong), source);
                 })

STANDIN_OPERATOR(aclnnInplaceIndexFillTensor, (AclTensor self, int64_t dim, AclIntArray index, AclScalar value),
                 [self = hold(self), dim, index = hold(index), value = hold(value)] {
                     self.index_fill_(dim, at::tensor(index, at::kLong), value);
                 })

STANDIN_OPERATOR(aclnnScatter,
                 (AclTensor self, int64_t dim, AclTensor index, AclTensor source, int64_t /*reduction: none*/,
                  AclTensor out),
                 [self = hold(self), dim, index = hold(index), source = hold(source), out = hold(out)] {
                     store(out, self.scatter(dim, index, source));
                 })

STANDIN_OPERATOR(aclnnInplaceScatter,
                 (AclTensor self, int64_t dim, AclTensor index, AclTensor source, int64_t /*reduction: none*/),
                 [self = hold(self), dim, index = hold(index), source = hold(source)] {
                     self.scatter_(dim, index, source);
                 })

STANDIN_OPERATOR(aclnnScatterValue,
                 (AclTensor self, int64_t dim, AclTensor index, AclScalar value, int64_t /*reduction: none*/,
                  AclTensor out),
                 [self = hold(self), dim, index = hold(index), value = hold(value), out = hold(out)] {
                     store(out, self.scatter(dim, index, value));
                 })

STANDIN_OPERATOR(aclnnInplaceScatterValue,
                 (AclTensor self, int64_t dim, AclTensor index, AclScalar value, int64_t /*reduction: none*/),
                 [self = hold(self), dim, index = hold(index), value = hold(value)] {
                     self.scatter_(dim, index, value);
                 })

STANDIN_OPERATOR(aclnnScatterAdd, (AclTensor self, int64_t dim, AclTensor index, AclTensor source, AclTensor out),
                 [self = hold(self), dim, index = hold(index), source = hold(source), out = hold(out)] {
                     store(out, self.scatter_add(dim, index, source));
                 })

STANDIN_OPERATOR(aclnnMaskedSelect, (AclTensor self, AclTensor mask, AclTensor out),
                 [self = hold(self), mask = hold(mask), buffer = hold(out), sizes = out->sizes] {
                     store_found(buffer, *sizes, self.masked_select(mask));
                 })

// The places of what is not zero: one row for each.
STANDIN_OPERATOR(aclnnNonzero, (AclTensor self, AclTensor out),
                 [self = hold(self), buffer = hold(out), sizes = out->sizes] {
                     store_found(buffer, *sizes, self.nonzero());
                 })

// The same, transposed: one row for each dimension.
STANDIN_OPERATOR(aclnnNonzeroV2, (AclTensor self, AclTensor out),
                 [self = hold(self), buffer = hold(out), sizes = out->sizes] {
                     store_found(buffer, *sizes, self.nonzero().t());
                 })

}  // namespace standin
