"""Operators whose kernels communicate with other ranks, on two: against what each token's experts give it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.standin.cann.build import build
from tests.support.ascend.operators.checks import BETWEEN_RANKS, COUNTS, CUMULATED, HALF, draw, make_generator
from tests.support.standin.npu_ranks import Rank, Ranks

RANKS, TOKENS, ACTIVE, CHOICES, EXPERTS, HIDDEN, INNER = 2, 5, (4, 2), 3, 6, 16, 8
HERE = EXPERTS // RANKS


class Inputs(NamedTuple):
    """What each rank has [ranks, ...], and all experts."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    active: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def make_inputs() -> Inputs:
    generator = make_generator(0)
    ids = torch.rand(RANKS, TOKENS, EXPERTS, generator=generator).argsort(-1)[..., :CHOICES].int()
    active = torch.arange(TOKENS) < torch.tensor(ACTIVE)[:, None]
    x, weights = draw(generator, RANKS, TOKENS, HIDDEN), torch.rand(RANKS, TOKENS, CHOICES, generator=generator)
    up, down = draw(generator, EXPERTS, HIDDEN, 2 * INNER), draw(generator, EXPERTS, INNER, HIDDEN)
    return Inputs(x, ids, weights, active, up, down)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    build()
    with Ranks(RANKS, tmp_path_factory.mktemp("pair")) as ranks:
        yield ranks


def prepare(rank: Rank) -> tuple[Inputs, str]:
    """Register the operators in a rank's process; return inputs and its group's name."""
    from standin_ascend import operators

    operators.register()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    return make_inputs(), backend.get_hccl_comm_name(rank.number)


def send(rank: Rank, quant_mode: int, count_type: int) -> Any:
    """Dispatch this rank's tokens, and combine the rows as they came."""
    import torch_npu

    inputs, group = prepare(rank)
    ids, active = inputs.ids[rank.number].npu(), inputs.active[rank.number].npu()
    common = {"ep_world_size": RANKS, "ep_rank_id": rank.number, "moe_expert_num": EXPERTS, "group_ep": group}
    tp = {"group_tp": group, "tp_world_size": 1, "tp_rank_id": 0, "x_active_mask": active}
    rows, scales, origins, counts, received, *_ = torch_npu.npu_moe_distribute_dispatch_v2(
        x=inputs.x[rank.number].npu(),
        expert_ids=ids,
        quant_mode=quant_mode,
        expert_token_nums_type=count_type,
        **common,
        **tp,
    )
    number = int(received[-1])
    plain = rows if quant_mode == 0 else (rows.float() * scales[:, None]).to(HALF)
    out = torch_npu.npu_moe_distribute_combine_v2(
        expand_x=plain,
        expert_ids=ids,
        assist_info_for_combine=origins,
        ep_send_counts=received,
        expert_scales=inputs.weights[rank.number].npu(),
        **common,
        **tp,
    )
    return plain[:number].cpu(), counts.cpu(), received.cpu(), out.cpu()


def list_rows(inputs: Inputs, rank: int) -> list[tuple[int, int, int]]:
    """Return (expert, source, token) of each row that a rank gets, in order."""
    return sorted(
        (expert - rank * HERE, source, token)
        for source in range(RANKS)
        for token in range(ACTIVE[source])
        for expert in inputs.ids[source, token].tolist()
        if expert // HERE == rank
    )


@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("count_type", [CUMULATED, COUNTS])
def test_active_tokens_go_to_their_experts_and_come_back(pair: Ranks, quant_mode: int, count_type: int) -> None:
    inputs = make_inputs()
    for rank, (rows, counts, received, out) in enumerate(pair.run(send, quant_mode, count_type)):
        expected = list_rows(inputs, rank)
        assert_close(rows, torch.stack([inputs.x[source, token] for _, source, token in expected]), quant_mode)
        numbers = [sum(each == expert for each, _, _ in expected) for expert in range(HERE)]
        assert counts.tolist() == (numbers if count_type == COUNTS else list(accumulate(numbers)))
        pairs = [sum(each[:2] == (e, s) for each in expected) for e in range(HERE) for s in range(RANKS)]
        assert received.tolist() == list(accumulate(pairs))
        sums = inputs.x[rank].float() * inputs.weights[rank].sum(-1, keepdim=True)
        assert_close(out[: ACTIVE[rank]], sums[: ACTIVE[rank]], quant_mode)


