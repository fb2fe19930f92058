// The stand-in's attention, step by step.
#include "attention.h"

#include <algorithm>
#include <limits>

#include <ATen/ops/ones.h>

namespace standin {
namespace {

// Values of sparse_mode.
constexpr int64_t kMaskedInBand = 0;
constexpr int64_t kMasked = 1;
constexpr int64_t kCausal = 2;            // query i sees the keys up to i
constexpr int64_t kCausalFromTheEnd = 3;  // the last query sees all keys, the one before it one less

constexpr int64_t kSideOfCausalMask = 2048;                          // CANN wants this one for all lengths
constexpr int64_t kAllTokens = std::numeric_limits<int32_t>::max();  // torch_npu's default: the band is all

bool is_causal(const Attention& attention) {
    return attention.sparse_mode == kCausal || attention.sparse_mode == kCausalFromTheEnd;
}

bool is_packed(const Attention& attention) { return attention.layout == "TND"; }

int64_t count_sequences(const Attention& attention) {
    return is_packed(attention) ? static_cast<int64_t>(attention.query_lengths.size()) : attention.query.size(0);
}

// A sequence of a padded batch, as it is stored, as [heads, positions, size of a head].
at::Tensor heads_first(const at::Tensor& sequence, const std::string& layout, int64_t heads) {
    if (layout == "BNSD") {
        return sequence;
    }
    return (layout == "BSH" ? sequence.unflatten(1, {heads, -1}) : sequence).transpose(0, 1);
}

// One sequence of a tensor in the attention's layout, as [heads, positions, size of a head].
at::Tensor take_sequence(const at::Tensor& tensor, const Attention& attention, const std::vector<int64_t>& lengths,
                         int64_t heads, int64_t index) {
    if (is_packed(attention)) {
        return tensor.slice(0, index > 0 ? lengths[index - 1] : 0, lengths[index]).transpose(0, 1);
    }
    const at::Tensor padded = heads_first(tensor[index], attention.layout, heads);
    return lengths.empty() ? padded : padded.slice(1, 0, lengths[lengths.size() == 1 ? 0 : index]);
}

// The keys or values of one sequence, out of the blocks that its row of the table names, as [heads, positions, size].
at::Tensor take_blocks(const at::Tensor& cache, const Attention& attention, int64_t heads, int64_t index) {
    const int64_t length = attention.key_lengths[attention.key_lengths.size() == 1 ? 0 : index];
    const int64_t count = (length + attention.block_size - 1) / attention.block_size;
    const at::Tensor blocks = cache.index_select(0, attention.block_table[index].slice(0, 0, count));
    const at::Tensor split = cache.dim() == 3 ? blocks.unflatten(2, {heads, -1}) : blocks.transpose(1, 2);
    return split.flatten(0, 1).slice(0, 0, length).transpose(0, 1);
}

at::Tensor take_keys(const at::Tensor& tensor, const Attention& attention, int64_t index) {
    const int64_t heads = attention.key_heads == 0 ? attention.heads : attention.key_heads;
    const at::Tensor found = attention.block_table.defined()
                                 ? take_blocks(tensor, attention, heads, index)
                                 : take_sequence(tensor, attention, attention.key_lengths, heads, index);
    return found.to(at::kFloat).repeat_interleave(attention.heads / heads, 0);
}

// Which keys are hidden from which queries, or undefined: [queries, keys].
at::Tensor find_hidden(const Attention& attention, int64_t index, int64_t queries, int64_t keys) {
    if (is_causal(attention)) {
        const int64_t first_hidden = attention.sparse_mode == kCausal ? 1 : keys - queries + 1;
        return at::ones({queries, keys}, at::kBool).triu(first_hidden);
    }
    if (!attention.mask.defined()) {
        return {};
    }
    at::Tensor mask = attention.mask.to(at::kBool);  // [Q, K], with one query [B, K], [1, Q, K], or [B or 1, 1, Q, K]
    if (mask.dim() == 2 && queries == 1 && mask.size(0) == count_sequences(attention)) {
        return mask[index].slice(0, 0, keys).unsqueeze(0);
    }
    while (mask.dim() > 2) {
        mask = mask[mask.size(0) > 1 ? index : 0];
    }
    return mask.slice(0, 0, queries).slice(1, 0, keys);
}

void attend_sequence(const Attention& attention, int64_t index) {
    const at::Tensor query = take_sequence(attention.query, attention, attention.query_lengths, attention.heads, index);
    const at::Tensor key = take_keys(attention.key, attention, index);
    const at::Tensor value = take_keys(attention.value, attention, index);
    at::Tensor scores = query.to(at::kFloat).matmul(key.transpose(1, 2)).mul(attention.scale);
    const at::Tensor hidden = find_hidden(attention, index, query.size(1), key.size(1));
    if (hidden.defined()) {
        scores = scores.masked_fill(hidden, -std::numeric_limits<float>::infinity());
    }
    at::Tensor weights = scores.softmax(-1);
    if (hidden.defined()) {
        weights = weights.masked_fill(hidden.all(-1, /*keepdim=*/true), 0);  // a query that sees nothing gets nothing
    }
    take_sequence(attention.out, attention, attention.query_lengths, attention.heads, index)
        .copy_(weights.matmul(value));
    if (attention.wants_log_sum_of_exp) {
        const at::Tensor& sums = attention.log_sum_of_exp;
        const at::Tensor room = is_packed(attention)
                                    ? take_sequence(sums, attention, attention.query_lengths, attention.heads, index)
                                    : sums[index].slice(1, 0, query.size(1));
        room.copy_(scores.logsumexp(-1, /*keepdim=*/true));
    }
}

}  // namespace

void check(const Attention& attention) {
    const std::string& layout = attention.layout;
    TORCH_CHECK(layout == "TND" || layout == "BSH" || layout == "BSND" || layout == "BNSD",
                "the stand-in has no input_layout ", layout);
    TORCH_CHECK(attention.sparse_mode >= 0 && attention.sparse_mode <= kCausalFromTheEnd,
                "the stand-in has no sparse_mode ", attention.sparse_mode);
    TORCH_CHECK(attention.sparse_mode != kMasked || attention.mask.defined(), "sparse_mode 1 wants a mask");
    const bool has_band = std::min(attention.pre_tokens, attention.next_tokens) < kAllTokens;
    TORCH_CHECK(attention.sparse_mode != kMaskedInBand || !attention.mask.defined() || !has_band,
                "the stand-in narrows no mask by pre_tokens and next_tokens");
    if (is_causal(attention)) {
        const at::Tensor& mask = attention.mask;
        TORCH_CHECK(mask.defined() && mask.size(-1) == kSideOfCausalMask && mask.size(-2) == kSideOfCausalMask,
                    "sparse_mode ", attention.sparse_mode, " wants a mask of 2048 x 2048, whatever the lengths");
    }
    TORCH_CHECK(!is_packed(attention) || attention.query_lengths.size() == attention.key_lengths.size(),
                "TND wants as many lengths of keys as of queries");
    if (attention.block_table.defined()) {
        TORCH_CHECK(!attention.key_lengths.empty() && attention.block_size > 0,
                    "a block table wants the lengths of the keys and the size of a block");
    }
}

void attend(const Attention& attention) {
    attention.out.zero_();  // what is padding in the query
    attention.log_sum_of_exp.zero_();
    for (int64_t index = 0; index < count_sequences(attention); ++index) {
        attend_sequence(attention, index);
    }
}

}  // namespace standin
