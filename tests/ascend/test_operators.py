"""Every operator of the stand-in for CANN's, called as vllm-ascend calls it, against plain references."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import operators
from standin_ascend.absences import SlotMapping
from standin_ascend.kernels import view_on_host

from tests.standin_cann import cann
from tests.standin_cann.cann import StandIn
from tests.standin_cann.gate import Gate
from tests.standin_cann.streams import make_streams, run_script

# torch_npu says so once for some operators; the stand-in knows no other format.
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")

HALF = torch.bfloat16  # what vllm-ascend computes in
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, HALF: 1e-2}
NO_MASK, CAUSAL = 0, 3  # CANN's sparse_mode; causal: the last query sees all keys
SOFTMAX, SIGMOID = range(2)
BEST, SUM_OF_TWO = range(2)  # by what a group of experts is chosen
CUMULATED, COUNTS = range(2)  # how the tokens of each expert are told
ABSENT = -77.0  # what is in memory that an operator has not written

SEEDS = st.integers(0, 2**16)
SIZES = st.sampled_from([2, 8, 16])
FLOATS = st.sampled_from(list(TOLERANCE))
Tensors = list[torch.Tensor]

CALLED: set[str] = set()
COVERED: set[str] = set()


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say which operators a test compares, for the last test of this file; it fails unless it calls them."""
    COVERED.update(names)

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*arguments: Any, **options: Any) -> None:
            CALLED.clear()
            test(*arguments, **options)
            assert set(names) <= CALLED

        return run

    return wrap


def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of an operator, which notes that it was called."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        CALLED.add(name)
        return function(*arguments, **options)

    return run


@pytest.fixture(scope="module")
def standin() -> Iterator[StandIn]:
    """Return the loaded stand-in, with these operators for as long as the tests of this file run.

    Other tests of the same process compare operators of the same names that the stand-in itself has.
    """
    loaded = cann.load()
    assert loaded is not None
    import torch_npu  # noqa: F401 - only now that it finds its libraries

    with pytest.MonkeyPatch.context() as patch:
        for namespace, functions in operators.OPERATORS.items():
            for name, function in functions.items():
                patch.setitem(functions, name, note(f"{namespace}::{name}", function))
        libraries = operators.register()
    yield loaded
    torch.npu.synchronize()
    for library in libraries:
        library._destroy()
    operators.register.cache_clear()


@pytest.fixture
def gate(standin: StandIn) -> Iterator[Gate]:
    """Return a gate that is open after the test, so that a test that fails does not leave streams held."""
    gate = Gate()
    yield gate
    gate.open()
    torch.npu.synchronize()


@pytest.fixture(autouse=True)
def _as_in_vllm() -> Iterator[None]:
    """Compute in inference mode, as vLLM does: else some operators of torch_npu call others, for gradients."""
    with torch.inference_mode():
        yield


def npu() -> Any:
    """Return torch_npu, which can be imported only when the stand-in is loaded."""
    import torch_npu

    return torch_npu


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def put(*tensors: torch.Tensor) -> Tensors:
    return [tensor.npu() for tensor in tensors]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare in value and shape, as exactly as numbers of this type, or of the found one, allow."""
    tolerance = TOLERANCE[dtype or found.dtype]
    torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_equal(found: Any, expected: Any) -> None:
    """Compare to the last bit: tensors, or as many of them."""
    if not isinstance(found, torch.Tensor):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0.0, atol=0.0, equal_nan=True)


# Attention


class Packed(NamedTuple):
    """Sequences, each with queries [length, heads, size], and keys, values and parts for rotary embedding."""

    queries: Tensors
    keys: Tensors
    values: Tensors
    query_ropes: Tensors
    key_ropes: Tensors


def make_packed(
    generator: torch.Generator,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> Packed:
    """Draw sequences: lengths of queries and keys; heads of both; sizes of a key, of a value, and of the rest."""
    (heads_of_queries, heads_of_keys), (key, value, rope) = heads, sizes
    return Packed(
        [draw(generator, queries, heads_of_queries, key, dtype=dtype) for queries, _ in lengths],
        [draw(generator, keys, heads_of_keys, key, dtype=dtype) for _, keys in lengths],
        [draw(generator, keys, heads_of_keys, value, dtype=dtype) for _, keys in lengths],
        [draw(generator, queries, heads_of_queries, rope, dtype=dtype) for queries, _ in lengths],
        [draw(generator, keys, heads_of_keys, rope, dtype=dtype) for _, keys in lengths],
    )


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's own attention [length, heads, size] and logarithms of sums of exponentials [length, heads]."""
    query, key, value = (part.float().transpose(0, 1) for part in (query, key, value))
    heads, queries, keys = *query.shape[:2], key.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[0], 0) for part in (key, value))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        for number in range(queries):
            seen[number, max(keys - queries + number + 1, 0) :] = False
    scores = (torch.einsum("hqd,hkd->hqk", query, key) * scale).masked_fill(~seen, -torch.inf)
    found = F.scaled_dot_product_attention(query, key, value, seen, scale=scale)
    found[:, ~seen.any(1)] = 0  # a query that sees no key
    return found.transpose(0, 1), scores.logsumexp(-1).T


