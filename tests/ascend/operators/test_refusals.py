"""What the stand-in for CANN's operators does not compute, it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators import byte_caches, mlapo
from tests.support.ascend.operators.block_sparse import attend_to_blocks, rate_blocks, update_rows
from tests.support.ascend.operators.blocks import get_slots
from tests.support.ascend.operators.cases import CASES, DECODE, TND
from tests.support.ascend.operators.checks import (
    ANY_FORMAT,
    BEST,
    CAUSAL,
    COUNTS,
    HALF,
    SIGMOID,
    Tensors,
    make_generator,
    npu,
    put,
)
from tests.support.ascend.operators.experts import RoutingCase, choose
from tests.support.ascend.operators.sparse import SEQUENCES, attend_to_chosen, choose_keys, prepare

pytestmark = ANY_FORMAT

REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "packed, another layout": lambda x: attend_with(x, input_layout="BSND"),
    "packed, a window": lambda x: attend_with(x, sparse_mode=4),
    "packed, a mask": lambda x: attend_with(x, atten_mask=x),
    "packed, quantized": lambda x: attend_with(x, key_antiquant_scale=x),
    "shared keys, another layout": lambda x: attend_with(x, 2, input_layout="BSND"),
    "shared keys, a window": lambda x: attend_with(x, 2, sparse_mode=4),
    "shared keys, a mask": lambda x: attend_with(x, 2, atten_mask=x),
    "shared keys, quantized": lambda x: attend_with(x, 2, key_antiquant_scale=x),
    "shared keys, rotary parts": lambda x: attend_with(x, 2, query_rope=x, key_rope=x),
    "decodes, another layout": lambda x: decode_with(input_layout="BSND_NBSD"),
    "decodes, causal": lambda x: decode_with(sparse_mode=CAUSAL, atten_mask=x),
    "decodes, quantized": lambda x: decode_with(dequant_scale_key=x, key_quant_mode=3),
    "decodes, sums": lambda x: decode_with(return_softmax_lse=True),
    "update, sums": lambda x: npu().npu_attention_update([x], [x], 1),
    "norm and cache, another mode": lambda x: norm_with(x, cache_mode="PA_NZ"),
    "norm and cache, no mode": lambda x: norm_with(x),
    "norm and cache, quantized": lambda x: norm_with(x, cache_mode="PA", c_kv_scale=x),
    "scatter, another mode": lambda x: npu().npu_scatter_pa_kv_cache(x, x, x, x, x),
    "rotary, another mode": lambda x: npu().npu_rotary_mul(x[None], x[None], x[None], rotary_mode="interleave"),
    "split, biases": lambda x: split_with(x, q_bias=x, k_bias=x),
    "states, not of bfloat16": lambda x: prefill_with(x, initial_state=x.float()),
    "batches, quantized": lambda x: npu().npu_transpose_batchmatmul(x, x, scale=x),
    "batches, split": lambda x: npu().npu_transpose_batchmatmul(x, x, batch_split_factor=2),
    "choice, another norm": lambda x: choose(x[0].cpu(), RoutingCase(1, 16, 1, 1, BEST, 2, 0), 1.0, None),
    "choice, other groups": lambda x: choose(x[0].cpu(), RoutingCase(1, 16, 1, 1, 2, SIGMOID, 0), 1.0, None),
    "routing, quantized by one scale": lambda x: route_with(x, quant_mode=0, scale=x[0, 0]),
    "routing, smoothed": lambda x: route_with(x, quant_mode=1, scale=x[0, 0]),
    "routing, of another type": lambda x: route_with(x, x_dtype=torch.float8_e4m3fn),
    "routing, dropped": lambda x: route_with(x, drop_pad_mode=1, expert_capacity=2),
    "routing, less than all": lambda x: route_with(x, active_num=3),
    "routing, counts by key": lambda x: route_with(x, expert_tokens_num_type=2),
    "groups, biased": lambda x: multiply_with(x, bias=[x[0]]),
    "groups, quantized": lambda x: multiply_with(x, scale=[x[0]]),
    "groups, of columns": lambda x: multiply_with(x, group_type=2),
    "groups, counts by key": lambda x: multiply_with(x, group_list_type=2),
    "quantization, smoothed": lambda x: npu().npu_dynamic_quant(x, smooth_scales=x[0, 0]),
    "quantization, to four bits": lambda x: npu().npu_dynamic_quant(x, dst_type=torch.quint4x2),
    "quantization, of rows": lambda x: npu().npu_quantize(x, x[0, 0], None, torch.qint8, 0, False),
    "quantization, by division": lambda x: npu().npu_quantize(x, x[0, 0], None, torch.qint8, -1, True),
    "product of floats": lambda x: npu().npu_quant_matmul(x[0], x[0], x[0]),
    "product, shifted": lambda x: multiply_integers_with(x, offset=x[0, 0].float()),
    "product, to eight bits": lambda x: multiply_integers_with(x, output_dtype=torch.int8),
    "activation, biased": lambda x: activate_with(x, bias=x[0]),
    "activation of listed experts, biased": lambda x: activate_each_with(x, bias=x[0]),
    "activation of bytes": lambda x: activate_int4_with(x, [x.to(torch.int8)]),
    "activation of four bits, not corrected": lambda x: activate_int4_with(x, weight_assist_matrix=None),
    "activation of a product, with a bias": lambda x: activate_product_with(x, bias=x[0, 0]),
    "activation of a product, by one scale": lambda x: activate_product_with(x, quant_mode=0),
    "choice of keys, another layout": lambda x: choose_with(x, layout_query="BSND"),
    "choice of keys, of all": lambda x: choose_with(x, sparse_mode=0),
    "choice of keys, in a window": lambda x: choose_with(x, pre_tokens=4),
    "chosen keys, another layout": lambda x: attend_sparsely_with(x, layout_kv="BSND"),
    "chosen keys, in blocks": lambda x: attend_sparsely_with(x, sparse_block_size=16),
    "chosen keys, another mask": lambda x: attend_sparsely_with(x, sparse_mode=4),
    "chosen keys, in a window": lambda x: attend_sparsely_with(x, pre_tokens=4),
    "chosen keys, one rotary part": lambda x: attend_sparsely_with(x, query_rope=None),
    "rows, at places of two numbers": lambda x: npu().npu_scatter_nd_update_(x, x[0, :2, :2].int(), x[0, :2]),
    "blocks, rated in another layout": lambda x: rate_with(layout_key="TND"),
    "blocks, rated by bytes": lambda x: rate_with(scale=x),
    "blocks, without their mask": lambda x: rate_with(sparse_mode=0),
    "chosen blocks, of another size": lambda x: attend_to_blocks_with(block_size=8),
    "chosen blocks, quantized": lambda x: attend_to_blocks_with(q_dequant_scale=x),
    "rows, at places of three numbers": lambda x: update_rows(x, x[0, :3, :3].int(), x[0, :3]),
    "split by rows, biases": lambda x: torch.ops.vllm.qkv_rmsnorm_rope(x, x, x, x, x, 8, 4, 4, 1e-6, x, x),
    "clipped, in turns": lambda x: npu().npu_clipped_swiglu(x),
    "clipped, by group": lambda x: npu().npu_clipped_swiglu(x, interleaved=False, group_index=x[0, 0].long()),
    "queries and keys, not quantized": lambda x: prepare_with(weight_quant_mode=0),
    "queries and keys, of another cache": lambda x: prepare_with(cache_mode="PA_NZ"),
    "queries and keys, quantized caches": lambda x: prepare_with(kv_cache_quant_mode=1),
    "queries and keys, bytes in caches of their own": lambda x: prepare_with(kv_cache_quant_mode=3),
    "tiles, of several rows": lambda x: npu().npu_dynamic_block_quant(x, row_block_size=2, col_block_size=16),
    "tiles, to another type": lambda x: npu().npu_dynamic_block_quant(x, dst_type=torch.quint4x2, col_block_size=16),
    "cache in bytes, by one scale": lambda x: attend_to_bytes_with(key_quant_mode=1),
    "cache in bytes, another mask": lambda x: attend_to_bytes_with(sparse_mode=4),
    "keys in bytes, another layout": lambda x: choose_bytes_with(layout_query="BSND"),
    "keys in bytes, of all": lambda x: choose_bytes_with(sparse_mode=0),
    "runs in no blocks": lambda x: byte_caches.find_runs(*put(*[torch.zeros(2).int()] * 4), block_size=0),
    "static bytes, of another cache": lambda x: prepare_by_one_scale_with(cache_mode="krope_ctkv_nz"),
    "static bytes, not by one scale": lambda x: prepare_by_one_scale_with(quant_mode="per_token_quant_symm"),
    "static bytes, no latent": lambda x: prepare_by_one_scale_with(enable_inner_out=False),
    "permute, less than all": lambda x: npu().npu_moe_token_permute(x[0], x[0].int(), num_out_tokens=3),
    "permute, padded": lambda x: npu().npu_moe_token_permute(x[0], x[0].int(), padded_mode=True),
    "unpermute, padded": lambda x: npu().npu_moe_token_unpermute(x[0], x[0, 0].int(), padded_mode=True),
    "quotients, not rounded": lambda x: torch.ops.aten.div.Tensor_mode(x, x, rounding_mode=None),
    "places, on a side": lambda x: torch.searchsorted(x[0, 0], x, side="left"),
    "distinct numbers, counted": lambda x: x.unique(return_counts=True),
    "repeats of rows": lambda x: x.repeat_interleave(2, 0),
    "format, of another type": lambda x: npu().npu_format_cast(x, 29, customize_dtype=1),
    "slots, of several ranks": lambda x: get_slots([(0, 1)], [0], x[0].int().cpu(), x, 0, 4, TOTAL_CP_WORLD_SIZE=2),
}


def attend_with(x: torch.Tensor, heads_of_keys: int = 4, **changes: Any) -> None:
    key, options = x[:, :heads_of_keys], {**TND, "num_heads": 4, "num_key_value_heads": heads_of_keys, **changes}
    npu().npu_fused_infer_attention_score(x, key, key, **options)


def choose_with(x: torch.Tensor, **changes: Any) -> None:
    choose_keys(x, x[:, :, None], x[:, :, 0], *(part.npu() for part in SEQUENCES), **changes)


def attend_sparsely_with(x: torch.Tensor, **changes: Any) -> None:
    caches, chosen = [x[:, :, None]] * 2, x[:, :1].int()
    attend_to_chosen(x, x, *caches, chosen, *(part.npu() for part in SEQUENCES), **changes)


def rate_with(**changes: Any) -> None:
    rate_blocks(*make_tensors_of("_C_ascend::npu_msa_index_score"), **changes)


def attend_to_blocks_with(**changes: Any) -> None:
    attend_to_blocks(*make_tensors_of("_C_ascend::npu_sparse_attention_score"), **changes)


def prepare_with(**changes: Any) -> None:
    prepare(*make_tensors_of("npu::npu_mla_prolog_v3"), **changes)


def prepare_by_one_scale_with(**changes: Any) -> None:
    mlapo.prepare(*make_tensors_of("_C_ascend::mla_preprocess"), **changes)


def attend_to_bytes_with(**changes: Any) -> None:
    byte_caches.attend_to_bytes(*put(*byte_caches.make_attention(make_generator(0))), **changes)


def choose_bytes_with(**changes: Any) -> None:
    byte_caches.choose_keys(*put(*byte_caches.make_choice(make_generator(0))), **changes)


def make_tensors_of(operator: str) -> Tensors:
    (case,) = (case for case in CASES if case.operator == operator)
    return put(*case.make(make_generator(0)))


def split_with(x: torch.Tensor, **changes: Any) -> None:
    torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(x[0], x, x, x, 1, 1, 8, 1e-6, [2, 1, 1], False, **changes)


def prefill_with(x: torch.Tensor, **changes: Any) -> None:
    options = {"beta": x[..., 0], "initial_state": x, "actual_seq_lengths": x[0, 0].int(), "scale": 1.0, **changes}
    npu().npu_chunk_gated_delta_rule(x, x, x, g=x[..., 0].float(), **options)


def decode_with(**changes: Any) -> None:
    DECODE.call(npu().npu_fused_infer_attention_score_v2, **changes)


def norm_with(x: torch.Tensor, **changes: Any) -> None:
    x = x[None]
    npu().npu_kv_rmsnorm_rope_cache(x, x[0, 0, 0, :8], x, x, x[0, 0, 0].long(), x, x, **changes)


def route_with(x: torch.Tensor, **changes: Any) -> None:
    options = {"expert_num": 4, "expert_tokens_num_type": COUNTS, "expert_tokens_num_flag": True, **changes}
    npu().npu_moe_init_routing_v2(x[0], x[0].int(), **options)


def multiply_with(x: torch.Tensor, **changes: Any) -> None:
    options = {"split_item": 2, "group_type": 0, "group_list_type": COUNTS, **changes}
    npu().npu_grouped_matmul([x[0]], [x], group_list=x[0, 0].long(), **options)


def multiply_integers_with(x: torch.Tensor, **changes: Any) -> None:
    integers = x[0].to(torch.int8)
    npu().npu_quant_matmul(integers, integers.T, x[0, 0, :4].float(), **changes)


def activate_with(x: torch.Tensor, **changes: Any) -> None:
    integers, scales = x.to(torch.int8), x[:, 0].float()
    groups = x[:, 0, 0].long()
    torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz(integers[0], integers, scales, scales, groups, **changes)


def activate_each_with(x: torch.Tensor, **changes: Any) -> None:
    integers, scales = list(x.to(torch.int8)), list(x[:, 0].float())
    operator = torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz_tensor_list
    operator(integers[0], integers, scales, scales[0], x[:, 0, 0].long(), **changes)


def activate_int4_with(x: torch.Tensor, weight: list[torch.Tensor] | None = None, **changes: Any) -> None:
    groups, scales = x[:, 0, 0].long(), [x[:, 0].long()]
    options = {"weight_assist_matrix": [x[:, 0].float()], **changes}
    weights = weight or [x.int()]
    operator = torch.ops._C_ascend.grouped_matmul_swiglu_quant_v2
    operator(x[0].to(torch.int8), weights, scales, x[0, :, 0].float(), groups, **options)


def activate_product_with(x: torch.Tensor, **changes: Any) -> None:
    options = {"weight_scale": x[0, 0].float(), "activation_scale": x[0, :, 0].float(), "quant_mode": 1, **changes}
    torch.ops._C_ascend.npu_dequant_swiglu_quant(x[0].int(), **options)


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_refused(standin: StandIn, call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(12, 4, 16, dtype=HALF).npu()
    with pytest.raises(NotImplementedError):
        call(x)
