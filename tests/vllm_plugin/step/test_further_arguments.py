"""Arguments of a forward besides those of every model: an adapter makes inputs of the program of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.adapters.contract import name_argument
from dbo_runtime.batch import BatchSlice
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.model_ends import ModelEnds

TOKENS, SLICES = 5, (BatchSlice(0, 1, 0, 2), BatchSlice(0, 1, 2, 6))  # the last token of these is padding
ROWS = name_argument("rows")


class RowsAdapter:
    """Takes the rows of the step's tokens out of a buffer for more."""

    def take_arguments(self, model: Any, given: Mapping[str, Any], tokens: int) -> dict[str, Any] | Decline:
        if given.keys() != {"rows", "unknown"}:
            return Decline("unknown arguments of forward()", ", ".join(sorted(given)))
        return {ROWS: given["rows"][:tokens]}


def make_program() -> Program:
    p = ProgramBuilder()
    x, _, rows = p.input("x"), p.input("positions", token_dim=-1), p.input(ROWS)
    return p.build(p.compute("add", torch.add, x, rows))


def make_arguments(**further: Any) -> StepArguments:
    return StepArguments(None, torch.arange(TOKENS), None, torch.ones(TOKENS, 2), further)


def test_they_are_cut_and_padded_with_the_tokens() -> None:
    program = make_program()
    assert WHOLE_MODEL.check_program(program) is None
    rows, ends = torch.arange(9.0), ModelEnds(SimpleNamespace(), program, RowsAdapter())  # type: ignore[arg-type]
    arguments = make_arguments(rows=rows, unknown=None)
    assert ends.check(arguments) is None
    schedule = SimpleNamespace(programs=[program] * len(SLICES))
    plan = SimpleNamespace(executor=SimpleNamespace(schedule=schedule), slices=SLICES, nano_batches=())
    inputs = ends.enter(arguments, plan, None)  # type: ignore[arg-type]
    assert [each[-1].tolist() for each in inputs] == [[0.0, 1.0], [2.0, 3.0, 4.0, 4.0]]


@pytest.mark.parametrize(
    ("adapter", "further", "detail"),
    [(RowsAdapter(), {"rows": None, "other": 1}, "other, rows"), (None, {"rows": 1}, "rows")],
    ids=["others", "without such an adapter"],
)
def test_a_step_with_others_is_not_split(adapter: Any, further: dict[str, Any], detail: str) -> None:
    ends = ModelEnds(SimpleNamespace(), make_program(), adapter)  # type: ignore[arg-type]
    assert ends.check(make_arguments(**further)) == Decline("unknown arguments of forward()", detail)
