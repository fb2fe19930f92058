"""Gated linear attention, against transformers' own forms of the gated delta rule and torch's convolution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import triton_kernels
from standin_ascend.linear_attention import convolve, convolve_decodes, update_states
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    HALF,
    SEEDS,
    Tensors,
    assert_equal,
    assert_near,
    covers,
    draw,
    make_generator,
    npu,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

KEY_HEADS, HEADS, SIZE, BLOCKS, TAPS, CHANNELS = 2, 4, 8, 16, 4, 6
SCALE = SIZE**-0.5
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
FLOAT = torch.float32


def draw_tokens(generator: torch.Generator, count: int, dtype: torch.dtype = HALF) -> Tensors:
    """Return queries, keys of length one, values, decays and corrections of *count* tokens."""
    query, key = (F.normalize(draw(generator, count, KEY_HEADS, SIZE, dtype=FLOAT), dim=-1) for _ in range(2))
    value, decay, beta = (draw(generator, count, HEADS, *more, dtype=FLOAT) for more in ((SIZE,), (), ()))
    return [*(part.to(dtype) for part in (query, key, value)), -decay.abs(), beta.sigmoid().to(dtype)]


def follow(tokens: Sequence[torch.Tensor], state: torch.Tensor) -> Tensors:
    """Return by transformers, in float32, what a request reads [tokens, heads, size], and its state after each token.

    States are [heads, size, key size], as vllm-ascend's are.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    query, key, value, g, beta = (part.float() for part in tokens)
    query, key = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (query, key))
    out, states = [torch.empty(0, HEADS, SIZE)], [torch.empty(0, HEADS, SIZE, SIZE)]
    now = state.float().transpose(1, 2)[None]
    for token in range(len(value)):
        here = (part[None, token : token + 1] for part in (query, key, value, g, beta))
        found, now = torch_recurrent_gated_delta_rule(*here, initial_state=now, output_final_state=True)
        out.append(found[0])
        states.append(now.transpose(2, 3))
    return [torch.cat(out), torch.cat(states)]


@settings(max_examples=scale(20))
@given(seed=SEEDS, lengths=LENGTHS)
@covers("npu::npu_chunk_gated_delta_rule")
def test_prefills_follow_the_delta_rule(standin: StandIn, seed: int, lengths: list[int]) -> None:
    generator = make_generator(seed)
    tokens, states = draw_tokens(generator, sum(lengths)), draw(generator, len(lengths), HEADS, SIZE, SIZE)
    query, key, value, g, beta = put(*tokens)
    out, after = npu().npu_chunk_gated_delta_rule(
        query,
        key,
        value,
        beta=beta,
        initial_state=states.npu(),
        actual_seq_lengths=torch.tensor(lengths, dtype=torch.int32).npu(),
        scale=SCALE,
        g=g,
    )
    for request, last in enumerate(accumulate(lengths)):
        here = slice(last - lengths[request], last)
        expected, found = follow([part[here] for part in tokens], states[request])
        assert_near(out[here], expected)
        assert_near(after[request], found[-1] if lengths[request] else states[request])


def test_chunks_of_transformers_follow_it_too() -> None:
    """So the oracle above is one for chunks."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    tokens, state = draw_tokens(make_generator(0), 90, FLOAT), draw(make_generator(1), HEADS, SIZE, SIZE, dtype=FLOAT)
    query, key, value, g, beta = (part[None] for part in tokens)
    query, key = (part.repeat_interleave(HEADS // KEY_HEADS, 2) for part in (query, key))
    out, last = torch_chunk_gated_delta_rule(
        query, key, value, g, beta, initial_state=state.transpose(1, 2)[None], output_final_state=True
    )
    expected, states = follow(tokens, state)
    assert_near(out[0], expected)
    assert_near(last[0].transpose(1, 2), states[-1])


@settings(max_examples=scale(20))
@given(seed=SEEDS, drafts=st.integers(0, 2), data=st.data())
def test_decodes_leave_a_state_for_each_of_their_tokens(
    standin: StandIn, seed: int, drafts: int, data: st.DataObject
) -> None:
    generator, requests, most = make_generator(seed), data.draw(st.integers(1, 3)), drafts + 1
    lengths = data.draw(st.lists(st.integers(0, most), min_size=requests, max_size=requests))
    accepted = data.draw(st.lists(st.integers(1, most), min_size=requests, max_size=requests))
    tokens = draw_tokens(generator, sum(lengths))
    states = draw(generator, BLOCKS, HEADS, SIZE, SIZE, dtype=FLOAT)
    places = torch.randperm(BLOCKS, generator=generator)[: requests * most].int()
    query, key, value, g, beta, found_states, counts, indices, chosen = put(
        *tokens, states, torch.tensor([0, *lengths]).int(), places, torch.tensor(accepted).int()
    )
    out = update_states(
        query,
        key,
        value,
        found_states,
        g=g,
        beta=beta,
        scale=SCALE,
        actual_seq_lengths=counts,
        ssm_state_indices=indices,
        num_accepted_tokens=chosen if drafts else None,
    )
    wanted = states.clone()
    for request, last in enumerate(accumulate(lengths)):
        here, own = slice(last - lengths[request], last), places[request * most : (request + 1) * most].long()
        expected, left = follow([part[here] for part in tokens], states[own[accepted[request] - 1 if drafts else 0]])
        wanted[own[: lengths[request]]] = left
        assert_near(out[here], expected)
    assert_near(found_states, wanted)


def convolve_plainly(line: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve [inputs, channels] by torch; return one less than the taps fewer."""
    kernel = weight.float().T[:, None]
    found = F.conv1d(line.float().T[None], kernel, None if bias is None else bias.float(), groups=weight.shape[1])
    return F.silu(found[0].T)


