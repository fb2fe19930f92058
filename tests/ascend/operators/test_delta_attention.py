"""Kimi Delta Attention (Kimi-K3, GLM-5.3-Flash) against its recurrence in matrices, and kernels of Triton around it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import delta_attention
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
    draw,
    make_generator,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

HEADS, SIZE, KEY_SIZE, BLOCKS = 2, 6, 8, 16
SCALE, LOWEST = KEY_SIZE**-0.5, -5.0
FLOAT = torch.float32
SETTINGS = {"layout": "BSND", "use_gate_in_kernel": True, "state_v_first": True, "safe_gate": True}


def draw_tokens(generator: torch.Generator, count: int) -> Tensors:
    """Return queries, keys, values, gates and corrections of *count* tokens, as they are projected."""
    sizes = (KEY_SIZE, KEY_SIZE, SIZE, KEY_SIZE)
    return [draw(generator, count, HEADS, *more, dtype=FLOAT) for more in (*((size,) for size in sizes), ())]


def draw_decays(generator: torch.Generator) -> Tensors:
    """Return by how much decays follow the gates, and the gates' bias."""
    return [draw(generator, HEADS, dtype=FLOAT), draw(generator, HEADS * KEY_SIZE, dtype=FLOAT)]


def follow(tokens: Sequence[torch.Tensor], weights: Tensors, state: torch.Tensor) -> Tensors:
    """Return what a request reads [tokens, heads, size], and its state after each token, by matrices.

    With keys in rows, S = (1 - beta k k^T) Diag(alpha) S + beta k v^T (arXiv:2510.26692, equation 1).
    """
    query, key, value, gate, beta = (part.double() for part in tokens)
    slopes, bias = (part.double() for part in weights)
    query, key = (F.normalize(part, dim=-1, eps=0) for part in (query, key))
    alpha = (LOWEST * (slopes.exp()[:, None] * (gate + bias.view(HEADS, KEY_SIZE))).sigmoid()).exp()
    now, out, states = state.double().transpose(1, 2), [], []
    for token in range(len(value)):
        for_key = beta[token].sigmoid()[:, None] * key[token]
        erase = torch.eye(KEY_SIZE) - for_key[..., None] * key[token][:, None]
        now = erase @ (alpha[token][..., None] * now) + for_key[..., None] * value[token][:, None]
        out.append(SCALE * (query[token][:, None] @ now)[:, 0])
        states.append(now.transpose(1, 2))
    return [torch.stack(out), torch.stack(states)]


