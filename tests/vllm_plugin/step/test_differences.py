"""What DBO_CHECK takes for rounding, and what not."""

from __future__ import annotations

import pytest
import torch

from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.step.differences import compare_results


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    compare_results("hidden states", actual, expected, "cuts at [3]", "DBO_MODE=off serves unsplit")


def make(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 5e-5), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)])
def test_rounding_passes(dtype: torch.dtype, share: float) -> None:
    wanted = make(10, dtype)
    compare(wanted * (1 + share), wanted)
    compare(torch.zeros(3, 4), torch.zeros(3, 4))
    compare(torch.zeros(0, 4), torch.zeros(0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_rounding_does_not_explain_is_refused(dtype: torch.dtype) -> None:
    wanted = make(100, dtype)
    with pytest.raises(SplitError, match=r"of the largest value \(allowed .*; 100 of 100 tokens differ by more\)"):
        compare(wanted.flip(0), wanted)
    for value in (float("nan"), float("inf")):
        broken = wanted.clone()
        broken[7, 3] = value
        with pytest.raises(SplitError):
            compare(broken, wanted)
        with pytest.raises(SplitError):
            compare(wanted, broken)


def test_where_types_are_coarse_a_token_may_have_taken_other_experts() -> None:
    wanted = make(100, torch.bfloat16)
    found = wanted.clone()
    found[:2] *= 0.7
    compare(found, wanted)
    found[2] *= 0.7
    with pytest.raises(SplitError, match="3 of 100 tokens"):
        compare(found, wanted)
    with pytest.raises(SplitError, match="2 of 100 tokens"):
        compare(found[[0, 1, *range(3, 100), 99]].float(), wanted[[0, 1, *range(3, 100), 99]].float())


def test_no_token_may_be_something_else_altogether() -> None:
    wanted = torch.ones(100, 16, dtype=torch.bfloat16)
    found = wanted.clone()
    found[5] = -1
    with pytest.raises(SplitError, match="1 of 100 tokens"):
        compare(found, wanted)