@settings(max_examples=scale(20))
@given(seed=SEEDS, lengths=LENGTHS, data=st.data(), biased=st.booleans())
def test_prefills_are_convolved_request_by_request(
    standin: StandIn, seed: int, lengths: list[int], data: st.DataObject, biased: bool
) -> None:
    generator = make_generator(seed)
    has_state = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    x, weight = draw(generator, sum(lengths), CHANNELS), draw(generator, TAPS, CHANNELS)
    bias = draw(generator, CHANNELS) if biased else None
    states = draw(generator, BLOCKS, TAPS + 1, CHANNELS)
    blocks = 1 + torch.randperm(BLOCKS - 1, generator=generator)[: len(lengths)]
    found_states = states.npu()
    out = convolve(
        *put(x, weight),
        None if bias is None else bias.npu(),
        conv_states=found_states,
        query_start_loc=torch.tensor([0, *accumulate(lengths)]).int().npu(),
        cache_indices=blocks.int().npu(),
        has_initial_state=torch.tensor(has_state).npu(),
        activation="silu",
        pad_slot_id=-1,
        null_block_id=0,
    )
    for request, last in enumerate(accumulate(lengths)):
        here, block = slice(last - lengths[request], last), blocks[request]
        before = states[block, : TAPS - 1] * has_state[request]
        line = torch.cat([before, x[here]])
        assert_near(out[here], convolve_plainly(line, weight, bias) if lengths[request] else x[here])
        assert_equal(
            found_states[block, : TAPS - 1], line[1 - TAPS :] if lengths[request] else states[block, : TAPS - 1]
        )
        assert_equal(found_states[block, TAPS - 1 :], states[block, TAPS - 1 :])


