"""What is said of an op whose function fails while an adapter is verified."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.verify.watched_run import run_watched


def attend(positions: Any, x: Any) -> Any:
    return x + positions


def declare(*, forget: bool) -> Program:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions")
    with p.layer(3):
        given = (x,) if forget else (positions, x)
        out = p.compute("attention", attend, *given)
    return p.build(out)


def test_a_function_that_lacks_an_argument_is_named_with_its_op_and_line() -> None:
    inputs = [torch.zeros(4, 2), torch.zeros(4, 1)]
    run_watched([declare(forget=False)], [inputs])
    with pytest.raises(ProgramError) as raised:
        run_watched([declare(forget=True)], [inputs])
    said = str(raised.value)
    assert "TypeError: attend() missing 1 required positional argument: 'x'" in said
    assert "op 'attention', layer 3, micro-batch 0" in said
    assert f"declared at {__file__}:" in said
    assert "[4, 2]" in said
    assert isinstance(raised.value.__cause__, TypeError)


def test_shapes_that_do_not_fit_are_shown() -> None:
    with pytest.raises(ProgramError, match=r"(?s)RuntimeError: The size of tensor .*%0\S* \[3, 2\]") as raised:
        run_watched([declare(forget=False)], [[torch.zeros(3, 2), torch.zeros(4, 1)]])
    assert "op 'attention'" in str(raised.value)
