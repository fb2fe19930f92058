"""The fused attention of the stand-in against torch's attention, one sequence after the other."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from tests.standin.cann import cann
from tests.standin.cann.cann import StandIn

HEADS, KEY_HEADS, SIZE, BLOCK = 4, 2, 16, 8
SCALE = SIZE**-0.5
NO_MASK, ANY_MASK, CAUSAL, CAUSAL_FROM_THE_END = range(4)  # CANN's sparse_mode
LAYOUTS = ("TND", "BSH", "BSND", "BNSD")
OLDER_CHIP = "Ascend910B2"
LENGTHS = ((5, 9), (1, 12), (7, 7))  # of the queries and of the keys of three sequences
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}

Tensors = list[torch.Tensor]


class Batch(NamedTuple):
    """Sequences: their queries, keys and values, each [heads, length, size of a head]."""

    queries: Tensors
    keys: Tensors
    values: Tensors

    @property
    def query_lengths(self) -> list[int]:
        return [query.shape[1] for query in self.queries]

    @property
    def key_lengths(self) -> list[int]:
        return [key.shape[1] for key in self.keys]


def make_batch(lengths: Sequence[tuple[int, int]] = LENGTHS, dtype: torch.dtype = torch.float16) -> Batch:
    generator = torch.Generator().manual_seed(len(lengths))

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(heads, length, SIZE, generator=generator).to(dtype)

    queries = [draw(HEADS, queries) for queries, _ in lengths]
    keys, values = ([draw(KEY_HEADS, keys) for _, keys in lengths] for _ in range(2))
    return Batch(queries, keys, values)


def hide(queries: int, keys: int, sparse_mode: int) -> torch.Tensor:
    """Return which keys a query does not see: [queries, keys]."""
    if sparse_mode == NO_MASK:
        return torch.zeros(queries, keys, dtype=torch.bool)
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + (keys - queries) * (sparse_mode == CAUSAL_FROM_THE_END))


def attend(batch: Batch, sparse_mode: int) -> Tensors:
    """Return what each sequence's attention is, in float32 by torch's own: [heads, queries, size]."""
    return [
        F.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            ~hide(query.shape[1], key.shape[1], sparse_mode),
            scale=SCALE,
            enable_gqa=True,
        )
        for query, key, value in zip(*batch, strict=True)
    ]


def pack(sequences: Tensors, layout: str) -> torch.Tensor:
    """Put sequences, each [heads, length, size], into a tensor of a layout."""
    tokens_first = [sequence.transpose(0, 1) for sequence in sequences]
    if layout == "TND":
        return torch.cat(tokens_first)
    padded = pad_sequence(tokens_first, batch_first=True, padding_value=math.nan)  # that is never to be read
    if layout == "BSH":
        return padded.flatten(2)
    return padded if layout == "BSND" else padded.transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, lengths: list[int], layout: str) -> Tensors:
    """Undo `pack`."""
    if layout == "TND":
        return [sequence.transpose(0, 1) for sequence in packed.split(lengths)]
    if layout == "BSH":
        packed = packed.unflatten(2, (-1, SIZE))
    heads_first = packed if layout == "BNSD" else packed.transpose(1, 2)
    return [sequence[:, :length] for sequence, length in zip(heads_first, lengths, strict=True)]


def cut_into_blocks(sequences: Tensors, table: torch.Tensor) -> torch.Tensor:
    """Put sequences into the blocks that the table [sequences, blocks] names: [blocks, heads, block size, size]."""
    cache = torch.full((int(table.max()) + 1, KEY_HEADS, BLOCK, SIZE), math.nan, dtype=sequences[0].dtype)
    for sequence, blocks in zip(sequences, table, strict=True):
        for block, part in zip(blocks, sequence.split(BLOCK, 1), strict=False):
            cache[block, :, : part.shape[1]] = part
    return cache


def end_positions(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def call(batch: Batch, layout: str, sparse_mode: int, /, **changes: Any) -> tuple[Tensors, torch.Tensor]:
    """Run the operator on the NPU; returns each sequence's output and the logarithms of the sums of exponentials."""
    import torch_npu

    packed = layout == "TND"
    tensors: dict[str, Any] = {
        "query": pack(batch.queries, layout),
        "key": pack(batch.keys, layout),
        "value": pack(batch.values, layout),
        "atten_mask": hide(2048, 2048, CAUSAL) if sparse_mode in (CAUSAL, CAUSAL_FROM_THE_END) else None,
        **{name: value for name, value in changes.items() if isinstance(value, torch.Tensor)},
    }
    settings: dict[str, Any] = {
        "num_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "scale": SCALE,
        "input_layout": layout,
        "sparse_mode": sparse_mode,
        "actual_seq_lengths": end_positions(batch.query_lengths) if packed else batch.query_lengths,
        "actual_seq_lengths_kv": end_positions(batch.key_lengths) if packed else batch.key_lengths,
        "softmax_lse_flag": True,
        **{name: value for name, value in changes.items() if not isinstance(value, torch.Tensor)},
    }
    there = {name: None if value is None else value.npu() for name, value in tensors.items()}
    out, sums = torch_npu.npu_fused_infer_attention_score(**there, **settings)
    return unpack(out.cpu(), batch.query_lengths, layout), sums.cpu()


