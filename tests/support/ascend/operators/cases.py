"""One call of each operator that queues a kernel, with tensors of the same shapes each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.support.ascend.operators import attention_residuals, byte_caches, deepseek_v4, deepseek_v41, mlapo
from tests.support.ascend.operators.angles import make_angles
from tests.support.ascend.operators.block_sparse import BLOCK_SEQUENCES, attend_to_blocks, rate_blocks, update_rows
from tests.support.ascend.operators.checks import ABSENT, COUNTS, HALF, SIGMOID, SUM_OF_TWO, Tensors, draw, npu
from tests.support.ascend.operators.decodes import decode, make_decode
from tests.support.ascend.operators.sparse import SEQUENCES, attend_to_chosen, choose_keys, prepare


class Case(NamedTuple):
    """A call of an operator: what makes its tensors, of the same shapes each time, and what it gives, or changes."""

    operator: str
    make: Callable[[torch.Generator], Tensors]
    call: Callable[..., Any]
    is_described: bool = True  # torch, torch_npu or the stand-in knows the shapes without values

    def run(self, tensors: Tensors) -> Tensors:
        """Call it."""
        found = self.call(*tensors)
        return [found] if isinstance(found, torch.Tensor) else list(found)


def make_numbers(generator: torch.Generator, below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=generator, dtype=torch.int32)


def make_int8(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def draw_scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) + 0.1


def draw_groups(generator: torch.Generator) -> list[torch.Tensor]:
    """Draw rows of three experts in int8, their matrices, the scales of both, and where each expert's rows end."""
    rows, matrices = make_int8(generator, 9, 8), make_int8(generator, 3, 8, 6)
    return [rows, matrices, draw_scales(generator, 3, 6), draw_scales(generator, 9), torch.tensor([2, 5, 9])]


def make_distinct(generator: torch.Generator, below: int, count: int) -> torch.Tensor:
    return torch.randperm(below, generator=generator)[:count]


def decode_into(*tensors: torch.Tensor, **changes: Any) -> torch.Tensor:
    *inputs, out = tensors
    options = {**DECODE.list_settings(), **changes}
    decode(npu().npu_fused_infer_attention_score_v2.out, inputs, **options, out=[out, out.new_empty(1)])
    return out


