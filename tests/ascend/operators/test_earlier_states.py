"""Gated linear attention as vllm-ascend 0.23.0 calls it, against later operators that have tests of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from standin_ascend import earlier_states, linear_attention, triton_kernels

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    HALF,
    assert_equal,
    covers,
    draw,
    make_generator,
    npu,
    put,
)

pytestmark = ANY_FORMAT

KEY_HEADS, HEADS, SIZE, BLOCKS, TAPS, CHANNELS = 2, 4, 8, 9, 4, 6
PADDING, NO_BLOCK = -1, 0
SCALE = SIZE**-0.5


def convolve(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Call the operator on tensors of the device."""
    out = torch.full_like(x, ABSENT)
    known = ("bias", "starts", "indices", "has_state", "accepted", "activation", "padding", "mode")
    return torch.ops._C_ascend.npu_causal_conv1d_custom(out, x, weight, states, *(options.get(name) for name in known))


@pytest.mark.parametrize("columns", [None, 3])
@covers("_C_ascend::npu_causal_conv1d_custom")
def test_prefills_are_convolved_as_later(standin: StandIn, columns: int | None) -> None:
    """Of a table of blocks, the first column counts."""
    generator, lengths = make_generator(columns or 0), [3, 1, 7]
    x, weight = draw(generator, sum(lengths), CHANNELS), draw(generator, TAPS, CHANNELS)
    states, bias = draw(generator, BLOCKS, TAPS - 1, CHANNELS), draw(generator, CHANNELS)
    starts, has_state = torch.tensor([0, *accumulate(lengths)]).int(), torch.tensor([True, False, True])
    indices = torch.randperm(BLOCKS - 1, generator=generator)[:3].int() + 1
    table = indices if columns is None else torch.stack([indices, *(indices - 1 for _ in range(columns - 1))], 1)
    later, earlier = put(states, states)
    wanted = linear_attention.convolve(
        *put(x, weight, bias),
        conv_states=later,
        query_start_loc=starts.npu(),
        cache_indices=indices.npu(),
        has_initial_state=has_state.npu(),
        activation="silu",
        pad_slot_id=PADDING,
        null_block_id=NO_BLOCK,
    )
    rest = {"starts": starts.npu(), "indices": table.npu(), "has_state": has_state.npu(), "activation": 1}
    found = convolve(*put(x, weight), earlier, bias=bias.npu(), padding=PADDING, mode=0, **rest)
    assert_equal([found, earlier], [wanted, later])


@pytest.mark.parametrize("drafts", [0, 2])
@covers("_C_ascend::npu_causal_conv1d_custom")
def test_decodes_are_convolved_as_later(standin: StandIn, drafts: int) -> None:
    generator, lengths = make_generator(drafts), [1 + drafts, 1, 1 + drafts]
    x, weight = draw(generator, sum(lengths), CHANNELS), draw(generator, TAPS, CHANNELS)
    states, starts = draw(generator, BLOCKS, TAPS - 1 + drafts, CHANNELS), torch.tensor([0, *accumulate(lengths)]).int()
    indices = torch.randperm(BLOCKS - 1, generator=generator)[:3].int() + 1
    accepted = torch.tensor([1 + drafts, 1, 1]).int().npu() if drafts else None
    later, earlier = put(states, states)
    wanted = linear_attention.convolve_decodes(
        x.npu(),
        later,
        weight.npu(),
        bias=None,
        activation=None,
        conv_state_indices=indices.npu(),
        query_start_loc=starts.npu(),
        max_query_len=1 + drafts,
        null_block_id=NO_BLOCK,
        out=torch.full_like(x, ABSENT).npu(),
        num_accepted_tokens=accepted,
    )
    rest = {"starts": starts.npu(), "indices": indices.npu(), "accepted": accepted, "activation": 0}
    found = convolve(*put(x, weight), earlier, padding=PADDING, mode=1, **rest)
    assert_equal([found, earlier], [wanted, later])