def assert_near(found: Tensors, expected: Tensors) -> None:
    for one, other in zip(found, expected, strict=True):
        tolerance = TOLERANCE[one.dtype]
        torch.testing.assert_close(one.float(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sparse_mode", [NO_MASK, CAUSAL, CAUSAL_FROM_THE_END])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_each_sequence_is_torchs(
    standin: StandIn, layout: str, sparse_mode: int, dtype: torch.dtype
) -> None:
    batch = make_batch(dtype=dtype)
    with standin.trace() as kernels:
        found, _ = call(batch, layout, sparse_mode)
    assert "FusedInferAttentionScoreV5" in [kernel.name for kernel in kernels]
    assert_near(found, attend(batch, sparse_mode))


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_come_from_the_blocks_that_the_table_names(standin: StandIn, layout: str, heads_first: bool) -> None:
    batch = make_batch()
    table = torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32)
    keys, values = (cut_into_blocks(sequences, table) for sequences in (batch.keys, batch.values))
    if not heads_first:
        keys, values = (cache.transpose(1, 2).flatten(2) for cache in (keys, values))
    found, _ = call(
        batch,
        layout,
        CAUSAL_FROM_THE_END,
        key=keys,
        value=values,
        block_table=table,
        block_size=BLOCK,
        actual_seq_lengths_kv=batch.key_lengths,
    )
    assert_near(found, attend(batch, CAUSAL_FROM_THE_END))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_a_mask_hides_what_it_marks(standin: StandIn, layout: str) -> None:
    batch = make_batch([(6, 6), (6, 6)])
    masks = torch.stack([hide(6, 6, CAUSAL), hide(6, 6, CAUSAL).flip(0)]).unsqueeze(1)
    found, _ = call(batch, layout, ANY_MASK, atten_mask=masks)
    expected = [
        F.scaled_dot_product_attention(q.float(), k.float(), v.float(), ~mask[0], scale=SCALE, enable_gqa=True)
        for q, k, v, mask in zip(*batch, masks, strict=True)
    ]
    assert_near(found, expected)