def gather(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    npu().npu_gather_pa_kv_cache(*tensors)
    return tensors[-2:]


def load(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    *caches, key, value = tensors
    torch.ops.atb.npu_paged_cache_load(*caches, key=key, value=value)
    return key, value


def reshape_and_cache(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    torch.ops.atb._npu_reshape_and_cache(*tensors)
    return tensors[2:4]


def rotate_in_place(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    positions, query, key, cache = tensors
    rotated = query.clone(), key.clone()
    torch.ops.atb._npu_rotary_embedding(positions, *rotated, 8, cache)
    return rotated


def scatter(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    npu().npu_scatter_pa_kv_cache(*tensors, cache_mode="Norm")
    return tensors[2:4]


DECODE = make_decode(0, [7, 3])
TND = {"input_layout": "TND", "actual_seq_lengths": [5, 12], "actual_seq_lengths_kv": [5, 12], "softmax_lse_flag": True}
CASES = [
    Case(
        "npu::npu_fused_infer_attention_score",
        lambda g: [draw(g, 12, 4, 16) for _ in range(3)],
        lambda *qkv: npu().npu_fused_infer_attention_score(*qkv, num_heads=4, num_key_value_heads=4, **TND),
    ),
    Case(
        "npu::npu_fused_infer_attention_score_v2",
        lambda g: [draw(g, *tensor.shape) for tensor in DECODE.list_tensors()[:4]] + [DECODE.table],
        lambda *tensors: decode(npu().npu_fused_infer_attention_score_v2, tensors, **DECODE.list_settings())[0],
    ),
    Case(
        "npu::npu_fused_infer_attention_score_v2.out",
        lambda g: [
            *(draw(g, *tensor.shape) for tensor in DECODE.list_tensors()[:4]),
            DECODE.table,
            torch.full((4, 2, 1, 16), ABSENT, dtype=HALF),
        ],
        decode_into,
        is_described=False,
    ),
    Case(
        "npu::npu_attention_update",
        lambda g: [draw(g, 6), draw(g, 6), draw(g, 6, 8), draw(g, 6, 8)],
        lambda *tensors: npu().npu_attention_update(list(tensors[:2]), list(tensors[2:]), 0)[0],
    ),
    Case(
        "npu::npu_gather_pa_kv_cache",
        lambda g: [
            draw(g, 6, 4, 1, 8),
            draw(g, 6, 4, 1, 4),
            make_numbers(g, 6, 2, 3),
            torch.tensor([[3, 9], [9, 3]][int(make_numbers(g, 2, 1))], dtype=torch.int32),
            torch.full((12, 1, 8), ABSENT, dtype=HALF),
            torch.full((12, 1, 4), ABSENT, dtype=HALF),
        ],
        gather,
        is_described=False,
    ),
    Case(
        "atb::npu_paged_cache_load",
        lambda g: [
            draw(g, 6, 4, 1, 8),
            draw(g, 6, 4, 1, 4),
            make_numbers(g, 6, 2, 3),
            torch.tensor([[3, 9], [9, 3]][int(make_numbers(g, 2, 1))], dtype=torch.int32),
            torch.full((12, 1, 8), ABSENT, dtype=HALF),
            torch.full((12, 1, 4), ABSENT, dtype=HALF),
        ],
        load,
        is_described=False,
    ),
    Case(
        "atb::_npu_reshape_and_cache",
        lambda g: [
            draw(g, 3, 2, 8),
            draw(g, 3, 2, 8),
            torch.full((2, 4, 2, 8), ABSENT, dtype=HALF),
            torch.full((2, 4, 2, 8), ABSENT, dtype=HALF),
            make_distinct(g, 8, 3).int(),
        ],
        reshape_and_cache,
        is_described=False,
    ),
    Case(
        "atb::_npu_rotary_embedding",
        lambda g: [make_distinct(g, 9, 3), draw(g, 3, 4 * 8), draw(g, 3, 2 * 8), draw(g, 9, 8)],
        rotate_in_place,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_moe_init_routing_custom",
        lambda g: [draw(g, 5, 8), make_numbers(g, 6, 5, 2)],
        lambda x, ids: torch.ops._C_ascend.npu_moe_init_routing_custom(
            x,
            ids,
            expert_num=6,
            active_num=10,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[2, 5],
        )[:3],
        is_described=False,
    ),
    Case(
        "npu::npu_kv_rmsnorm_rope_cache",
        lambda g: [
            draw(g, 3, 1, 1, 12),
            draw(g, 8),
            *make_angles(g, 3, 4, HALF),
            make_distinct(g, 8, 3),
            torch.full((2, 4, 1, 4), ABSENT, dtype=HALF),
            torch.full((2, 4, 1, 8), ABSENT, dtype=HALF),
        ],
        lambda *tensors: npu().npu_kv_rmsnorm_rope_cache(*tensors, cache_mode="PA", is_output_kv=True),
    ),
    Case(
        "npu::npu_scatter_pa_kv_cache",
        lambda g: [
            draw(g, 3, 2, 8),
            draw(g, 3, 2, 8),
            torch.full((2, 4, 2, 8), ABSENT, dtype=HALF),
            torch.full((2, 4, 2, 8), ABSENT, dtype=HALF),
            make_distinct(g, 8, 3).int(),
        ],
        scatter,
        is_described=False,
    ),
    Case(
        "npu::npu_lightning_indexer",
        lambda g: [draw(g, 5, 2, 8), draw(g, 4, 4, 1, 8), draw(g, 5, 2), *SEQUENCES],
        lambda query, keys, weights, *sequences: choose_keys(query, keys, weights, *sequences)[0],
    ),
    Case(
        "_C_ascend::npu_lightning_indexer",
        lambda g: [draw(g, 5, 2, 8), draw(g, 4, 4, 1, 8), draw(g, 5, 2), *SEQUENCES],
        lambda *tensors: choose_keys(*tensors, earlier=True)[0],
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_sparse_flash_attention",
        lambda g: [
            *(draw(g, 5, 2, size) for size in (16, 8)),
            *(draw(g, 4, 4, 1, size) for size in (16, 8)),
            make_numbers(g, 9, 5, 1, 4),
            *SEQUENCES,
        ],
        lambda *tensors: attend_to_chosen(*tensors)[0],
        is_described=False,
    ),
    Case(
        "npu::npu_dynamic_block_quant",
        lambda g: [draw(g, 5, 1, 256)],
        lambda x: npu().npu_dynamic_block_quant(x, dst_type=1, row_block_size=1, col_block_size=128),
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_kv_quant_sparse_flash_attention_vllm",
        byte_caches.make_attention,
        lambda *tensors: byte_caches.attend_to_bytes(*tensors)[0],
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_lightning_indexer_quant",
        byte_caches.make_choice,
        byte_caches.choose_keys,
        is_described=False,
    ),
    Case(
        "_C_ascend::store_kv_block_metadata",
        lambda g: [make_distinct(g, 12, 4).int(), *(torch.zeros(4, dtype=torch.int32) for _ in range(3))],
        byte_caches.find_runs,
        is_described=False,
    ),
    Case(
        "_C_ascend::store_kv_block",
        lambda g: [
            draw(g, 4, 1, 8),
            torch.full((2, 4, 1, 8), ABSENT, dtype=HALF),
            *torch.tensor([[2, 0, 1], [1, 2, 5], [0, 0, 0], [0, 0, 0]], dtype=torch.int32).T.contiguous(),
        ],
        byte_caches.store_runs,
        is_described=False,
    ),
    Case(
        "npu::npu_scatter_nd_update_",
        lambda g: [torch.full((8, 6), ABSENT, dtype=HALF), make_distinct(g, 8, 3).view(-1, 1), draw(g, 3, 6)],
        lambda *tensors: npu().npu_scatter_nd_update_(*tensors),
        is_described=False,
    ),
    Case(
        "npu::npu_mla_prolog_v3",
        lambda g: [
            *(make_int8(g, *shape) for shape in ((3, 8), (8, 6), (6, 2 * 8), (8, 8))),
            *(draw(g, *shape) for shape in ((2, 4, 4), (6,), (4,))),
            *(table[:, 0, 0] for table in make_angles(g, 3, 4, HALF)),
            *(draw_scales(g, *shape) for shape in ((3, 1), (1, 6), (1, 16), (1, 8))),
            make_distinct(g, 8, 3),
            *(torch.full((2, 4, 1, 4), ABSENT, dtype=HALF) for _ in range(2)),
        ],
        prepare,
        is_described=False,
    ),
    Case(
        "_C_ascend::mla_preprocess",
        lambda g: [
            *mlapo.make_tensors(g, 3).list_tensors(),
            *make_angles(g, 3, 16, HALF),
            make_distinct(g, 8, 3),
            *(torch.full((2, 4, 1, 16), ABSENT, dtype=HALF) for _ in range(2)),
        ],
        mlapo.prepare,
        is_described=False,
    ),
    Case(
        "npu::npu_interleave_rope",
        lambda g: [draw(g, 3, 2, 1, 8), *make_angles(g, 3, 8, HALF)],
        lambda *tensors: npu().npu_interleave_rope(*tensors),
    ),
    Case(
        "npu::npu_rotary_mul",
        lambda g: [draw(g, 3, 2, 1, 8), *make_angles(g, 3, 8, HALF)],
        lambda *tensors: npu().npu_rotary_mul(*tensors),
    ),
    Case(
        "npu::npu_mrope",
        lambda g: [make_distinct(g, 9, 3), draw(g, 3, 4 * 8), draw(g, 3, 2 * 8), draw(g, 9, 8)],
        lambda *tensors: npu().npu_mrope(*tensors, 8, mrope_section=[0, 0, 0]),
    ),
    Case(
        "vllm::triton_split_qkv_rmsnorm_mrope",
        lambda g: [draw(g, 3, 6 * 8), draw(g, 8), draw(g, 8), draw(g, 3, 3, 8)],
        lambda *tensors: torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(*tensors, 2, 2, 8, 1e-6, [2, 1, 1], False)[:3],
        is_described=False,
    ),
    Case(
        "vllm::qkv_rmsnorm_rope",
        lambda g: [draw(g, 3, 4 * 8), draw(g, 9, 4), make_distinct(g, 9, 3), draw(g, 8), draw(g, 8)],
        lambda *tensors: torch.ops.vllm.qkv_rmsnorm_rope(*tensors, 2 * 8, 8, 8, 1e-6),
        is_described=False,
    ),
    Case(
        "npu::npu_clipped_swiglu",
        lambda g: [draw(g, 5, 8)],
        lambda x: npu().npu_clipped_swiglu(x, interleaved=False),
    ),
    Case(
        "_C_ascend::npu_msa_index_score",
        lambda g: [draw(g, 5, 2, 8), draw(g, 4, 4, 1, 8), *BLOCK_SEQUENCES],
        rate_blocks,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_sparse_attention_score",
        lambda g: [
            draw(g, 5, 4, 8),
            *(draw(g, 4, 4, 2, 8) for _ in range(2)),
            make_numbers(g, 3, 2, 5, 1),
            *BLOCK_SEQUENCES,
        ],
        attend_to_blocks,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_scatter_nd_update_sk",
        lambda g: [torch.full((8, 6), ABSENT, dtype=HALF), make_distinct(g, 8, 3).view(-1, 1), draw(g, 3, 6)],
        update_rows,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_scatter_nd_update_v2",
        lambda g: [torch.full((8, 6), ABSENT, dtype=HALF), make_distinct(g, 8, 3).view(-1, 1), draw(g, 3, 6)],
        deepseek_v4.update_rows,
        is_described=False,
    ),
    Case(
        "_C_ascend::attn_res_fwd",
        lambda g: attention_residuals.make_sums(g, 5, 3),
        attention_residuals.run_case,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_hc_pre_v2",
        lambda g: deepseek_v4.make_streams(g, 5, 8),
        deepseek_v4.mix_streams,
    ),
    Case(
        "_C_ascend::npu_hc_post",
        lambda g: deepseek_v4.make_results(g, 5, 8),
        lambda *tensors: torch.ops._C_ascend.npu_hc_post(*tensors),
    ),
    Case(
        "_C_ascend::npu_rms_norm_cast",
        deepseek_v4.make_norm,
        lambda *tensors: torch.ops._C_ascend.npu_rms_norm_cast(*tensors),
    ),
    Case(
        "_C_ascend::npu_rms_norm_dynamic_quant",
        deepseek_v4.make_norm,
        lambda *tensors: torch.ops._C_ascend.npu_rms_norm_dynamic_quant(*tensors),
        is_described=False,
    ),
    Case(
        "_C_ascend::inplace_partial_rotary_mul",
        deepseek_v4.make_rotation,
        deepseek_v4.rotate_in_place,
        is_described=False,
    ),
    Case(
        "_C_ascend::compressor",
        lambda g: [
            *deepseek_v4.make_compressor(g, 8, 3),
            deepseek_v4.TABLE,
            deepseek_v4.EDGES,
            deepseek_v4.STARTS,
        ],
        deepseek_v4.compress,
        is_described=False,
    ),
    Case(
        "_C_ascend::compressor_metadata",
        lambda g: [
            *(draw(g, 12, 4) for _ in range(2)),
            deepseek_v4.EDGES,
            deepseek_v4.STARTS,
            make_numbers(g, 9, 2, 3),
        ],
        deepseek_v4.find_places,
        is_described=False,
    ),
    Case(
        "_C_ascend::compressor_metadata_out",
        lambda g: [
            *(draw(g, 12, 4) for _ in range(2)),
            deepseek_v4.EDGES,
            deepseek_v4.STARTS,
            make_numbers(g, 9, 2, 3),
            *(torch.full((5, 1, 1, 4), ABSENT, dtype=HALF) for _ in range(2)),
            torch.full((5, 2), int(ABSENT), dtype=torch.int32),
        ],
        deepseek_v4.find_places_into,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_sparse_attn_sharedkv",
        deepseek_v4.make_attention,
        deepseek_v4.attend,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_sparse_attn_sharedkv_metadata",
        lambda g: [deepseek_v4.EDGES, make_numbers(g, 9, 2)],
        deepseek_v4.describe_attention,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_quant_lightning_indexer_v2",
        deepseek_v4.make_choice,
        deepseek_v4.choose,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_quant_lightning_indexer_v2_metadata",
        lambda g: [deepseek_v4.EDGES, make_numbers(g, 9, 2), make_numbers(g, 4, 2)],
        deepseek_v4.describe_choice,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_hc_pre_v3",
        lambda g: [*deepseek_v4.make_streams(g, 5, 8), draw(g, 5, 4, dtype=torch.float32)],
        deepseek_v41.mix_streams,
    ),
    Case(
        "_C_ascend::npu_sparse_flash_mla",
        deepseek_v4.make_attention,
        deepseek_v41.attend,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_sparse_flash_mla_metadata",
        lambda g: [deepseek_v4.EDGES, make_numbers(g, 9, 2)],
        deepseek_v41.describe_attention,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_quant_lightning_indexer_v3",
        deepseek_v41.make_choice,
        deepseek_v41.choose,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_vllm_quant_lightning_indexer",
        deepseek_v4.make_earlier_choice,
        deepseek_v4.choose_earlier,
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_vllm_quant_lightning_indexer_metadata",
        lambda g: [deepseek_v4.EDGES[1:], make_numbers(g, 9, 2)],
        deepseek_v4.describe_earlier_choice,
        is_described=False,
    ),
    Case(
        "_C_ascend::moe_gating_top_k_hash",
        lambda g: [draw(g, 5, 6, dtype=torch.float32), draw(g, 6, dtype=torch.float32)],
        deepseek_v4.route,
        is_described=False,
    ),
    Case(
        "npu::npu_chunk_gated_delta_rule",
        lambda g: [
            *(draw(g, 5, 2, 128) for _ in range(3)),
            draw_scales(g, 5, 2).to(HALF),
            draw(g, 2, 2, 128, 128),
            torch.tensor([2, 3], dtype=torch.int32)[make_distinct(g, 2, 2)],
            -draw_scales(g, 5, 2),
        ],
        lambda query, key, value, beta, state, lengths, g: npu().npu_chunk_gated_delta_rule(
            query, key, value, beta=beta, initial_state=state, actual_seq_lengths=lengths, scale=0.1, g=g
        ),
    ),
    Case(
        "_C_ascend::npu_causal_conv1d_custom",
        lambda g: [
            torch.full((5, 6), ABSENT, dtype=HALF),
            *(draw(g, *shape) for shape in ((5, 6), (4, 6), (9, 3, 6))),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            make_distinct(g, 2, 9).int(),
            torch.tensor([True, False])[make_distinct(g, 2, 2)],
        ],
        lambda out, x, weight, states, starts, indices, has_state: [
            torch.ops._C_ascend.npu_causal_conv1d_custom(
                out, x, weight, states, None, starts, indices, has_state, None, 1, -1, 0
            ),
            states,
        ],
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_recurrent_gated_delta_rule",
        lambda g: [
            *(draw(g, 5, heads, 8) for heads in (2, 2, 4)),
            draw(g, 9, 4, 8, 8, dtype=torch.float32),
            draw_scales(g, 5, 4).to(HALF),
            torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.int32),
            make_distinct(g, 5, 9).int(),
            -draw_scales(g, 5, 4),
        ],
        lambda query, key, value, states, beta, lengths, indices, g: [
            torch.ops._C_ascend.npu_recurrent_gated_delta_rule(
                query,
                key,
                value,
                states,
                beta=beta,
                scale=0.1,
                actual_seq_lengths=lengths,
                ssm_state_indices=indices,
                g=g,
            ),
            states,
        ],
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_fused_gdn_gating",
        lambda g: [draw(g, 4, dtype=torch.float32), draw(g, 5, 4), draw(g, 5, 4), draw(g, 4, dtype=torch.float32)],
        lambda *tensors: torch.ops._C_ascend.npu_fused_gdn_gating(*tensors),
        is_described=False,
    ),
    Case(
        "npu::npu_transpose_batchmatmul",
        lambda g: [draw(g, 3, 4, 5), draw(g, 3, 5, 6)],
        lambda x, weight: npu().npu_transpose_batchmatmul(x, weight, perm_y=(1, 0, 2)),
    ),
    Case(
        "npu::npu_moe_init_routing_v2",
        lambda g: [draw(g, 5, 8), make_numbers(g, 6, 5, 2)],
        lambda x, ids: npu().npu_moe_init_routing_v2(
            x,
            ids,
            expert_num=6,
            active_num=10,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[2, 5],
        )[:3],
    ),
    Case(
        "npu::npu_grouped_matmul",
        lambda g: [draw(g, 9, 8), draw(g, 3, 8, 5), torch.tensor([2, 3, 4])[make_distinct(g, 3, 3)]],
        lambda x, weight, groups: npu().npu_grouped_matmul(
            [x], [weight], split_item=2, group_type=0, group_list_type=COUNTS, group_list=groups
        ),
    ),
    Case(
        "npu::npu_dynamic_quant",
        lambda g: [draw(g, 5, 8)],
        lambda x: npu().npu_dynamic_quant(x, dst_type=torch.int8),
    ),
    Case(
        "npu::npu_quantize",
        lambda g: [draw(g, 5, 8), draw(g, 8), draw(g, 8)],
        lambda x, scales, offsets: npu().npu_quantize(x, scales, offsets, torch.qint8, -1, False),
    ),
    Case(
        "npu::npu_quant_matmul",
        lambda g: [make_int8(g, 5, 8), make_int8(g, 8, 6), draw(g, 6, dtype=torch.float32), draw_scales(g, 5)],
        lambda x, weight, scale, rows: npu().npu_quant_matmul(
            x, weight, scale, pertoken_scale=rows, output_dtype=torch.bfloat16
        ),
    ),
    Case(
        "_C_ascend::grouped_matmul_swiglu_quant_v2",
        lambda g: [
            make_int8(g, 9, 8),
            make_int8(g, 3, 8, 8).view(torch.int32),
            draw_scales(g, 3, 16).view(torch.int32).long(),
            draw_scales(g, 9),
            torch.tensor([2, 5, 9]),
            draw(g, 3, 16, dtype=torch.float32),
        ],
        lambda x, weight, scale, rows, groups, assist: torch.ops._C_ascend.grouped_matmul_swiglu_quant_v2(
            x, [weight], [scale], rows, groups, weight_assist_matrix=[assist]
        ),
        is_described=False,
    ),
    Case(
        "_C_ascend::npu_dequant_swiglu_quant",
        lambda g: [make_numbers(g, 999, 5, 8), draw_scales(g, 8), draw_scales(g, 5)],
        lambda x, scale, rows: torch.ops._C_ascend.npu_dequant_swiglu_quant(
            x, weight_scale=scale, activation_scale=rows, quant_mode=1
        ),
        is_described=False,
    ),
    Case(
        "_C_ascend::dequant_situ_quant",
        lambda g: [make_numbers(g, 999, 5, 8), draw_scales(g, 8), draw_scales(g, 5)],
        lambda x, scale, rows: torch.ops._C_ascend.dequant_situ_quant(
            x, weight_scale=scale, activation_scale=rows, beta=4.0, linear_beta=25.0
        ),
        is_described=False,
    ),
    Case(
        "_C_ascend::grouped_matmul_swiglu_quant_weight_nz",
        draw_groups,
        lambda *tensors: torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz(*tensors)[:2],
        is_described=False,
    ),
    Case(
        "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list",
        draw_groups,
        lambda x, weights, scales, *rows: torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz_tensor_list(
            x, list(weights), list(scales), *rows
        )[:2],
        is_described=False,
    ),
    Case(
        "npu::npu_moe_token_permute",
        lambda g: [draw(g, 5, 8), make_numbers(g, 6, 5, 2)],
        lambda x, ids: npu().npu_moe_token_permute(x, ids, num_out_tokens=10),
    ),
    Case(
        "npu::npu_moe_token_unpermute",
        lambda g: [draw(g, 10, 8), make_distinct(g, 10, 10).int(), draw(g, 5, 2)],
        lambda rows, places, probs: npu().npu_moe_token_unpermute(rows, places, probs),
    ),
    Case(
        "_C_ascend::npu_add_rms_norm_bias",
        lambda g: [draw(g, 5, 8), draw(g, 5, 8), draw(g, 8), draw(g, 8)],
        lambda *tensors: torch.ops._C_ascend.npu_add_rms_norm_bias(*tensors),
    ),
    Case(
        "_C_ascend::npu_gemma_rms_norm",
        lambda g: [draw(g, 5, 8), draw(g, 8)],
        lambda *tensors: torch.ops._C_ascend.npu_gemma_rms_norm(*tensors),
        is_described=False,
    ),
    Case(
        "_C_ascend::moe_gating_top_k",
        lambda g: [draw(g, 5, 8, dtype=torch.float32), draw(g, 8, dtype=torch.float32)],
        lambda x, bias: torch.ops._C_ascend.moe_gating_top_k(
            x, 3, 2, 4, SUM_OF_TWO, 1, SIGMOID, False, 2.5, 1e-20, bias
        ),
        is_described=False,
    ),
    Case(
        "aten::_foreach_add.List",
        lambda g: [draw(g, 3), draw(g, 2, 4), draw(g, 3), draw(g, 2, 4)],
        lambda *tensors: torch._foreach_add(tensors[:2], tensors[2:]),
    ),
    Case(
        "aten::div.Tensor_mode",
        lambda g: [make_numbers(g, 999, 5)],
        lambda x: torch.div(x, 7, rounding_mode="floor"),
    ),
    Case(
        "aten::div.out_mode",
        lambda g: [make_numbers(g, 999, 5), torch.full((5,), int(ABSENT), dtype=torch.int32)],
        lambda x, out: torch.div(x, 7, rounding_mode="floor", out=out),
    ),
    Case(
        "aten::repeat_interleave.self_int",
        lambda g: [make_numbers(g, 999, 5)],
        lambda x: x.repeat_interleave(3),
    ),
    Case(
        "aten::searchsorted.Tensor",
        lambda g: [make_distinct(g, 99, 5).int().sort().values, make_numbers(g, 99, 7)],
        lambda edges, x: torch.searchsorted(edges, x, right=True),
    ),
    Case("aten::clamp_max", lambda g: [draw(g, 7)], lambda x: x.clamp_max(0.5)),
    Case("aten::signbit", lambda g: [draw(g, 7)], torch.signbit),
]
WITHOUT_KERNELS = {
    "npu::npu_format_cast",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
    "aten::_unique2",  # for which the host waits
    "aten::eye",  # made of others
}


def name_case(case: Case) -> str:
    return case.operator
