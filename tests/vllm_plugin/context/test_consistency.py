"""Metadata of micro-batches that does not fit their slices, or their step, is refused with the figures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.vllm_plugin.context.consistency import find_problem

SLICES = [BatchSlice(0, 1, 0, 4), BatchSlice(0, 2, 4, 10)]  # the first request is cut after four of its seven tokens
LAYER = "layer.0"
TABLE = torch.tensor([[5, 6, 0], [7, 0, 0]])
SLOTS = torch.arange(100, 110)


def make_context(starts: list[int], lengths: list[int], slots: torch.Tensor, **changes: Any) -> Any:
    fields = {
        "num_actual_tokens": starts[-1],
        "query_start_loc": torch.tensor(starts),
        "seq_lens": torch.tensor(lengths),
        "slot_mapping": slots,
        "block_table": TABLE[: len(lengths)],
        "causal": True,
    }
    metadata = SimpleNamespace(**{**fields, **changes})
    return SimpleNamespace(attn_metadata={LAYER: metadata}, slot_mapping={LAYER: slots})


STEP = make_context([0, 7, 10], [12, 3], SLOTS)


def make_contexts(**changes: Any) -> list[Any]:
    """Return contexts of both slices, of the second with other fields."""
    return [
        make_context([0, 4], [9], SLOTS[:4]),
        make_context([0, 3, 6], [12, 3], SLOTS[4:], **changes),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_actual_tokens": None},
        {"query_start_loc": None},
        {
            "query_start_loc": torch.tensor([0, 3, 6, 6]),
            "seq_lens": torch.tensor([12, 3, 0]),
            "block_table": torch.cat([TABLE, torch.zeros(1, 3, dtype=int)]),
        },
        {"seq_lens": None, "causal": None, "slot_mapping": None, "block_table": None},
        {"block_table": TABLE[:, :2]},
    ],
    ids=["right", "no tokens", "no starts", "a padded request", "little is said", "fewer columns"],
)
def test_what_fits_passes(changes: dict[str, Any]) -> None:
    assert find_problem(STEP, make_contexts(**changes), SLICES) == ""


def test_a_query_of_padding_alone_is_none_of_the_slice() -> None:
    """Of vllm-ascend 0.23: the step's metadata has a last query for two tokens of padding, and perhaps no length."""
    step = make_context([0, 7, 10, 12], [12, 3], SLOTS, num_actual_tokens=10)
    slices = [SLICES[0], BatchSlice(0, 3, 4, 12)]
    assert find_problem(step, make_contexts(), slices) == ""
    assert "lengths of sequences" in find_problem(step, make_contexts(seq_lens=torch.tensor([12, 4])), slices)


def test_a_slice_without_requests_of_a_kind_has_nothing_to_compare() -> None:
    empty = make_context([0, 0], [], SLOTS[:0], num_actual_tokens=0)
    assert find_problem(empty, [empty], [BatchSlice(0, 0, 0, 0)]) == ""


def test_padding_is_a_request_of_the_slice_only() -> None:
    """Of a data parallel rank: two tokens of padding, which the metadata of neither step nor slice has."""
    slices = [SLICES[0], BatchSlice(0, 3, 4, 12)]
    assert find_problem(STEP, make_contexts(), slices) == ""


def test_dummy_batches_have_nothing_that_could_be_wrong() -> None:
    assert find_problem(STEP, [SimpleNamespace(attn_metadata=None)] * 2, SLICES) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_actual_tokens": 7}, "it has 7 tokens, of 6"),
        ({"num_actual_tokens": 5}, "queries end at token 6, of 5"),
        ({"query_start_loc": torch.tensor([0, 3, 7])}, "queries end at token 7, of 6"),
        ({"query_start_loc": torch.tensor([1, 3, 6])}, "queries start at tokens [1, 3, 6]"),
        ({"query_start_loc": torch.tensor([0, 6, 3])}, "queries start at tokens [0, 6, 3]"),
        ({"query_start_loc": torch.tensor([0, 6])}, "it has 1 requests, of 2"),
        ({"seq_lens": torch.tensor([2, 3])}, "sequences of [2, 3] tokens are shorter than their queries, of [3, 3]"),
        (
            {"query_start_loc": torch.tensor([0, 2, 6])},
            "sequences of [12, 3] tokens are shorter than their queries, of [2, 4]",
        ),
        (
            {"query_start_loc": torch.tensor([0, 4, 6])},
            "starts of queries are 4 in row 1, where the step has 3",
        ),
        ({"seq_lens": torch.tensor([11, 3])}, "lengths of sequences are 11 in row 0, where the step has 12"),
        ({"slot_mapping": SLOTS[4:] + 1}, "slots are 105 in row 0, where the step has 104"),
        ({"block_table": TABLE.flip(0)}, "blocks are [7, 0, 0] in row 0, where the step has [5, 6, 0]"),
        ({"causal": False}, "causal is False, but True in the step"),
    ],
)
def test_what_does_not_fit_is_named_with_micro_batch_and_figures(changes: dict[str, Any], said: str) -> None:
    problem = find_problem(STEP, make_contexts(**changes), SLICES)
    assert "micro-batch 1 of tokens 4 to 9 has attention metadata (layer layer.0) that does not fit: " in problem
    assert said in problem


def test_a_head_must_not_see_the_tokens_of_its_tail() -> None:
    contexts = [make_context([0, 4], [12], SLOTS[:4]), make_contexts()[1]]
    assert "lengths of sequences are 12 in row 0, where the step has 9" in find_problem(STEP, contexts, SLICES)


def test_slots_of_the_forward_context_are_compared_as_well() -> None:
    contexts = make_contexts()
    contexts[1].slot_mapping = {LAYER: SLOTS[:6]}
    assert "slots are 100 in row 0, where the step has 104" in find_problem(STEP, contexts, SLICES)


@pytest.mark.parametrize("swap", [lambda pair: pair[::-1], lambda pair: [pair[0]] * 2], ids=["swapped", "repeated"])
def test_contexts_of_other_slices_are_found(swap: Callable[[list[Any]], list[Any]]) -> None:
    assert "that does not fit" in find_problem(STEP, swap(make_contexts()), SLICES)
