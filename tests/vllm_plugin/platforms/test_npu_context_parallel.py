"""Context parallel sparse attention of vllm-ascend, run without what makes all tokens of each rank's chunk."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import run_on_chunk
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

X = torch.ones(3, 2)


class AscendSFADSACPImpl:
    """As from 0.30 on: the flag of the last projection says whether results are reduced."""

    def __init__(self) -> None:
        self.o_proj = SimpleNamespace(reduce_results=True)


class Attention(torch.nn.Module):
    def __init__(self, impl: Any) -> None:
        super().__init__()
        self.impl = impl

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x + 1 if self.impl.o_proj.reduce_results else x


def get_unreduced(attention: Attention) -> Any:
    return get_platform("npu").get_unreduced(attention, [torch.nn.Identity(), attention])


def test_the_projection_of_attention_leaves_its_reduce_out_for_one_call() -> None:
    attention = Attention(AscendSFADSACPImpl())
    unreduced = get_unreduced(attention)
    assert unreduced(X).equal(X)
    assert attention(X).equal(X + 1)
    with pytest.raises(ValueError, match="not a number"):
        unreduced(X * torch.nan)
    assert attention(X).equal(X + 1)


def test_attention_of_0_23_runs_on_its_chunk() -> None:
    unreduced = get_unreduced(Attention(SimpleNamespace(enable_dsa_cp=True)))
    assert isinstance(unreduced, partial)
    assert unreduced.func is run_on_chunk


def test_other_attention_is_left_to_the_ranks_all_reduce() -> None:
    assert get_unreduced(Attention(SimpleNamespace(enable_dsa_cp=False))) is None
    assert get_platform("npu").get_unreduced(torch.nn.Identity(), [torch.nn.Identity()]) is None
