// Random numbers. torch_npu keeps the generator's state itself and passes a seed and how far the generator has come.
#include "operator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <c10/util/hash.h>

namespace standin {
namespace {

// Made anew in each run, so that a kernel gives the same numbers whenever it runs. They are not those of a device.
at::Generator generator(uint64_t seed, uint64_t offset) {
    return at::detail::createCPUGenerator(c10::hash_combine(seed, offset));
}

}  // namespace

STANDIN_OPERATOR(aclnnInplaceUniform, (AclTensor self, double from, double to, uint64_t seed, uint64_t offset),
                 [self = hold(self), from, to, seed, offset] { self.uniform_(from, to, generator(seed, offset)); })

STANDIN_OPERATOR(aclnnInplaceNormal, (AclTensor self, float mean, float deviation, int64_t seed, int64_t offset),
                 [self = hold(self), mean, deviation, seed, offset] {
                     self.normal_(mean, deviation, generator(seed, offset));
                 })

STANDIN_OPERATOR(aclnnNormalFloatFloat, (float mean, float deviation, int64_t seed, int64_t offset, AclTensor out),
                 [mean, deviation, seed, offset, out = hold(out)] {
                     out.normal_(mean, deviation, generator(seed, offset));
                 })

STANDIN_OPERATOR(aclnnInplaceRandom, (AclTensor self, int64_t from, int64_t to, int64_t seed, int64_t offset),
                 [self = hold(self), from, to, seed, offset] { self.random_(from, to, generator(seed, offset)); })

STANDIN_OPERATOR(aclnnInplaceBernoulli, (AclTensor self, AclScalar probability, int64_t seed, int64_t offset),
                 [self = hold(self), probability = hold(probability), seed, offset] {
                     self.bernoulli_(probability.toDouble(), generator(seed, offset));
                 })

STANDIN_OPERATOR(aclnnRandperm, (int64_t count, int64_t seed, int64_t offset, AclTensor out),
                 [count, seed, offset, out = hold(out)] {
                     store(out, at::randperm(count, generator(seed, offset), out.options()));
                 })

}  // namespace standin