def attend_each(batch: Packed, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in each sequence by itself, with the rotary parts, if any."""
    found = [
        attend(torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1), value, scale, causal)
        for query, key, value, query_rope, key_rope in zip(*batch, strict=True)
    ]
    return torch.cat([out for out, _ in found]), torch.cat([sums for _, sums in found])


@settings(max_examples=50)
@given(
    seed=SEEDS,
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
    heads=st.integers(1, 4),
    sizes=st.tuples(SIZES, SIZES, st.sampled_from([0, 4])),
    causal=st.booleans(),
    padding=st.integers(0, 2),
    dtype=FLOATS,
)
@covers("npu::npu_fused_infer_attention_score")
def test_packed_sequences_attend_each_to_itself(
    standin: StandIn,
    seed: int,
    lengths: list[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int, int],
    causal: bool,
    padding: int,
    dtype: torch.dtype,
) -> None:
    generator = make_generator(seed)
    batch = make_packed(generator, lengths, (heads, heads), sizes, dtype)
    query, key, value, query_rope, key_rope = map(torch.cat, batch)
    query, query_rope = (F.pad(part, (0, 0, 0, 0, 0, padding), value=torch.nan) for part in (query, query_rope))
    ropes = {"query_rope": query_rope.npu(), "key_rope": key_rope.npu()} if sizes[2] else {}
    out, sums = npu().npu_fused_infer_attention_score(
        *put(query, key, value),
        **ropes,
        num_heads=heads,
        num_key_value_heads=heads,
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None,
        sparse_mode=CAUSAL if causal else NO_MASK,
        scale=0.3,
        softmax_lse_flag=True,
        actual_seq_lengths=list(accumulate(queries for queries, _ in lengths)),
        actual_seq_lengths_kv=list(accumulate(keys for _, keys in lengths)),
    )
    expected, expected_sums = attend_each(batch, 0.3, causal)
    assert out.dtype == dtype
    assert_near(out, F.pad(expected, (0, 0, 0, 0, 0, padding)))
    assert_near(sums[..., 0], F.pad(expected_sums, (0, 0, 0, padding), value=-torch.inf))


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (3, 3)])
@covers("npu::npu_fused_infer_attention_score")
def test_heads_share_keys_that_are_packed_or_in_a_cache(
    standin: StandIn, heads: tuple[int, int], causal: bool, cached: bool
) -> None:
    generator, lengths = make_generator(7), [(3, 11), (1, 6), (5, 5), (4, 16)]
    batch = make_packed(generator, lengths, heads, (16, 16, 0), HALF)
    keys = [keys for _, keys in lengths]
    settings_of_keys: dict[str, Any] = {"actual_seq_lengths_kv": list(accumulate(keys))}
    key, value = torch.cat(batch.keys), torch.cat(batch.values)
    if cached:
        table = make_table(generator, keys, 8)
        key, value = (cut_into_blocks(part, table, 8).flatten(2) for part in (batch.keys, batch.values))
        # One request more than there are queries: padding, as graphs have it.
        settings_of_keys = {"actual_seq_lengths_kv": [*keys, 0], "block_table": table.npu(), "block_size": 8}
    out, sums = npu().npu_fused_infer_attention_score(
        *put(torch.cat(batch.queries), key, value),
        **settings_of_keys,
        num_heads=heads[0],
        num_key_value_heads=heads[1],
        input_layout="TND",
        atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu() if causal else None,
        sparse_mode=CAUSAL if causal else NO_MASK,
        scale=0.25,
        softmax_lse_flag=True,
        actual_seq_lengths=list(accumulate(queries for queries, _ in lengths)),
    )
    expected, expected_sums = attend_each(batch, 0.25, causal)
    assert_near(out, expected)
    assert_near(sums[..., 0], expected_sums, HALF)


def test_a_row_is_the_same_to_the_bit_beside_any_others(standin: StandIn) -> None:
    """What makes a step that is split equal to a whole one."""
    generator = make_generator(3)
    tokens, lengths = 40, [23, 40]
    query, key, value = (draw(generator, tokens, 4, 16) for _ in range(3))

    def attend_to(first: int, last: int, ends: list[int]) -> torch.Tensor:
        out, _ = npu().npu_fused_infer_attention_score(
            *put(*(part[first:last] for part in (query, key, value))),
            num_heads=4,
            num_key_value_heads=4,
            input_layout="TND",
            sparse_mode=NO_MASK,
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
        )
        return out

    together = attend_to(0, tokens, lengths)
    assert_equal(together, torch.cat([attend_to(0, 23, [23]), attend_to(23, 40, [17])]))
    x, weight = draw(generator, tokens, 16), draw(generator, 3, 16, 8)
    whole = multiply_groups(x, [weight], [10, 0, 30], COUNTS)
    parts = [
        multiply_groups(x[:4], [weight], [4, 0, 0], COUNTS),
        multiply_groups(x[4:], [weight], [6, 0, 30], COUNTS),
    ]
    assert_equal(whole, torch.cat(parts))


# Attention to a cache that has blocks


def make_table(generator: torch.Generator, lengths: Sequence[int], block_size: int) -> torch.Tensor:
    """Give each request blocks, in no order; block 0 is nobody's, and what fills up the table."""
    counts = [-(-length // block_size) for length in lengths]
    table = torch.zeros(len(lengths), max([1, *counts]) + 1, dtype=torch.int32)
    blocks = (1 + torch.randperm(sum(counts), generator=generator)).int()
    for row, count, last in zip(table, counts, accumulate(counts), strict=True):
        row[:count] = blocks[last - count : last]
    return table


def cut_into_blocks(sequences: Tensors, table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Put sequences [length, ...] into the blocks that a table names: a cache, with NaN where nothing is."""
    shape = int(table.max()) + 1, block_size, *sequences[0].shape[1:]
    cache = torch.full(shape, torch.nan, dtype=sequences[0].dtype)
    for sequence, blocks in zip(sequences, table, strict=True):
        for position, token in enumerate(sequence):
            cache[blocks[position // block_size], position % block_size] = token
    return cache


def decode(operator: Callable[..., Any], tensors: Sequence[torch.Tensor], **options: Any) -> Any:
    """Call one of the forms of the operator."""
    query, latent, query_rope, rope, table = tensors
    ropes = {"query_rope": query_rope, "key_rope": rope, "block_table": table}
    return operator(query, latent, latent, **ropes, **options)


class Decode(NamedTuple):
    """Requests that decode, each with its queries [heads, queries, size] and a latent sequence [length, size]."""

    queries: torch.Tensor
    query_ropes: torch.Tensor
    latents: Tensors
    ropes: Tensors
    table: torch.Tensor
    block_size: int

    def list_tensors(self) -> Tensors:
        """Return what `decode` takes."""
        caches = (cut_into_blocks(part, self.table, self.block_size) for part in (self.latents, self.ropes))
        latent, rope = (cache[:, None] for cache in caches)
        return [self.queries, latent, self.query_ropes, rope, self.table]

    def list_settings(self) -> dict[str, Any]:
        """Return the options of the operator."""
        return {
            "num_query_heads": self.queries.shape[1],
            "num_key_value_heads": 1,
            "input_layout": "BNSD_NBSD",
            "sparse_mode": NO_MASK,
            "softmax_scale": 0.2,
            "block_size": self.block_size,
            "actual_seq_kvlen": [len(latent) for latent in self.latents],
        }

    def call(self, operator: Callable[..., Any], **changes: Any) -> Any:
        """Call one of the forms of the operator."""
        return decode(operator, put(*self.list_tensors()), **{**self.list_settings(), **changes})

    def expect(self) -> torch.Tensor:
        """Return [heads, requests, queries, latent size] by torch's own attention; zeros for what has no keys."""
        query = torch.cat([self.queries, self.query_ropes], -1)
        out = torch.zeros(self.queries.shape).transpose(0, 1).contiguous()
        for request, (latent, rope) in enumerate(zip(self.latents, self.ropes, strict=True)):
            if len(latent):
                key = torch.cat([latent, rope], -1)[:, None]
                found, _ = attend(query[request].transpose(0, 1), key, latent[:, None], 0.2)
                out[:, request] = found.transpose(0, 1)
        return out


def make_decode(
    seed: int, lengths: Sequence[int], heads: int = 4, queries: int = 1, block_size: int = 4, dtype: torch.dtype = HALF
) -> Decode:
    generator = make_generator(seed)
    return Decode(
        draw(generator, len(lengths), heads, queries, 16, dtype=dtype),
        draw(generator, len(lengths), heads, queries, 8, dtype=dtype),
        [draw(generator, length, 16, dtype=dtype) for length in lengths],
        [draw(generator, length, 8, dtype=dtype) for length in lengths],
        make_table(generator, lengths, block_size),
        block_size,
    )


@settings(max_examples=40)
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    heads=st.integers(1, 4),
    queries=st.integers(1, 2),
    block_size=st.sampled_from([1, 4, 16]),
    dtype=FLOATS,
)
@covers(
    "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_fused_infer_attention_score_v2.out",
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
)
def test_decodes_attend_to_the_blocks_that_their_table_names(
    standin: StandIn, seed: int, lengths: list[int], heads: int, queries: int, block_size: int, dtype: torch.dtype
) -> None:
    decode = make_decode(seed, lengths, heads, queries, block_size, dtype)
    expected = decode.expect()
    out, _ = decode.call(npu().npu_fused_infer_attention_score_v2)
    assert out.dtype == dtype
    assert_near(out, expected)
    workspace = decode.call(npu()._npu_fused_infer_attention_score_v2_get_max_workspace)
    there = torch.full(expected.shape, ABSENT, dtype=dtype).npu(), torch.empty(1).npu()
    given_back = decode.call(npu().npu_fused_infer_attention_score_v2.out, workspace=workspace, out=list(there))
    assert_equal(there[0], out)
    assert [tensor.data_ptr() for tensor in given_back] == [tensor.data_ptr() for tensor in there]


@pytest.mark.parametrize("cuts", [(9,), (1, 9), (4, 4, 9), (0, 9), (2, 5, 7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@covers("npu::npu_attention_update")
def test_updated_attention_is_attention_to_all_keys(
    standin: StandIn, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """One part is of no keys in two of these: its sum of exponentials is 0, and its output, whatever it is, is none."""
    generator = make_generator(len(cuts))
    query, key, value = draw(generator, 5, 3, 8), draw(generator, 9, 3, 8), draw(generator, 9, 3, 4)
    parts = [attend(query, key[first:last], value[first:last], 0.5) for first, last in pairwise([0, *cuts])]
    out, _ = npu().npu_attention_update(
        put(*(sums.flatten() for _, sums in parts)), put(*(part.flatten(0, 1).to(dtype) for part, _ in parts)), 0
    )
    assert_near(out, attend(query, key, value, 0.5)[0].flatten(0, 1), HALF if dtype == HALF else None)


@settings(max_examples=40)
@given(
    seed=SEEDS,
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    offsets=st.booleans(),
    cumulated=st.booleans(),
    block_size=st.sampled_from([1, 4]),
)
@covers("npu::npu_gather_pa_kv_cache")
def test_what_is_cached_is_gathered_request_by_request(
    standin: StandIn, seed: int, lengths: list[tuple[int, int]], offsets: bool, cumulated: bool, block_size: int
) -> None:
    generator = make_generator(seed)
    whole = [skipped + length for skipped, length in lengths]  # more than is gathered, where there are no offsets
    counts = [length for _, length in lengths]
    table = make_table(generator, whole, block_size)
    keys, values = ([draw(generator, length, 1, size) for length in whole] for size in (16, 8))
    found = [torch.full((sum(counts) + 2, 1, size), ABSENT, dtype=HALF).npu() for size in (16, 8)]
    npu().npu_gather_pa_kv_cache(
        cut_into_blocks(keys, table, block_size).npu(),
        cut_into_blocks(values, table, block_size).npu(),
        table.npu(),
        torch.tensor([0, *accumulate(counts)] if cumulated else counts, dtype=torch.int32).npu(),
        *found,
        seq_offset=torch.tensor([skipped for skipped, _ in lengths], dtype=torch.int32).npu() if offsets else None,
        is_seq_lens_cumsum=cumulated,
    )
    for gathered, sequences, size in zip(found, (keys, values), (16, 8), strict=True):
        starts = [skipped if offsets else 0 for skipped, _ in lengths]
        expected = [part[at : at + count] for part, at, count in zip(sequences, starts, counts, strict=True)]
        assert_equal(gathered, torch.cat([*expected, torch.full((2, 1, size), ABSENT, dtype=HALF)]))


@pytest.mark.parametrize("slots", [[0], [5, 2, 11], [7, -1, 0, -1], [-1, -1]])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_kv_rmsnorm_rope_cache")
def test_a_latent_is_normed_its_rest_rotated_and_both_are_cached(
    standin: StandIn, dtype: torch.dtype, slots: list[int]
) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    generator, tokens = make_generator(len(slots)), len(slots)
    kv, gamma = draw(generator, tokens, 1, 1, 24, dtype=dtype), draw(generator, 16, dtype=dtype)
    cos, sin = make_angles(generator, tokens, 8, dtype)
    caches = [torch.full((3, 4, 1, size), ABSENT, dtype=dtype) for size in (8, 16)]
    there = put(*caches)
    *cached, ropes, latents = npu().npu_kv_rmsnorm_rope_cache(
        *put(kv, gamma, cos, sin, torch.tensor(slots)),
        *there,
        epsilon=1e-3,
        cache_mode="PA",
        is_output_kv=True,
    )
    norm = DeepseekV3RMSNorm(16, 1e-3)
    norm.weight.copy_(gamma)
    expected = rotate_side_by_side(kv[..., 16:].float(), cos, sin), norm(kv[..., :16].float())
    for cache, given_cache, given_back, found, each in zip(
        caches, there, cached, (ropes, latents), expected, strict=True
    ):
        assert_near(found, each)
        for slot, row in zip(slots, found.cpu(), strict=True):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row[0]
        assert_equal(given_cache, cache)
        assert given_back.data_ptr() == given_cache.data_ptr()


@pytest.mark.parametrize("slots", [[3], [4, 0, 7, 2], [-1, 6, -1]])
@pytest.mark.parametrize("number", [torch.int32, torch.int64])
@covers("npu::npu_scatter_pa_kv_cache")
def test_keys_and_values_go_to_their_slots(standin: StandIn, number: torch.dtype, slots: list[int]) -> None:
    generator = make_generator(len(slots))
    key, value = (draw(generator, len(slots), 2, 8) for _ in range(2))
    caches = [torch.full((2, 4, 2, 8), ABSENT, dtype=HALF) for _ in range(2)]
    there = put(*caches)
    npu().npu_scatter_pa_kv_cache(*put(key, value), *there, torch.tensor(slots, dtype=number).npu(), cache_mode="Norm")
    for cache, found, rows in zip(caches, there, (key, value), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            if slot >= 0:
                cache[slot // 4, slot % 4] = row
        assert_equal(found, cache)


# Rotary embedding


def make_angles(generator: torch.Generator, tokens: int, size: int, dtype: torch.dtype) -> Tensors:
    """Return cosines and sines [tokens, 1, 1, size]."""
    angles = torch.rand(tokens, 1, 1, size // 2, generator=generator) * 6
    return [part.to(dtype).repeat(1, 1, 1, 2) for part in (angles.cos(), angles.sin())]


def rotate_side_by_side(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, 1, size] as transformers' DeepSeek-V3 does."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

    rotated, _ = apply_rotary_pos_emb_interleave(x, x, cos[:, 0].float(), sin[:, 0].float())
    return rotated


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (5, 4, 1, 8), (3, 2, 1, 64)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_interleave_rope")
def test_pairs_side_by_side_rotate_as_in_deepseek(
    standin: StandIn, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    generator = make_generator(shape[0])
    cos, sin = make_angles(generator, shape[0], shape[-1], dtype)
    whole = draw(generator, *shape[:-1], shape[-1] + 3, dtype=dtype)  # of which a part is rotated
    x = whole[..., 3:]
    found = npu().npu_interleave_rope(whole.npu()[..., 3:], *put(cos, sin))
    assert found.dtype == dtype
    assert_near(found, rotate_side_by_side(x.float(), cos, sin))


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 5, 4, 8), (2, 3, 2, 64)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("npu::npu_rotary_mul")
def test_pairs_in_two_halves_rotate_as_in_llama(
    standin: StandIn, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = make_generator(shape[1])
    x = draw(generator, *shape, dtype=dtype)
    cos, sin = (part.transpose(0, 1) for part in make_angles(generator, shape[1], shape[-1], dtype))
    found = npu().npu_rotary_mul(*put(x, cos, sin))
    halves = (part[:, :, 0].expand(shape[0], -1, -1).float() for part in (cos, sin))
    expected, _ = apply_rotary_pos_emb(x.float(), x.float(), *halves, unsqueeze_dim=2)
    assert_near(found, expected)


SECTIONS = {"apart": ((2, 1, 1), False), "in turns": ((2, 1, 1), True), "in turns, more": ((4, 2, 2), True)}


@pytest.mark.parametrize(("sections", "in_turns"), SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("vllm::triton_split_qkv_rmsnorm_mrope")
def test_queries_and_keys_are_normed_and_rotated_by_three_positions(
    standin: StandIn, dtype: torch.dtype, sections: tuple[int, int, int], in_turns: bool
) -> None:
    generator, tokens, heads, shared, size = make_generator(sum(sections)), 3, 4, 2, 2 * sum(sections)
    qkv = draw(generator, tokens, (heads + 2 * shared) * size, dtype=dtype)
    weights = [draw(generator, size, dtype=dtype) for _ in range(2)]
    angles = torch.rand(3, tokens, size // 2, generator=generator) * 6  # by time, height and width
    *found, value, _ = torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(
        *put(qkv, *weights, torch.cat([angles.cos(), angles.sin()], -1).to(dtype)),
        num_q_heads=heads,
        num_kv_heads=shared,
        head_size=size,
        eps=1e-3,
        mrope_section=list(sections),
        is_interleaved=in_turns,
    )
    apart = [axis for axis, count in enumerate(sections) for _ in range(count)]
    turns = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(size // 2)]
    axes = turns if in_turns else apart
    query, key, expected_value = qkv.split([heads * size, shared * size, shared * size], -1)
    for each, weight, out in zip((query, key), weights, found, strict=True):
        x = F.rms_norm(each.float().unflatten(-1, (-1, size)), (size,), weight.float(), 1e-3)
        expected = torch.empty_like(x)
        for pair, axis in enumerate(axes):
            turned = torch.polar(torch.ones(tokens), angles[axis, :, pair])[:, None]
            product = torch.complex(x[..., pair], x[..., pair + size // 2]) * turned
            expected[..., pair], expected[..., pair + size // 2] = product.real, product.imag
        assert_near(out, expected.flatten(1), HALF if dtype == HALF else None)
    assert_equal(value, expected_value)


# Experts


class Choice(NamedTuple):
    """How experts are chosen."""

    groups: int
    size: int
    kept: int
    number: int
    select: int
    norm: int
    renorm: int


def make_choices() -> st.SearchStrategy[Choice]:
    """Return choices that make sense: no more experts than the kept groups have."""
    groups = st.integers(1, 4).flatmap(lambda groups: st.tuples(st.just(groups), st.integers(1, groups)))
    return st.tuples(groups, st.integers(2, 4)).flatmap(
        lambda drawn: st.builds(
            Choice,
            groups=st.just(drawn[0][0]),
            size=st.just(drawn[1]),
            kept=st.just(drawn[0][1]),
            number=st.integers(1, drawn[0][1] * drawn[1]),
            select=st.sampled_from([BEST, SUM_OF_TWO]),
            norm=st.sampled_from([SOFTMAX, SIGMOID]),
            renorm=st.integers(0, 1),
        )
    )


def choose(logits: torch.Tensor, choice: Choice, scale: float, bias: torch.Tensor | None) -> Any:
    """Call the operator."""
    return torch.ops._C_ascend.moe_gating_top_k(
        logits.npu(),
        k=choice.number,
        k_group=choice.kept,
        group_count=choice.groups,
        group_select_mode=choice.select,
        renorm=choice.renorm,
        norm_type=choice.norm,
        out_flag=False,
        routed_scaling_factor=scale,
        eps=1e-20,
        bias_opt=None if bias is None else bias.npu(),
    )


def choose_plainly(row: list[float], bias: list[float], choice: Choice, scale: float) -> tuple[list[int], list[float]]:
    """Choose experts of one token, with Python's numbers."""
    exponentials = np.exp(np.array(row))
    scores = exponentials / (1 + exponentials if choice.norm == SIGMOID else exponentials.sum())
    rated = [float(score) + added for score, added in zip(scores, bias, strict=True)]
    members = [range(first, first + choice.size) for first in range(0, len(row), choice.size)]

    def rate(group: range) -> float:
        best = sorted((rated[expert] for expert in group), reverse=True)
        return sum(best[:2]) if choice.select == SUM_OF_TWO else best[0]

    kept = [expert for group in sorted(members, key=rate, reverse=True)[: choice.kept] for expert in group]
    chosen = sorted(kept, key=lambda expert: rated[expert], reverse=True)[: choice.number]
    # CANN's sigmoid is normed always: see `needRenorm` in vllm-ascend's csrc/moe/moe_gating_top_k.
    whole = sum(scores[expert] for expert in chosen) if choice.norm == SIGMOID or choice.renorm else 1.0
    return chosen, [float(scores[expert] / whole * scale) for expert in chosen]


@settings(max_examples=60)
@given(
    seed=SEEDS, tokens=st.integers(0, 5), choice=make_choices(), biased=st.booleans(), scale=st.sampled_from([1, 2.5])
)
@covers("_C_ascend::moe_gating_top_k")
def test_experts_are_chosen_within_the_best_groups(
    standin: StandIn, seed: int, tokens: int, choice: Choice, biased: bool, scale: float
) -> None:
    generator, experts = make_generator(seed), choice.groups * choice.size
    logits = draw(generator, tokens, experts, dtype=torch.float32)
    bias = draw(generator, experts, dtype=torch.float32) if biased else None
    weights, ids, scores = choose(logits, choice, scale, bias)
    assert (weights.shape, ids.shape, ids.dtype) == ((tokens, choice.number), (tokens, choice.number), torch.int32)
    for row, found_ids, found in zip(logits.tolist(), ids.tolist(), weights.cpu(), strict=True):
        chosen, expected = choose_plainly(row, [0.0] * experts if bias is None else bias.tolist(), choice, scale)
        assert found_ids == chosen
        assert_near(found, torch.tensor(expected))
    assert_near(scores, logits.sigmoid() if choice.norm == SIGMOID else logits.softmax(-1))


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3)])
@covers("_C_ascend::moe_gating_top_k")
def test_experts_are_chosen_as_in_deepseek(standin: StandIn, groups: int, kept: int) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    generator, experts, number = make_generator(groups), 32, 6
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=experts,
            n_routed_experts=experts,
            n_group=groups,
            topk_group=kept,
            num_experts_per_tok=number,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    router.weight.copy_(torch.eye(experts))  # so that logits are what is routed
    router.e_score_correction_bias.copy_(draw(generator, experts, dtype=torch.float32))
    logits = draw(generator, 20, experts, dtype=torch.float32)
    _, expected, expected_ids = router(logits)
    choice = Choice(groups, experts // groups, kept, number, SUM_OF_TWO, SIGMOID, 1)
    weights, ids, _ = choose(logits, choice, 2.5, router.e_score_correction_bias)
    found_order, expected_order = ids.cpu().argsort(-1), expected_ids.argsort(-1)
    assert_equal(ids.cpu().long().gather(1, found_order), expected_ids.gather(1, expected_order))
    assert_near(weights.cpu().gather(1, found_order), expected.gather(1, expected_order))


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize("norm", [SOFTMAX, SIGMOID])
@covers("_C_ascend::moe_gating_top_k")
def test_weights_of_experts_have_the_type_of_the_logits(standin: StandIn, norm: int, dtype: torch.dtype) -> None:
    logits = ((torch.randperm(16, generator=make_generator(0)) - 8) / 4).to(dtype)[None]  # of which no two are equal
    weights, ids, scores = choose(logits, Choice(2, 8, 2, 4, BEST, norm, 0), 1.0, None)
    chosen, expected = choose_plainly(logits[0].tolist(), [0.0] * 16, Choice(2, 8, 2, 4, BEST, norm, 0), 1.0)
    assert (weights.dtype, scores.dtype) == (dtype, torch.float32)
    assert ids.tolist() == [chosen]
    assert_near(weights[0], torch.tensor(expected))


class Routing(NamedTuple):
    """Tokens and their experts, of which one rank has a range."""

    x: torch.Tensor
    ids: torch.Tensor
    experts: int
    first: int
    last: int

    def sort(self) -> list[tuple[int, int]]:
        """Return the expert and the number of each choice that is of this rank, in the order of the experts."""
        return sorted(
            (expert, number)
            for number, expert in enumerate(self.ids.flatten().tolist())
            if self.first <= expert < self.last
        )

    def count(self) -> list[int]:
        """Return how many choices each expert of this rank has."""
        return [sum(expert == each for each, _ in self.sort()) for expert in range(self.first, self.last)]

    def call(self, **more: Any) -> Any:
        """Call the operator."""
        return npu().npu_moe_init_routing_v2(
            *put(self.x, self.ids),
            expert_num=self.experts,
            active_num=self.ids.numel(),
            expert_tokens_num_flag=True,
            quant_mode=-1,
            **more,
        )


@st.composite
def make_routings(draw_from: st.DrawFn) -> Routing:
    """Draw tokens, and a range of experts, which may be all."""
    experts = draw_from(st.integers(1, 8))
    first = draw_from(st.integers(0, experts - 1))
    last = draw_from(st.integers(first + 1, experts))
    generator = make_generator(draw_from(SEEDS))
    tokens, number = draw_from(st.integers(0, 6)), draw_from(st.integers(1, 4))
    ids = torch.randint(experts, (tokens, number), generator=generator, dtype=torch.int32)
    return Routing(draw(generator, tokens, 8), ids, experts, first, last)


@settings(max_examples=50)
@given(routing=make_routings(), count_type=st.sampled_from([CUMULATED, COUNTS]))
@covers("npu::npu_moe_init_routing_v2")
def test_choices_of_a_ranks_experts_are_sorted_and_counted(standin: StandIn, routing: Routing, count_type: int) -> None:
    rows, places, counts, _ = routing.call(
        expert_tokens_num_type=count_type, active_expert_range=[routing.first, routing.last]
    )
    choices = routing.ids.shape[1]
    expected, expected_places = torch.zeros(routing.ids.numel(), 8, dtype=HALF), [-1] * routing.ids.numel()
    for place, (_, number) in enumerate(routing.sort()):
        expected[place] = routing.x[number // choices]
        expected_places[number] = place
    assert_equal(rows, expected)
    assert places.tolist() == expected_places
    assert counts.tolist() == (routing.count() if count_type == COUNTS else list(accumulate(routing.count())))
    _, sources, _, _ = routing.call(
        expert_tokens_num_type=COUNTS, active_expert_range=[routing.first, routing.last], row_idx_type=1
    )
    assert sources.tolist()[: len(routing.sort())] == [number for _, number in routing.sort()]


@covers("npu::npu_moe_init_routing_v2")
def test_without_a_range_all_experts_are_active(standin: StandIn) -> None:
    ids = torch.tensor([[2, 0], [1, 2], [0, 3]], dtype=torch.int32)
    routing = Routing(draw(make_generator(0), 3, 8), ids, 4, 0, 4)
    _, places, counts, _ = routing.call(expert_tokens_num_type=COUNTS)
    assert places.tolist() == [3, 0, 2, 4, 1, 5]
    assert counts.tolist() == [2, 1, 2, 1]


def multiply_groups(x: torch.Tensor, weights: Tensors, groups: list[int], group_list_type: int) -> torch.Tensor:
    """Call the operator."""
    (out,) = npu().npu_grouped_matmul(
        x=put(x),
        weight=put(*weights),
        bias=None,
        split_item=2,
        group_type=0,
        group_list_type=group_list_type,
        group_list=torch.tensor(groups).npu(),
    )
    return out


@settings(max_examples=30)
@given(
    seed=SEEDS,
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rest=st.integers(0, 2),
    form=st.sampled_from(["stacked", "transposed", "list"]),
    group_list_type=st.sampled_from([CUMULATED, COUNTS]),
    dtype=FLOATS,
)
@covers("npu::npu_grouped_matmul")
def test_the_rows_of_each_expert_are_multiplied_by_its_matrix(
    standin: StandIn, seed: int, counts: list[int], rest: int, form: str, group_list_type: int, dtype: torch.dtype
) -> None:
    generator = make_generator(seed)
    x = draw(generator, sum(counts) + rest, 8, dtype=dtype)
    weight = draw(generator, len(counts), 8, 5, dtype=dtype)
    transposed = weight.transpose(1, 2).contiguous().transpose(1, 2)
    weights = {"stacked": [weight], "transposed": [transposed], "list": list(weight)}[form]
    groups = counts if group_list_type == COUNTS else list(accumulate(counts))
    found = multiply_groups(x, weights, groups, group_list_type)
    expected = np.zeros((len(x), 5))
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(owners):
        expected[row] = x[row].double().numpy() @ weight[expert].double().numpy()
    assert found.dtype == dtype
    assert_near(found, torch.from_numpy(expected))


@settings(max_examples=30)
@given(seed=SEEDS, tokens=st.integers(1, 6), choices=st.integers(1, 4), dtype=FLOATS)
@covers("npu::npu_moe_token_permute", "npu::npu_moe_token_unpermute")
def test_permuted_tokens_are_in_the_order_of_experts_and_come_back(
    standin: StandIn, seed: int, tokens: int, choices: int, dtype: torch.dtype
) -> None:
    generator = make_generator(seed)
    x, probs = draw(generator, tokens, 8, dtype=dtype), torch.rand(tokens, choices, generator=generator).to(dtype)
    ids = torch.randint(5, (tokens, choices), generator=generator)
    rows, places = npu().npu_moe_token_permute(tokens=x.npu(), indices=ids.npu(), num_out_tokens=ids.numel())
    order = sorted(range(ids.numel()), key=lambda number: int(ids.flatten()[number]))  # which keeps equals in order
    assert_equal(rows, torch.stack([x[number // choices] for number in order]))
    assert [order[place] for place in places.tolist()] == list(range(ids.numel()))
    found = npu().npu_moe_token_unpermute(
        permuted_tokens=rows, sorted_indices=places, probs=probs.npu(), restore_shape=x.shape
    )
    assert found.dtype == dtype
    assert_near(found, x.float() * probs.float().sum(1, keepdim=True))


@pytest.mark.parametrize("rows", [1, 7])
@covers("npu::npu_moe_token_permute", "npu::npu_moe_token_unpermute")
def test_rows_with_one_expert_each_come_back_to_the_bit(standin: StandIn, rows: int) -> None:
    generator = make_generator(rows)
    x, ids = draw(generator, rows, 8), torch.randint(3, (rows,), generator=generator)
    permuted, places = npu().npu_moe_token_permute(*put(x, ids))
    assert_equal(npu().npu_moe_token_unpermute(permuted, places), x)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("choices", [1, 3])
@covers("npu::npu_moe_init_routing_v2", "npu::npu_grouped_matmul", "npu::npu_moe_token_unpermute")
def test_the_experts_of_all_ranks_together_give_what_deepseeks_give(
    standin: StandIn, choices: int, tokens: int
) -> None:
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    generator = make_generator(tokens)
    config = DeepseekV3Config(hidden_size=8, n_routed_experts=6, moe_intermediate_size=4)
    experts = DeepseekV3Experts(config)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    x, probs = draw(generator, tokens, 8, dtype=torch.float32), torch.rand(tokens, choices, generator=generator)
    ids = torch.stack([torch.randperm(6, generator=generator)[:choices] for _ in range(tokens)]).int()
    found = torch.zeros(tokens, 8)
    for first, last in ((0, 2), (2, 6)):
        here = (ids >= first) & (ids < last)
        routing = Routing(x, ids, 6, first, last)
        rows, places, counts, _ = routing.call(expert_tokens_num_type=COUNTS, active_expert_range=[first, last])
        up, down = (weight[first:last].transpose(1, 2) for weight in (experts.gate_up_proj, experts.down_proj))
        gate, other = multiply_groups(rows.cpu(), [up], counts.tolist(), COUNTS).cpu().chunk(2, -1)
        done = multiply_groups(F.silu(gate) * other, [down], counts.tolist(), COUNTS)
        # vllm-ascend gives absolute values of places: weight 0 says that a choice is another rank's.
        found += npu().npu_moe_token_unpermute(done, places.abs(), (probs * here).npu()).cpu()
    assert_near(found, experts(x, ids.long(), probs))


# Norms, products and sums


@pytest.mark.parametrize("of_x", [None, (0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("of_weight", [None, (0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("of_out", [None, (1, 0, 2)])
@covers("npu::npu_transpose_batchmatmul")
def test_batches_are_multiplied_in_the_order_that_is_asked_for(
    standin: StandIn, of_x: tuple[int, ...] | None, of_weight: tuple[int, ...] | None, of_out: tuple[int, ...] | None
) -> None:
    """What is not said is (0, 1, 2) for both factors, and (1, 0, 2) for the product, as torch_npu has it."""
    generator, batches = make_generator(0), 3
    matrices = [(draw(generator, 4, 5), draw(generator, 5, 6)) for _ in range(batches)]
    x = torch.stack([one for one, _ in matrices], 1 if of_x == (1, 0, 2) else 0)
    weight = torch.stack([other.T if of_weight == (0, 2, 1) else other for _, other in matrices])
    orders = {"perm_x1": of_x, "perm_x2": of_weight, "perm_y": of_out}
    found = npu().npu_transpose_batchmatmul(*put(x, weight), **orders)
    assert_near(found, torch.stack([one.float() @ other.float() for one, other in matrices], 1))


@pytest.mark.parametrize("shape", [(1, 8), (5, 16), (2, 3, 8)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("_C_ascend::npu_add_rms_norm_bias")
def test_a_sum_is_normed_and_biased(standin: StandIn, dtype: torch.dtype, biased: bool, shape: tuple[int, ...]) -> None:
    generator = make_generator(len(shape))
    x, residual = (draw(generator, *shape, dtype=dtype) for _ in range(2))
    gamma, beta = (draw(generator, shape[-1], dtype=dtype) for _ in range(2))
    y, deviations, total = torch.ops._C_ascend.npu_add_rms_norm_bias(
        *put(x, residual, gamma), beta.npu() if biased else None, 1e-3
    )
    assert_equal(total, x + residual)
    expected = F.rms_norm((x + residual).float(), shape[-1:], gamma.float(), 1e-3) + biased * beta.float()
    assert y.dtype == dtype
    assert_near(y, expected)
    rows = [float(1 / np.sqrt(np.mean(row**2) + 1e-3)) for row in (x + residual).double().flatten(0, -2).numpy()]
    assert_near(deviations, torch.tensor(rows).view(*shape[:-1], 1))


@pytest.mark.parametrize("alpha", [1, 2.5])
@pytest.mark.parametrize("dtype", TOLERANCE)
@covers("aten::_foreach_add.List")
def test_pairs_are_added(standin: StandIn, dtype: torch.dtype, alpha: float) -> None:
    generator, shapes = make_generator(0), [(3,), (2, 4), (0, 2)]
    ones, others = ([draw(generator, *shape, dtype=dtype) for shape in shapes] for _ in range(2))
    found = torch._foreach_add(put(*ones), put(*others), alpha=alpha)
    for one, other, each in zip(ones, others, found, strict=True):
        assert_near(each, one.float() + alpha * other.float())


@pytest.mark.parametrize("number", [2, 29])
@covers("npu::npu_format_cast")
def test_another_format_has_the_same_values(standin: StandIn, number: int) -> None:
    for x in (draw(make_generator(0), 4, 6), draw(make_generator(1), 4, 6).T):
        assert_equal(npu().npu_format_cast(x.npu(), number), x)


# What is Triton's


@settings(max_examples=40)
@given(
    seed=SEEDS,
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=4),
    padding=st.integers(0, 3),
    block_size=st.sampled_from([1, 4, 128]),
)
def test_each_token_finds_its_slot(
    standin: StandIn, seed: int, requests: list[tuple[int, int]], padding: int, block_size: int
) -> None:
    tokens = sum(count for _, count in requests)
    table = make_table(make_generator(seed), [first + count for first, count in requests] or [1], block_size)
    positions = [position for first, count in requests for position in range(first, first + count)]
    slots = torch.full((tokens + padding + 2,), ABSENT).int().npu()
    find_slots(requests, positions, table, slots, padding, block_size)
    owners = [request for request, (_, count) in enumerate(requests) for _ in range(count)]
    expected = [
        int(table[request, position // block_size]) * block_size + position % block_size
        for request, position in zip(owners, positions, strict=True)
    ]
    assert slots.tolist() == [*expected, *[-1] * padding, int(ABSENT), int(ABSENT)]


def find_slots(
    requests: list[tuple[int, int]],
    positions: list[int],
    table: torch.Tensor,
    slots: torch.Tensor,
    padding: int,
    block_size: int,
    **changes: Any,
) -> None:
    """Launch the kernel as vllm-ascend does; requests are their first positions and how many follow."""
    starts = torch.tensor([0, *accumulate(count for _, count in requests)], dtype=torch.int32)
    settings_of_kernel = {
        "KV_CACHE_BLOCK_SIZE": block_size,
        "BLOCKS_PER_KV_BLOCK": 1,
        "TOTAL_CP_WORLD_SIZE": 1,
        "TOTAL_CP_RANK": 0,
        "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
        "PAD_ID": -1,
        "TILE_BLOCK_SIZE": 1024,
        "BLOCK_TABLE_WINDOW_SIZE": 1024,
        "IS_CIRCULAR": False,
    }
    SlotMapping()[(len(requests) + 1,)](
        len(positions),
        len(positions) + padding,
        *put(starts, torch.tensor(positions, dtype=torch.int64), table),
        table.stride(0),
        block_size,
        slots,
        **{**settings_of_kernel, **changes},
    )


# Queues and graphs


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
        "vllm::triton_split_qkv_rmsnorm_mrope",
        lambda g: [draw(g, 3, 6 * 8), draw(g, 8), draw(g, 8), draw(g, 3, 3, 8)],
        lambda *tensors: torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(*tensors, 2, 2, 8, 1e-6, [2, 1, 1], False)[:3],
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
]
WITHOUT_KERNELS = {"npu::npu_format_cast", "npu::_npu_fused_infer_attention_score_v2_get_max_workspace"}


def name_case(case: Case) -> str:
    return case.operator


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_an_operator_computes_when_its_stream_comes_to_it(gate: Gate, case: Case) -> None:
    early, late = (case.make(make_generator(seed)) for seed in (1, 2))
    tensors, stream = put(*early), torch.npu.current_stream()
    torch.npu.synchronize()
    gate.hold(stream)
    found = case.run(tensors)
    assert not stream.query()
    for tensor, value in zip(tensors, late, strict=True):
        view_on_host(tensor).copy_(value)  # the host reaches what on an NPU it would not
    gate.open()
    torch.npu.synchronize()
    assert_equal(found, case.run(put(*late)))


def test_a_result_is_not_there_before_its_stream_goes_on(gate: Gate) -> None:
    """Whoever does not wait reads what was there before."""
    stream, waiting, hasty = make_streams(3)
    *tensors, out = put(*DECODE.list_tensors(), torch.full((4, 2, 1, 16), ABSENT, dtype=HALF))
    torch.npu.synchronize()
    gate.hold(stream)
    with torch.npu.stream(stream):
        decode_into(*tensors, out)
    waiting.wait_stream(stream)
    with torch.npu.stream(waiting):
        late = out.clone()
    with torch.npu.stream(hasty):
        early = out.clone()
    hasty.synchronize()
    assert not waiting.query()
    assert (view_on_host(out) == ABSENT).all()
    gate.open()
    torch.npu.synchronize()
    assert (early == ABSENT).all()
    assert_near(late, DECODE.expect())


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_a_replay_computes_from_the_inputs_of_its_time(standin: StandIn, case: Case) -> None:
    tensors = put(*case.make(make_generator(0)))
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        found = case.run(tensors)
    for seed in (1, 2, 1):
        fresh = case.make(make_generator(seed))
        for tensor, value in zip(tensors, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.npu.synchronize()
        assert_equal(found, case.run(put(*fresh)))


def test_an_update_gives_later_replays_other_lengths(standin: StandIn) -> None:
    """As vllm-ascend's decodes have it: their lengths are not tensors."""
    longest, (stream, updater) = make_decode(1, [15, 9]), make_streams(2)
    tensors = put(*longest.list_tensors(), torch.empty(4, 2, 1, 16, dtype=HALF))
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        torch.npu.graph_task_group_begin(stream)
        out = decode_into(*tensors, actual_seq_kvlen=[1, 1])
        group = torch.npu.graph_task_group_end(stream)
    for lengths in ((15, 9), (4, 8), (0, 5)):
        with torch.npu.stream(updater):
            torch.npu.graph_task_update_begin(updater, group)
            decode_into(*tensors, actual_seq_kvlen=list(lengths))
            torch.npu.graph_task_update_end(updater)
        updater.synchronize()
        graph.replay()
        torch.npu.synchronize()
        latents, ropes = (
            [part[:length] for part, length in zip(parts, lengths, strict=True)]
            for parts in (longest.latents, longest.ropes)
        )
        assert_near(out, longest._replace(latents=latents, ropes=ropes).expect())


@pytest.mark.parametrize("case", [case for case in CASES if case.is_described], ids=name_case)
def test_results_have_the_shapes_and_types_that_torch_npu_foresees(standin: StandIn, case: Case) -> None:
    made = case.make(make_generator(0))
    expected = case.run([tensor.to("meta") for tensor in made])
    found = case.run(put(*made))
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]


# What fails, and what is refused

REGISTER = "import sys\nsys.stderr = sys.stdout\nfrom standin_ascend import operators\noperators.register()\n"
NORM = "torch.ops._C_ascend.npu_add_rms_norm_bias(x, x, torch.ones(4, device='npu'))"


def test_a_kernel_that_fails_shows_when_its_stream_is_synchronized(standin: StandIn) -> None:
    told = run_script(
        REGISTER + "cache = torch.ones(2, 4, 1, 8, device='npu')\n"
        "table = torch.full((1, 1), 9, dtype=torch.int32, device='npu')\n"
        "lengths = torch.full((1,), 3, dtype=torch.int32, device='npu')\n"
        "out = torch.empty(3, 1, 8, device='npu')\n"
        "torch_npu.npu_gather_pa_kv_cache(cache, cache, table, lengths, out, out)\n"
        "print('queued')\n"
        "try:\n"
        "    torch.npu.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('raised', error)\n"
        "x = torch.ones(2, 4, device='npu')\n"
        f"print('and then', {NORM}[2].sum().item())\n"  # all is well again
    )
    assert "queued" in told
    assert "kernel GatherPaKvCache failed" in told.partition("raised")[2]
    assert "IndexError" in told  # of the kernel, with a traceback that says where
    assert told.endswith("and then 16.0\n")


def test_a_process_ends_well_while_kernels_are_queued(standin: StandIn) -> None:
    told = run_script(
        REGISTER + "x = torch.ones(2, 4, device='npu')\n"
        "standin.delay('AddRmsNormBias', 0.1)\n"
        "with torch.npu.stream(torch.npu.Stream()):\n"
        f"    kept = [{NORM} for _ in range(3)]\n"
        f"kept += [{NORM} for _ in range(3)]\n"
        "print('end')\n"
    )
    assert told.endswith("end\n")


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
    "split, a gate": lambda x: split_with(x, has_gate=True),
    "split, biases": lambda x: split_with(x, q_bias=x, k_bias=x),
    "split, rotated in part": lambda x: split_with(x, rope_dim=4),
    "batches, quantized": lambda x: npu().npu_transpose_batchmatmul(x, x, scale=x),
    "batches, split": lambda x: npu().npu_transpose_batchmatmul(x, x, batch_split_factor=2),
    "choice, another norm": lambda x: choose(x[0].cpu(), Choice(1, 16, 1, 1, BEST, 2, 0), 1.0, None),
    "choice, other groups": lambda x: choose(x[0].cpu(), Choice(1, 16, 1, 1, 2, SIGMOID, 0), 1.0, None),
    "routing, quantized": lambda x: route_with(x, quant_mode=1),
    "routing, scaled": lambda x: route_with(x, scale=x[0, 0]),
    "routing, dropped": lambda x: route_with(x, drop_pad_mode=1, expert_capacity=2),
    "routing, less than all": lambda x: route_with(x, active_num=3),
    "routing, counts by key": lambda x: route_with(x, expert_tokens_num_type=2),
    "groups, biased": lambda x: multiply_with(x, bias=[x[0]]),
    "groups, quantized": lambda x: multiply_with(x, scale=[x[0]]),
    "groups, of columns": lambda x: multiply_with(x, group_type=2),
    "groups, counts by key": lambda x: multiply_with(x, group_list_type=2),
    "permute, less than all": lambda x: npu().npu_moe_token_permute(x[0], x[0].int(), num_out_tokens=3),
    "permute, padded": lambda x: npu().npu_moe_token_permute(x[0], x[0].int(), padded_mode=True),
    "unpermute, padded": lambda x: npu().npu_moe_token_unpermute(x[0], x[0, 0].int(), padded_mode=True),
    "format, of another type": lambda x: npu().npu_format_cast(x, 29, customize_dtype=1),
    "slots, circular": lambda x: find_slots([(0, 1)], [0], x[0].int().cpu(), x, 0, 4, IS_CIRCULAR=True),
    "slots, of several ranks": lambda x: find_slots([(0, 1)], [0], x[0].int().cpu(), x, 0, 4, TOTAL_CP_WORLD_SIZE=2),
}


def attend_with(x: torch.Tensor, heads_of_keys: int = 4, **changes: Any) -> None:
    key, options = x[:, :heads_of_keys], {**TND, "num_heads": 4, "num_key_value_heads": heads_of_keys, **changes}
    npu().npu_fused_infer_attention_score(x, key, key, **options)


def split_with(x: torch.Tensor, **changes: Any) -> None:
    torch.ops.vllm.triton_split_qkv_rmsnorm_mrope(x[0], x, x, x, 1, 1, 8, 1e-6, [2, 1, 1], False, **changes)


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


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_not_there_is_refused(standin: StandIn, call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(12, 4, 16, dtype=HALF).npu()
    with pytest.raises(NotImplementedError):
        call(x)


def test_every_operator_has_a_test() -> None:
    names = {f"{namespace}::{name}" for namespace, functions in operators.OPERATORS.items() for name in functions}
    assert names == COVERED
    assert names == {case.operator for case in CASES} | WITHOUT_KERNELS
