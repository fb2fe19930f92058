"""What ranks that share out keys send each other and merge, against attention to the whole sequence in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import context_parallel
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    FLOATS,
    SEEDS,
    assert_equal,
    assert_near,
    draw,
    make_generator,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT
HEADS, SIZE = 4, 8
LOGARITHMS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def pack(attended: torch.Tensor, logarithms: torch.Tensor, ranks: int, by_tokens: bool) -> torch.Tensor:
    """Launch the kernel as vllm-ascend does, which gives it strides and sizes, too."""
    count = 1 if attended.dtype == torch.float32 else 4
    queries, heads, size = attended.shape
    share, rest = (queries // ranks, heads) if by_tokens else (heads // ranks, queries)
    out = torch.full((ranks, share, rest, size + count), ABSENT, dtype=attended.dtype).npu()
    sizes = *attended.stride(), *logarithms.stride()[:2], *out.stride(), share, size, heads, queries * heads
    options = {"SCATTER_TOKENS": by_tokens, "LSE_PACK_DIM": count, "BLOCK_D": 8}
    TritonKernel("pack", context_parallel.pack_results)[(1,)](*put(attended, logarithms), out, *sizes, **options)
    return out


def combine(received: torch.Tensor, by_tokens: bool, **changes: Any) -> torch.Tensor:
    """Launch the kernel as vllm-ascend does without a part of the rank's own."""
    ranks, share, rest, width = received.shape
    count = 1 if received.dtype == torch.float32 else 4
    queries, heads, size = *((share, rest) if by_tokens else (rest, share)), width - count
    out = torch.full((queries, heads, size), ABSENT, dtype=received.dtype).npu()
    sizes = *(0,) * 5, *received.stride(), *out.stride(), size, heads, queries * heads
    options = {"DCP_SIZE": ranks, "SCATTER_TOKENS": by_tokens, "LSE_PACK_DIM": count, "BLOCK_D": 8, **changes}
    kernel = TritonKernel("combine", context_parallel.combine_results)[(1,)]
    kernel(received, out, received, received, *sizes, RETURN_LSE=False, **options)
    return out


def attend(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let queries [queries, heads, size] attend to keys [keys, size], which are values, in float64."""
    scores = query.double() @ keys.double().T
    logarithms = scores.logsumexp(-1, keepdim=True)
    return (scores - logarithms).nan_to_num(-torch.inf).exp() @ keys.double(), logarithms


@settings(max_examples=scale(40))
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),  # of keys on each rank
    share=st.integers(1, 3),
    by_tokens=st.booleans(),
    dtype=FLOATS,
)
def test_merged_results_are_those_of_the_whole_sequence(
    standin: StandIn, seed: int, lengths: list[int], share: int, by_tokens: bool, dtype: torch.dtype
) -> None:
    """A rank without keys has attended nothing, whatever it sends; without any, nothing is merged."""
    generator, ranks = make_generator(seed), len(lengths)
    query = draw(generator, share * ranks if by_tokens else 3, HEADS if by_tokens else share * ranks, SIZE)
    keys = [draw(generator, length, SIZE) for length in lengths]
    sent = []
    for own in keys:
        attended, logarithms = attend(query, own)
        attended = attended if len(own) else torch.full_like(attended, torch.nan)
        sent.append(pack(attended.to(dtype), logarithms.float(), ranks, by_tokens))
    expected = attend(query, torch.cat(keys))[0] if any(lengths) else torch.zeros(query.shape)
    for rank, part in enumerate(expected.chunk(ranks, 0 if by_tokens else 1)):
        received = torch.stack([each[rank] for each in sent])
        assert_near(combine(received, by_tokens), part)


@given(values=st.lists(LOGARITHMS, min_size=1, max_size=8))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_logarithm_reaches_others_to_the_last_bit(standin: StandIn, dtype: torch.dtype, values: list[float]) -> None:
    logarithms = torch.tensor([*values, 0.0, -0.0, torch.inf, -torch.inf, torch.nan, -1.1754943508222875e-38])
    sent = pack(torch.zeros(len(logarithms), 1, SIZE, dtype=dtype), logarithms[:, None, None], 1, True)
    digits = sent.cpu()[0, :, 0, SIZE:]
    assert_equal(digits, digits.float().round().clamp(-255, 255).to(dtype))
    found = context_parallel.decode(digits)[:, 0]
    wanted = [value if math.isfinite(value) else -torch.inf for value in logarithms.tolist()]
    assert_equal(found, torch.tensor(wanted, dtype=torch.float64))


def test_queries_are_joined_with_their_rotary_parts_heads_first(standin: StandIn) -> None:
    parts = [draw(make_generator(seed), 3, HEADS, size) for seed, size in ((0, SIZE), (1, 2))]
    out = torch.full((HEADS, 3, SIZE + 2), ABSENT, dtype=parts[0].dtype).npu()
    sizes = 3, HEADS, SIZE, 2, SIZE + 2, *(0,) * 4
    TritonKernel("join", context_parallel.join_queries)[(1,)](*put(*parts), out, *sizes, BLOCK_N=8, BLOCK_R=2)
    for head in range(HEADS):
        for query in range(3):
            assert_equal(out[head, query], torch.cat([part[query, head] for part in parts]))


@pytest.mark.parametrize("option", ["RETURN_LSE", "HAS_LOCAL"])
def test_a_part_of_its_own_is_refused(option: str) -> None:
    x = torch.zeros(1, 1, 1, 2)
    options = {"SCATTER_TOKENS": True, "LSE_PACK_DIM": 1, option: True}
    with pytest.raises(NotImplementedError):
        context_parallel.combine_results(x, x[0], x, x, **options)