def draw_tokens(generator: torch.Generator, count: int) -> list[torch.Tensor]:
    """Return queries, keys, values, decays and corrections of *count* tokens, on the device."""
    query, key = (F.normalize(draw(generator, count, KEY_HEADS, SIZE), dim=-1) for _ in range(2))
    value, decay, beta = (draw(generator, count, HEADS, *more) for more in ((SIZE,), (), ()))
    return put(query, key, value, -decay.float().abs(), beta.sigmoid())


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@covers("_C_ascend::npu_recurrent_gated_delta_rule")
def test_decodes_follow_the_delta_rule_as_later(standin: StandIn, dtype: torch.dtype) -> None:
    generator = make_generator(0)
    query, key, value, g, beta = draw_tokens(generator, 4)
    states = draw(generator, BLOCKS, HEADS, SIZE, SIZE, dtype=dtype)
    lengths, places = put(torch.tensor([0, 2, 2]).int(), torch.tensor([3, 1, 7, 5]).int())
    options = {"g": g, "beta": beta, "scale": SCALE, "actual_seq_lengths": lengths, "ssm_state_indices": places}
    later, earlier = put(states, states)
    wanted = linear_attention.update_states(query, key, value, later, **options)
    found = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(query, key, value, earlier, **options)
    assert_equal([found, earlier], [wanted, later])


@covers("_C_ascend::npu_fused_gdn_gating")
def test_gates_are_those_of_the_kernel_of_triton(standin: StandIn) -> None:
    generator, tokens = make_generator(0), 5
    log_a, bias = (draw(generator, HEADS, dtype=torch.float32).npu() for _ in range(2))
    a, b = (draw(generator, tokens, HEADS).npu() for _ in range(2))
    wanted = [torch.empty(1, tokens, HEADS, dtype=dtype).npu() for dtype in (torch.float32, HALF)]
    kernel = triton_kernels.TritonKernel("fused_gdn_gating_kernel", triton_kernels.gate_states)
    kernel[1,](*wanted, log_a, a, b, bias, 1, HEADS, tokens, 1.0, 20.0)
    assert_equal(list(torch.ops._C_ascend.npu_fused_gdn_gating(log_a, a, b, bias)), wanted)


def make_tables(lengths: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the starts of requests, and the table of their chunks."""
    counts = (-(-length // earlier_states.CHUNK) for length in lengths)
    return [0, *accumulate(lengths)], [
        [request, chunk] for request, count in enumerate(counts) for chunk in range(count)
    ]


@pytest.mark.parametrize("lengths", [[3], [70, 1, 64], [5, 0, 130]])
def test_prefills_in_chunks_are_those_of_the_later_operator(standin: StandIn, lengths: list[int]) -> None:
    generator = make_generator(sum(lengths))
    tokens = draw_tokens(generator, sum(lengths))
    query, key, value, g, beta = tokens
    states = draw(generator, len(lengths), HEADS, SIZE, SIZE).npu()
    starts, chunks = make_tables(lengths)
    meta = SimpleNamespace(cu_seqlens_host=tuple(starts), chunk_indices_chunk64=torch.tensor(chunks).npu())
    before, device_starts = states.transpose(-1, -2).contiguous(), torch.tensor(starts).npu()
    whole = [part[None] for part in tokens]
    _, out, _, after, *_ = earlier_states.prefill_chunks(*whole, SCALE, before, True, device_starts, meta)
    counts = torch.tensor(lengths).int().npu()
    wanted, wanted_after = npu().npu_chunk_gated_delta_rule(
        query, key, value, beta=beta, initial_state=states, actual_seq_lengths=counts, scale=SCALE, g=g
    )
    assert_equal([out[0], after.transpose(-1, -2)], [wanted, wanted_after])


@pytest.mark.parametrize(("host_starts", "dropped"), [((0, 71, 75), 0), ((0, 70, 75), 1)])
def test_tables_of_other_requests_are_refused(host_starts: tuple[int, ...], dropped: int) -> None:
    starts, chunks = make_tables([70, 5])
    nothing = [torch.empty(0)] * 6
    tables = torch.tensor(starts), torch.tensor(chunks[: len(chunks) - dropped])
    with pytest.raises(RuntimeError, match=r"requests that start at \[0, 70, 75\]"):
        earlier_states.compute_chunks(*nothing, *tables, *nothing[:2], host_starts, SCALE)
