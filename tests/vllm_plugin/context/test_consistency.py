"""Metadata of micro-batches that does not fit their slices is refused, with the figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.batch import BatchSlice
from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.context.consistency import check_contexts

SLICES = [BatchSlice(0, 1, 0, 4), BatchSlice(0, 2, 4, 10)]  # the first request is cut after four of its seven tokens


def make_contexts(**changes: Any) -> list[Any]:
    """Return contexts of both slices, of the second with other fields."""
    first = {"num_actual_tokens": 4, "query_start_loc": torch.tensor([0, 4]), "seq_lens": torch.tensor([9])}
    second = {"num_actual_tokens": 6, "query_start_loc": torch.tensor([0, 3, 6]), "seq_lens": torch.tensor([12, 3])}
    return [
        SimpleNamespace(attn_metadata={"layer.0": SimpleNamespace(**fields)})
        for fields in (first, {**second, **changes})
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_actual_tokens": None},
        {"query_start_loc": None},
        {"query_start_loc": torch.tensor([0, 3, 6, 6]), "seq_lens": torch.tensor([12, 3, 0])},  # a padded request
        {"seq_lens": None},
    ],
    ids=["right", "no tokens", "no starts", "padded", "no lengths"],
)
def test_what_fits_passes(changes: dict[str, Any]) -> None:
    check_contexts(make_contexts(**changes), SLICES)
    check_contexts([SimpleNamespace(attn_metadata=None)] * 2, SLICES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_actual_tokens": 7}, "it has 7 tokens, of 6"),
        ({"num_actual_tokens": 5}, "queries end at token 6, of 5"),
        ({"query_start_loc": torch.tensor([0, 3, 7])}, "queries end at token 7, of 6"),
        ({"query_start_loc": torch.tensor([1, 3, 6])}, r"queries start at tokens \[1, 3, 6\]"),
        ({"query_start_loc": torch.tensor([0, 6, 3])}, r"queries start at tokens \[0, 6, 3\]"),
        ({"query_start_loc": torch.tensor([0, 6])}, "it has 1 requests, of 2"),
        (
            {"seq_lens": torch.tensor([2, 3])},
            r"sequences of \[2, 3\] tokens are shorter than their queries, of \[3, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_micro_batch_and_figures(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SplitError, match=said) as raised:
        check_contexts(make_contexts(**changes), SLICES)
    assert "micro-batch 1 of tokens 4 to 9 has attention metadata (layer layer.0)" in str(raised.value)