def test_one_length_is_that_of_all_sequences(standin: StandIn) -> None:
    batch = make_batch([(3, 8), (3, 8)])
    cut = Batch(batch.queries, *([tensor[:, :5] for tensor in tensors] for tensors in batch[1:]))
    found, _ = call(batch, "BNSD", NO_MASK, actual_seq_lengths=None, actual_seq_lengths_kv=[5])
    assert_near(found, attend(cut, NO_MASK))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logarithm_of_the_sum_of_exponentials_comes_too(standin: StandIn, layout: str) -> None:
    batch = make_batch()
    _, sums = call(batch, layout, NO_MASK)
    found = unpack(sums, batch.query_lengths, "TND") if layout == "TND" else unpack(sums, batch.query_lengths, "BNSD")
    expected = [
        (q.float() @ k.float().repeat_interleave(HEADS // KEY_HEADS, 0).mT * SCALE).logsumexp(-1, keepdim=True)
        for q, k in zip(batch.queries, batch.keys, strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=1e-3, atol=1e-3)


def test_a_query_that_sees_no_key_gets_zeros(standin: StandIn) -> None:
    batch = make_batch([(5, 3)])
    found, _ = call(batch, "TND", CAUSAL_FROM_THE_END)
    assert not found[0][:, :2].any()
    assert_near([found[0][:, 2:]], [tensor[:, 2:] for tensor in attend(batch, CAUSAL_FROM_THE_END)])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"query_rope": torch.ones(13, HEADS, 8, dtype=torch.float16)}, "no .* rotary part", id="rotary"),
        pytest.param({"atten_mask": hide(16, 16, CAUSAL)}, "wants a mask of 2048 x 2048", id="mask"),
        pytest.param({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "the size of a block", id="blocks"),
        pytest.param({"sparse_mode": 4}, "no sparse_mode 4", id="band"),
        pytest.param({"sparse_mode": 0, "next_tokens": 3}, "narrows no mask", id="narrowed mask"),
        pytest.param({"input_layout": "NTD_TND"}, "no input_layout NTD_TND", id="layout"),
    ],
)
def test_what_is_not_there_is_refused(standin: StandIn, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RuntimeError, match=rf"\[standin\] aclnnFusedInferAttentionScoreV5: .*{reason}"):
        call(make_batch(), "TND", CAUSAL, **changes)
    assert_near(call(make_batch(), "TND", CAUSAL)[0], attend(make_batch(), CAUSAL))  # nothing is left of it


def call_on_older_chip() -> dict[str, tuple[Tensors, list[str]]]:
    """Return, for each version, each sequence's output and which kernels ran. For a process of its own."""
    os.environ["NPU_STANDIN_SOC"] = OLDER_CHIP
    standin = cann.load()
    assert standin is not None
    answers = {}
    for version, attention in {"V3": call, "V4": call_second_form}.items():
        with standin.trace() as kernels:
            found, _ = attention(make_batch(), "TND", CAUSAL_FROM_THE_END)
        answers[version] = ([tensor.contiguous() for tensor in found], [kernel.name for kernel in kernels])
    return answers


def call_second_form(batch: Batch, layout: str, sparse_mode: int) -> tuple[Tensors, torch.Tensor]:
    """As `call`, through the other of torch_npu's two functions."""
    import torch_npu

    out, sums = torch_npu.npu_fused_infer_attention_score_v2(
        *(pack(tensors, layout).npu() for tensors in batch),
        num_query_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        softmax_scale=SCALE,
        input_layout=layout,
        sparse_mode=sparse_mode,
        atten_mask=hide(2048, 2048, CAUSAL).npu(),
        actual_seq_qlen=end_positions(batch.query_lengths),
        actual_seq_kvlen=end_positions(batch.key_lengths),
        return_softmax_lse=True,
    )
    return unpack(out.cpu(), batch.query_lengths, layout), sums.cpu()


@pytest.fixture(scope="module")
def older_chip(standin: StandIn) -> dict[str, tuple[Tensors, list[str]]]:
    """What a process gets to which torch_npu sees an older chip; it asks for the chip's name once."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(call_on_older_chip).result()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V3", "V4"])
def test_older_chips_have_older_versions(older_chip: dict[str, tuple[Tensors, list[str]]], version: str) -> None:
    found, kernels = older_chip[version]
    assert f"FusedInferAttentionScore{version}" in kernels
    assert_near(found, attend(make_batch(), CAUSAL_FROM_THE_END))


def test_both_functions_of_torch_npu_agree(standin: StandIn) -> None:
    found, sums = call(make_batch(), "TND", CAUSAL)
    other_found, other_sums = call_second_form(make_batch(), "TND", CAUSAL)
    torch.testing.assert_close(other_found, found)
    torch.testing.assert_close(other_sums, sums)