@settings(max_examples=scale(20))
@given(seed=SEEDS, drafts=st.integers(0, 2), steps=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_decodes_go_on_from_what_was_accepted(standin: StandIn, seed: int, drafts: int, steps: list[int]) -> None:
    """A request whose drafts are accepted in part, step after step, is convolved as if it had its own tokens only."""
    generator = make_generator(seed)
    weight, state = draw(generator, TAPS, CHANNELS), draw(generator, TAPS - 1, CHANNELS)
    found = torch.full((3, TAPS - 1 + drafts, CHANNELS), ABSENT, dtype=HALF)
    found[2, : TAPS - 1] = state
    states, line, accepted = found.npu(), state, 1
    for step in steps:
        x = draw(generator, 1 + drafts, CHANNELS)
        out = convolve_decodes(
            x.npu(),
            states,
            weight.npu(),
            bias=None,
            activation="silu",
            conv_state_indices=torch.tensor([2, 0]).int().npu(),  # the second request pads the batch
            query_start_loc=torch.tensor([0, 1 + drafts, 1 + drafts]).int().npu(),
            max_query_len=1 + drafts,
            null_block_id=0,
            out=torch.empty_like(x).npu(),
            num_accepted_tokens=torch.tensor([accepted, 1]).int().npu() if drafts else None,
        )
        assert_near(out, convolve_plainly(torch.cat([line[1 - TAPS :], x]), weight, None))
        accepted = min(step, 1 + drafts)
        line = torch.cat([line, x[:accepted]])
    assert_equal(states[0], found[0])


def test_states_are_gathered_and_scattered(standin: StandIn) -> None:
    generator = make_generator(0)
    whole = draw(generator, BLOCKS, 2, HEADS * SIZE, dtype=FLOAT)
    padded = whole.npu()[:, 0].unflatten(-1, (HEADS, SIZE))  # rows apart, as hybrid caches have them
    indices, has_state = put(torch.tensor([5, 2, 9]), torch.tensor([True, False, True]))
    out = torch.full((3, HEADS, SIZE), ABSENT, dtype=HALF).npu()
    TritonKernel("gather", triton_kernels.gather_states)[(1, 3)](padded, indices, has_state, out, 0, row_size=1)
    expected = whole[:, 0].unflatten(-1, (HEADS, SIZE))
    assert_equal(out, torch.stack([expected[5], torch.zeros(HEADS, SIZE), expected[9]]).to(HALF))
    source = draw(generator, 3, HEADS, SIZE)
    TritonKernel("scatter", triton_kernels.scatter_states)[(1, 3)](padded, indices, source.npu(), 0, row_size=1)
    expected[[5, 2, 9]] = source.float()
    assert_equal(padded, expected)


def test_rows_are_divided_by_their_lengths(standin: StandIn) -> None:
    x = draw(make_generator(0), 5, SIZE)
    out = torch.empty_like(x).npu()
    TritonKernel("norm", triton_kernels.norm_by_length)[(1,)](x.npu(), out, 1e-6, 5, SIZE, 8, 32)
    assert_near(out, F.normalize(x.float(), dim=-1))


def test_gates_are_those_of_transformers(standin: StandIn) -> None:
    """As in its Qwen3NextGatedDeltaNet."""
    generator = make_generator(0)
    a, b, log_a, bias = (
        draw(generator, 5, HEADS),
        draw(generator, 5, HEADS),
        draw(generator, HEADS),
        draw(generator, HEADS),
    )
    g, beta = torch.empty(1, 5, HEADS).npu(), torch.empty(1, 5, HEADS, dtype=HALF).npu()
    TritonKernel("gate", triton_kernels.gate_states)[(1,)](g, beta, *put(log_a, a, b, bias), 1, HEADS, 5, 1.0, 20.0)
    assert_near(g[0], -log_a.float().exp() * F.softplus(a.float() + bias.float()))
    assert_near(beta[0], b.float().sigmoid())


def test_rows_are_normed_then_gated_as_in_transformers(standin: StandIn) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    generator = make_generator(0)
    x, z, weight = draw(generator, 5, SIZE), draw(generator, 5, SIZE), draw(generator, SIZE)
    norm = Qwen3NextRMSNormGated(SIZE, eps=1e-3)
    norm.weight.data = weight.float()
    out, deviations = torch.empty_like(x).npu(), torch.empty(5).npu()
    options = {"NORM_BEFORE_GATE": True, "IS_RMS_NORM": True}
    kernel = TritonKernel("norm", triton_kernels.norm_and_gate)[(1, 1)]
    kernel(x.npu(), out, weight.npu(), None, z.npu(), None, deviations, SIZE, SIZE, SIZE, 5, SIZE, 1e-3, **options)
    assert_near(out, norm(x.float(), z.float()).detach())
    assert_near(deviations, torch.rsqrt(x.float().square().mean(-1) + 1e-3))


def test_projections_of_each_key_head_are_ordered_by_what_they_are(standin: StandIn) -> None:
    shared, tokens, values = HEADS // KEY_HEADS, 3, SIZE + 2
    parts = [torch.arange(tokens * heads * size).view(tokens, heads, size) + base for heads, size, base in (
        (KEY_HEADS, SIZE, 0), (KEY_HEADS, SIZE, 1000), (HEADS, values, 2000), (HEADS, values, 3000))]  # fmt: skip
    gates = [torch.arange(tokens * HEADS).view(tokens, HEADS) + base for base in (0, 1000)]
    by_head = [part.view(tokens, KEY_HEADS, -1) for part in parts]
    mixed, mixed_gates = torch.cat(by_head, -1), torch.cat([gate.view(tokens, KEY_HEADS, shared) for gate in gates], -1)
    qkv = torch.empty(tokens, 2 * KEY_HEADS * SIZE + HEADS * values, dtype=torch.int64)
    out = put(qkv, torch.empty_like(parts[3]), *map(torch.empty_like, gates))
    kernel = TritonKernel("split", triton_kernels.split_projections)[(1, 1)]
    kernel(*out, *put(mixed.flatten(1), mixed_gates.flatten(1)), KEY_HEADS, HEADS, SIZE, values)
    assert_equal(out, [torch.cat([part.flatten(1) for part in parts[:3]], -1), parts[3], *gates])


REFUSED = {"no gate": {"z": None}, "a gate before": {"NORM_BEFORE_GATE": False}, "means": {"IS_RMS_NORM": False}}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_other_norms_are_refused(changes: dict[str, object]) -> None:
    """By the kernel itself, which a stream would run."""
    x, options = torch.ones(2, SIZE), {"NORM_BEFORE_GATE": True, "IS_RMS_NORM": True, **changes}
    z = options.pop("z", x)
    with pytest.raises(NotImplementedError, match="layer_norm_fwd_npu"):
        triton_kernels.norm_and_gate(x, x, x[0], None, z, None, x[:, 0], SIZE, 1e-3, **options)  # type: ignore[arg-type]