def assert_close(found: torch.Tensor, expected: torch.Tensor, quant_mode: int) -> None:
    """Compare as exactly as bf16 allows, or int8 of a row's largest value, times the weights."""
    tolerance = 0.03 if quant_mode else 0.01
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def run_experts(rank: Rank, is_quantized: bool, most: int, limit: float = 0.0) -> Any:
    """Run all of it in one kernel."""
    inputs, group = prepare(rank)
    own = slice(rank.number * HERE, (rank.number + 1) * HERE)
    matrices, scales = [inputs.up[own], inputs.down[own]], [torch.empty(0, dtype=torch.int64)] * 2
    if is_quantized:
        matrices, floats = zip(*map(quantize, matrices), strict=True)
        scales = [scale.view(torch.int32).long().flatten() for scale in floats]  # as vllm-ascend hands them over
    x = inputs.x[rank.number].npu()
    out, counts = torch.empty_like(x), torch.zeros(HERE, dtype=torch.int32, device="npu")
    torch.ops._C_ascend.dispatch_ffn_combine(
        x=x,
        weight1=[matrices[0].npu()],
        weight2=[matrices[1].npu()],
        expert_idx=inputs.ids[rank.number].npu(),
        scale1=[scales[0].npu()],
        scale2=[scales[1].npu()],
        bias1=[torch.tensor([])],
        bias2=[torch.tensor([])],
        probs=inputs.weights[rank.number].npu(),
        group=group,
        max_output_size=most,
        swiglu_limit=limit,
        world_size=RANKS,
        x_active_mask=inputs.active[rank.number].npu(),
        out=out,
        expert_token_nums=counts,
    )
    return out.cpu(), counts.cpu()


def quantize(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 of each column [experts, in, out], and its scale [experts, out]."""
    scales = matrices.float().abs().amax(1) / 127
    return (matrices.float() / scales[:, None]).round().to(torch.int8), scales


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_one_kernel_dispatches_computes_and_combines(pair: Ranks, is_quantized: bool, limit: float) -> None:
    inputs, most = make_inputs(), limit or torch.inf
    for rank, (out, counts) in enumerate(pair.run(run_experts, is_quantized, 1000, limit)):
        for token in range(ACTIVE[rank]):
            total = torch.zeros(HIDDEN)
            for expert, weight in zip(inputs.ids[rank, token].tolist(), inputs.weights[rank, token], strict=True):
                gate, up = (inputs.x[rank, token].float() @ inputs.up[expert].float()).chunk(2)
                activated = F.silu(gate.clamp(max=most)) * up.clamp(-most, most)
                total += weight * (activated @ inputs.down[expert].float())
            # int8 of 1/127 of the largest, three times
            torch.testing.assert_close(
                out[token].float(), total, rtol=0, atol=float(total.abs().max()) * (0.06 if is_quantized else 0.02)
            )
        assert counts.tolist() == [sum(e == expert for e, _, _ in list_rows(inputs, rank)) for expert in range(HERE)]


def test_more_rows_than_the_kernel_has_room_for_fail(pair: Ranks) -> None:
    with pytest.raises(AssertionError, match="rows for 1"):
        pair.run(run_experts, False, 1)


BETWEEN_RANKS.update(
    ("npu::npu_moe_distribute_dispatch_v2", "npu::npu_moe_distribute_combine_v2", "_C_ascend::dispatch_ffn_combine")
)
