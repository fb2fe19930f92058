// FusedInferAttentionScore in three versions, which differ only in arguments that the stand-in refuses: quantisation,
// rotary parts, prefixes, sinks. torch_npu chooses by the chip: V5 on Ascend950, V3 and V4 on older ones.
#include <initializer_list>

#include "attention.h"
#include "operator.h"

#define INPUTS                                                                                                     \
    AclTensor query, AclTensorList keys, AclTensorList values, AclTensor pse_shift, AclTensor mask,                \
        AclIntArray query_lengths, AclIntArray key_lengths, AclTensor dequant_scale1, AclTensor quant_scale1,      \
        AclTensor dequant_scale2, AclTensor quant_scale2, AclTensor quant_offset2, AclTensor antiquant_scale,      \
        AclTensor antiquant_offset, AclTensor block_table, AclTensor query_padding, AclTensor key_padding,         \
        AclTensor key_antiquant_scale, AclTensor key_antiquant_offset, AclTensor value_antiquant_scale,            \
        AclTensor value_antiquant_offset, AclTensor key_prefix, AclTensor value_prefix, AclIntArray prefix_length, \
        AclTensor query_rope, AclTensor key_rope, AclTensor key_rope_scale

// What is not named chooses between ways to the same result, or is about quantisation.
#define SETTINGS                                                                                                 \
    int64_t heads, double scale, int64_t pre_tokens, int64_t next_tokens, const char *layout, int64_t key_heads, \
        int64_t sparse_mode, int64_t /*inner_precise*/, int64_t block_size, int64_t /*antiquant_mode*/,          \
        bool wants_log_sum_of_exp, int64_t /*key_mode*/, int64_t /*value_mode*/

#define OUTPUTS AclTensor out, AclTensor log_sum_of_exp

#define REFUSED                                                                                                       \
    pse_shift, dequant_scale1, quant_scale1, dequant_scale2, quant_scale2, quant_offset2, antiquant_scale,            \
        antiquant_offset, query_padding, key_padding, key_antiquant_scale, key_antiquant_offset,                      \
        value_antiquant_scale, value_antiquant_offset, key_prefix, value_prefix, prefix_length, query_rope, key_rope, \
        key_rope_scale

#define ATTENTION                                                                                            \
    Attention {                                                                                              \
        hold(query), hold_only(keys), hold_only(values), hold(mask), hold(block_table), hold(query_lengths), \
            hold(key_lengths), heads, key_heads, block_size, scale, hold(layout), sparse_mode, pre_tokens,   \
            next_tokens, hold(out), hold(log_sum_of_exp), wants_log_sum_of_exp                               \
    }

namespace standin {
namespace {

at::Tensor hold_only(AclTensorList list) {
    const std::vector<at::Tensor> tensors = hold(list);
    TORCH_CHECK(tensors.size() == 1, "the stand-in wants the keys of all sequences in one tensor");
    return tensors[0];
}

Attention checked(const Attention& attention, std::initializer_list<const void*> refused) {
    for (const void* argument : refused) {
        TORCH_CHECK(argument == nullptr,
                    "no quantisation, rotary part, prefix, sink, padding or pse_shift is provided");
    }
    check(attention);
    return attention;
}

}  // namespace

STANDIN_OPERATOR(aclnnFusedInferAttentionScoreV3, (INPUTS, SETTINGS, OUTPUTS),
                 [attention = checked(ATTENTION, {REFUSED})] { attend(attention); })

STANDIN_OPERATOR(aclnnFusedInferAttentionScoreV4,
                 (INPUTS, AclTensor query_scale, AclTensor sink, SETTINGS, int64_t /*query_quant_mode*/, OUTPUTS),
                 [attention = checked(ATTENTION, {REFUSED, query_scale, sink})] { attend(attention); })

STANDIN_OPERATOR(aclnnFusedInferAttentionScoreV5,
                 (INPUTS, AclTensor query_scale, AclTensor sink, AclIntArray query_start, AclIntArray key_start,
                  SETTINGS, int64_t /*query_quant_mode*/, int64_t /*pse_type*/, OUTPUTS),
                 [attention = checked(ATTENTION, {REFUSED, query_scale, sink, query_start, key_start})] {
                     attend(attention);
                 })

}  // namespace standin