@settings(max_examples=scale(20))
@given(seed=SEEDS, lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_prefills_follow_the_recurrence(standin: StandIn, seed: int, lengths: list[int]) -> None:
    generator = make_generator(seed)
    tokens, weights = draw_tokens(generator, sum(lengths)), draw_decays(generator)
    states = draw(generator, len(lengths), HEADS, SIZE, KEY_SIZE, dtype=FLOAT)
    query, key, value, gate, beta = tokens
    query, key = (F.normalize(part, dim=-1) for part in (query, key))
    inputs = (part[None] for part in put(query, key, value, gate, beta.sigmoid()))
    slopes, bias = put(*weights)
    out, after = delta_attention.follow_chunks(
        *inputs,
        SCALE,
        64,
        initial_state=states.npu(),
        cu_seqlens=[0, *accumulate(lengths)],
        chunk_indices=[],
        A_log=slopes,
        dt_bias=bias,
        lower_bound=LOWEST,
        **SETTINGS,
        **delta_attention.OF_CHUNKS,
    )
    for request, last in enumerate(accumulate(lengths)):
        here = slice(last - lengths[request], last)
        expected, found = follow([part[here] for part in tokens], weights, states[request])
        assert_near(out[0, here], expected)
        assert_near(after[request], found[-1])


@settings(max_examples=scale(20))
@given(seed=SEEDS, drafts=st.integers(0, 2), takes_sigmoid=st.booleans(), data=st.data())
def test_decodes_leave_a_state_for_each_draft(
    standin: StandIn, seed: int, drafts: int, takes_sigmoid: bool, data: st.DataObject
) -> None:
    """Without drafts a request has one block, whose state is that after its last token."""
    generator, requests, most = make_generator(seed), data.draw(st.integers(1, 3)), drafts + 1
    lengths = data.draw(st.lists(st.integers(0, most), min_size=requests, max_size=requests))
    accepted = data.draw(st.lists(st.integers(1, most), min_size=requests, max_size=requests))
    tokens, weights = draw_tokens(generator, sum(lengths)), draw_decays(generator)
    states = draw(generator, BLOCKS, HEADS, SIZE, KEY_SIZE, dtype=FLOAT)
    places = torch.randperm(BLOCKS, generator=generator)[: requests * most].view(requests, most)
    taken = tokens if takes_sigmoid else [*tokens[:4], tokens[4].sigmoid()]
    inputs = [part[None] for part in put(*taken)]
    found, starts, indices, chosen, slopes, bias = put(
        states,
        torch.tensor([0, *accumulate(lengths)]).int(),
        (places if drafts else places[:, 0]).int(),
        torch.tensor(accepted).int(),
        *weights,
    )
    out, _ = delta_attention.update_states(
        *inputs,
        found,
        cu_seqlens=starts,
        ssm_state_indices=indices,
        A_log=slopes,
        dt_bias=bias,
        num_accepted_tokens=chosen if drafts else None,
        scale=SCALE,
        lower_bound=LOWEST,
        use_beta_sigmoid_in_kernel=takes_sigmoid,
        **SETTINGS,
        **delta_attention.OF_DECODES,
    )
    wanted = states.clone()
    for request, last in enumerate(accumulate(lengths)):
        if not lengths[request]:
            continue
        here, own = slice(last - lengths[request], last), places[request]
        before = states[own[accepted[request] - 1 if drafts else 0]]
        expected, left = follow([part[here] for part in tokens], weights, before)
        wanted[own[: lengths[request]]] = left.float()
        assert_near(out[0, here], expected)
    assert_near(found, wanted)


def test_other_settings_are_refused(standin: StandIn) -> None:
    with pytest.raises(NotImplementedError, match="recurrent_kda with other settings"):
        delta_attention.expect("recurrent_kda", {**SETTINGS, "safe_gate": False}, SETTINGS)


def test_states_of_requests_that_start_are_zeros(standin: StandIn) -> None:
    states = draw(make_generator(0), BLOCKS, SIZE, dtype=FLOAT)
    out = torch.full((3, SIZE), ABSENT).npu()
    indices, has_state = put(torch.tensor([5, 2, 9]), torch.tensor([True, False, True]))
    kernel = TritonKernel("gather", delta_attention.gather_initial_states)[(1, 3)]
    kernel(states.npu(), out, indices, has_state, SIZE, 1, 1, SIZE, 8)
    assert_equal(out, torch.stack([states[5], torch.zeros(SIZE), states[9]]))


def test_inputs_of_convolutions_are_packed_and_put_back(standin: StandIn) -> None:
    """Those of requests that have no tokens here, or no block, are left out."""
    states = draw(make_generator(0), BLOCKS, 3, SIZE)
    cache, packed = states.npu(), torch.full((4, 3, SIZE), ABSENT, dtype=HALF).npu()
    places = torch.tensor([[5, 0], [-1, 0], [9, 0], [2, 0]]).int()
    indices, starts, numbers = put(places, torch.tensor([0, 2, 3, 3, 4]).int(), torch.full((4,), 7).int())
    kernel = TritonKernel("copy", delta_attention.copy_inputs)[(4,)]
    kernel(cache, packed, indices, starts, numbers, WRITE_BACK=False, BLOCK=256)
    assert numbers.tolist() == [0, -1, -1, 3]
    none = torch.zeros(3, SIZE, dtype=HALF)
    assert_equal(packed, torch.stack([states[5], none, none, states[2]]))
    kernel(cache, packed + 1, indices, starts, numbers, WRITE_BACK=True, BLOCK=256)
    states[[5, 2]] += 1
    assert_equal(cache, states)


def test_results_are_written_before_zeros(standin: StandIn) -> None:
    source = draw(make_generator(0), 1, 5, HEADS, SIZE)
    out = torch.full((1, 7, HEADS, SIZE), ABSENT, dtype=HALF).npu()
    TritonKernel("write", delta_attention.write_results)[(1,)](source.npu(), out, torch.tensor([1, 3]).int().npu(), 1)
    assert_equal(out[:, :3], source[:, :3])
    assert_equal(out[:, 3:], torch.zeros(1, 4, HEADS, SIZE, dtype=HALF))


def test_heads_are_normed_before_the_gate(standin: StandIn) -> None:
    generator = make_generator(0)
    x, gate, weight = draw(generator, 1, 5, HEADS, SIZE), draw(generator, 5, HEADS, SIZE), draw(generator, SIZE)
    out = torch.empty_like(x).npu()
    options = {"ACTIVATION": "sigmoid", "IS_RMS_NORM": True, "PACKED_GATE": False, "STRIDED_GATE": False}
    kernel = TritonKernel("norm", delta_attention.norm_and_gate)[(1,)]
    kernel(x=x.npu(), g=gate.npu(), y=out, w=weight.npu(), b=None, eps=1e-5, **options)
    normed = F.rms_norm(x.double(), (SIZE,), weight.double(), 1e-5)
    assert_near(out, normed * gate.double().sigmoid())
