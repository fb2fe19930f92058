"""What slices of a batch keep of the states of linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.metadata import slice_common_metadata
from dbo_runtime.vllm_plugin.context.states import check_drafts, check_starts, keep_places, slice_arguments
from tests.support.vllm.splitters import cut, make_common

REASON = "a prompt starts with as few tokens as a decode, in a model with linear attention"


def check(query_lens: Sequence[int], computed: Sequence[int], *cuts: int) -> Decline | None:
    slices = cut(*cuts, query_lens=query_lens)
    return check_starts(slice_common_metadata(make_common(query_lens, computed), slices))


@pytest.mark.parametrize(
    ("query_lens", "computed", "cuts"),
    [
        ([20, 1], [0, 0], [20]),  # a prompt of one token, alone
        ([1, 1, 20, 1], [7, 9, 0, 0], [22]),
        ([1, 20], [7, 0], [2]),  # the first token of a prompt, after decodes only
        ([20], [0], [1]),
    ],
)
def test_the_start_of_a_prompt_that_would_be_taken_for_a_decode_declines(
    query_lens: list[int], computed: list[int], cuts: list[int]
) -> None:
    decline = check(query_lens, computed, *cuts)
    assert decline is not None
    assert decline.reason == REASON


@pytest.mark.parametrize(
    ("query_lens", "computed", "cuts"),
    [
        ([1, 1, 20], [7, 9, 0], [2]),  # decodes
        ([20, 1], [0, 0], [10]),  # after a prefill
        ([20, 30], [0, 0], [21]),
        ([20], [0], [19]),  # the last token of a prompt goes on from the state of the others
        ([20, 1], [0, 30], [20]),
        ([1], [0], []),  # a step that is not cut: other micro-batches are of padding
    ],
)
def test_all_other_pieces_are_fine(query_lens: list[int], computed: list[int], cuts: list[int]) -> None:
    assert check(query_lens, computed, *cuts) is None


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    query_lens = draw(st.lists(st.integers(2, 12), min_size=1, max_size=4))
    computed = [draw(st.integers(0, 20)) for _ in query_lens]
    tokens = sum(query_lens)
    return query_lens, computed, sorted(draw(st.sets(st.integers(1, tokens - 1), min_size=1, max_size=3)))


@given(cut_batches(), st.integers(1, 6))
def test_every_piece_of_a_request_finds_its_state_where_the_unsplit_step_does(
    batch: tuple[list[int], list[int], list[int]], block_size: int
) -> None:
    """By the rule of vLLM's `mamba_get_block_table_tensor`: in the block of the last token, by the piece's length."""
    query_lens, computed, cuts = batch
    blocks = -(-32 // block_size)
    table = torch.arange(len(query_lens) * blocks, dtype=torch.int32).reshape(len(query_lens), blocks)
    common = make_common(query_lens, computed, block_table_tensor=table)
    slices = slice_batch(Batch(tuple(query_lens), sum(query_lens), decode_len=0), cuts)
    parts = keep_places(common, slices, slice_common_metadata(common, slices), block_size)
    for piece, part in zip(slices, parts, strict=True):
        for row, request in enumerate(range(piece.first_request, piece.last_request)):
            found = int(part.block_table_tensor[row, (int(part.seq_lens_cpu_upper_bound[row]) - 1) // block_size])
            assert found == int(table[request, (computed[request] + query_lens[request] - 1) // block_size])
    assert torch.equal(common.block_table_tensor, torch.arange(table.numel(), dtype=torch.int32).reshape(table.shape))


def test_arguments_with_an_entry_for_each_request_are_sliced() -> None:
    accepted, drafts = torch.tensor([1, 2, 3]), torch.tensor([4, 5, -1])
    arguments: dict[str, Any] = {
        "num_accepted_tokens": accepted,
        "num_decode_draft_tokens_cpu": drafts,
        "fast_build": True,
    }
    _, second = cut(9, query_lens=[5, 4, 6])
    found = slice_arguments(arguments, second)
    assert not isinstance(found, Decline)
    assert found["num_accepted_tokens"].tolist() == [3]
    assert found["num_decode_draft_tokens_cpu"].tolist() == [-1]
    assert found["fast_build"] is True
    assert slice_arguments({"num_accepted_tokens": None}, second) == {"num_accepted_tokens": None}


@pytest.mark.parametrize(("total", "expected"), [(3, [1, 2]), (2, [1, 1]), (1, [1, 0])])
def test_each_slice_is_told_how_many_of_its_requests_are_not_padding(total: int, expected: list[int]) -> None:
    slices = cut(5, query_lens=[5, 4, 6])
    found = [slice_arguments({"num_actual_reqs": total}, piece) for piece in slices]
    assert found == [{"num_actual_reqs": count} for count in expected]


def test_what_builders_of_a_step_leave_for_each_other_is_not_for_a_slice() -> None:
    left: dict[str, Any] = {"cos": torch.ones(8)}
    arguments: dict[str, Any] = {"common_ratio_to_sas_metadata": left, "decode_ratio_to_sas_metadata": {}}
    own: dict[str, Any] = {}
    first, _ = cut(5, query_lens=[5, 4, 6])
    found = [slice_arguments(arguments, first, own), slice_arguments(arguments, first)]
    assert [each["common_ratio_to_sas_metadata"] for each in found if isinstance(each, dict)] == [{}, {}]
    assert isinstance(found[0], dict)
    again = slice_arguments(arguments, first, own)
    assert isinstance(again, dict)
    for name in arguments:
        assert found[0][name] is again[name] is own[name], "of all builders for the slice"
    assert found[0]["common_ratio_to_sas_metadata"] is not found[0]["decode_ratio_to_sas_metadata"]
    assert left, "the step keeps it"


@pytest.mark.parametrize(
    ("drafts", "cuts", "declines"),
    [
        ([2, 2, -1], [3], False),
        ([2, 2, -1], [2], True),
        ([2, 2, -1], [3, 5], True),
        ([2, 2, -1], [9], False),
        (None, [2], False),
    ],
)
def test_a_decode_with_drafts_is_not_cut_inside(drafts: list[int] | None, cuts: list[int], declines: bool) -> None:
    query_lens = [3, 3, 20]
    arguments = {"num_decode_draft_tokens_cpu": None if drafts is None else torch.tensor(drafts)}
    decline = check_drafts(make_common(query_lens, [7, 9, 0]), cut(*cuts, query_lens=query_lens), arguments)
    assert (decline is not None) == declines


def test_an_argument_that_is_not_known_declines_by_name() -> None:
    (first, _) = cut(5, query_lens=[5, 4])
    decline = slice_arguments({"weights": torch.ones(2)}, first)
    assert isinstance(decline, Decline)
    assert decline.detail == "weights"
