"""Micro-batches of padding: what they are given, and that nothing of them is left in the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.forward_context import DPMetadata, override_forward_context

from dbo_runtime.batch import Batch, BatchSlice, share_data_parallel
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.vllm_plugin.api.forward_context import NO_SLOT, take_tokens
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.padding import drop_padding, pad_inputs
from tests.support.vllm.forwards import ONE_RANK, Model, Splitter, make_context, make_forward


def make_program() -> Any:
    p = ProgramBuilder()
    values = p.input("x"), p.input("positions", token_dim=-1), p.input("whole", token_dim=None)
    return p.build(p.compute("op", lambda *given: given, *values))


def test_inputs_are_padded_with_their_last_token_along_their_own_dimension() -> None:
    x, positions, whole = torch.rand(2, 4), torch.arange(6).reshape(3, 2), torch.rand(2)
    padded = pad_inputs(make_program(), {"x": x, "positions": positions, "whole": whole}, 4)
    assert torch.equal(padded["x"], x[[0, 1, 1, 1]])
    assert padded["positions"].tolist() == [[0, 1, 1, 1], [2, 3, 3, 3], [4, 5, 5, 5]]
    assert padded["whole"] is whole


def test_inputs_that_are_as_long_as_the_step_are_not_copied() -> None:
    given = {"x": torch.rand(2, 4), "positions": torch.arange(2), "whole": torch.rand(2)}
    assert all(padded is given[name] for name, padded in pad_inputs(make_program(), given, 2).items())


def test_what_is_kept_of_a_step_has_no_slot_and_is_padding_past_its_end() -> None:
    slots = torch.arange(3)
    assert take_tokens(slots, BatchSlice(0, 1, 1, 3), NO_SLOT).tolist() == [1, 2]
    assert take_tokens(slots, BatchSlice(1, 2, 3, 5), NO_SLOT).tolist() == [NO_SLOT, NO_SLOT]
    assert take_tokens(slots > 9, BatchSlice(1, 2, 3, 4), True).tolist() == [True]


def test_outputs_of_padding_are_dropped() -> None:
    slices = (BatchSlice(0, 1, 0, 2), BatchSlice(1, 2, 2, 3), BatchSlice(2, 3, 3, 4))
    assert drop_padding(["a", "b", "c"], slices, 2) == ["a"]
    assert drop_padding(["a", "b", "c"], slices, 4) == ["a", "b", "c"]


@pytest.mark.parametrize("axes", [1, 3])
@given(own=st.integers(1, 9), other=st.integers(1, 9), parts=st.integers(2, 5), is_idle=st.booleans())
def test_a_rank_of_any_size_returns_its_own_tokens_only(
    axes: int, own: int, other: int, parts: int, is_idle: bool
) -> None:
    """The second rank is not there: nothing communicates, and the group has one rank."""
    model = Model()
    splitter: Any = Splitter(Batch((own,), own))
    forward = make_forward(model, splitter)
    forward.decider = StepDecider(forward.runtime, splitter, Agreement(ONE_RANK), "network", rank=0)  # type: ignore[arg-type]
    forward.decider.choose_sizes = lambda tokens: share_data_parallel(tokens, parts)
    context = make_context()
    context.dp_metadata = DPMetadata(torch.tensor([own, other], dtype=torch.int32))
    ids, positions = torch.arange(own), torch.arange(axes * own).reshape(axes, own).squeeze(0)
    with override_forward_context(context):
        found = forward(ids, positions)
    assert torch.equal(found, model.forward(ids, positions))
    shares = share_data_parallel([own, other], parts)
    assert forward.runtime.statistics.split == (not isinstance(shares, Decline))
    assert len(model.seen) == (0 if isinstance(shares, Decline) else len(shares))
