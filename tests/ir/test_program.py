from __future__ import annotations

import copy
import inspect
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.values import Value


def find_line(up: int) -> str:
    """Return `file:line` of the line so many lines above the caller's, the way errors name it."""
    return f"{__file__}:{inspect.stack()[1].lineno - up}"


def same(*values: Any) -> Any:
    return values


@pytest.fixture
def p() -> ProgramBuilder:
    return ProgramBuilder()


def test_an_op_carries_what_was_declared(p: ProgramBuilder) -> None:
    x, y = p.input("x"), p.input("y")
    with p.layer(3):
        a, b = p.op(
            "mix", same, x, y, lane="aux", outputs=2, ordered=True, exclusive="buffer", communicator="group",
            overwrites=(y,), host_sync=True,
        )  # fmt: skip
    (op,) = p.build(a).ops
    assert (op.name, op.lane, op.fn, op.layer, op.label) == ("mix", "aux", same, 3, "L3.mix")
    assert (op.reads, op.writes, op.overwrites) == ((x, y), (a, b), (y,))
    assert (op.ordered, op.exclusive, op.communicator, op.host_sync) == (True, "buffer", "group", True)
    assert op.declared_at.startswith(f"{__file__}:")


def test_compute_and_comm_run_on_their_lanes_and_comm_names_its_communicator(p: ProgramBuilder) -> None:
    x = p.compute("a", same, p.input("x"))
    x = p.comm("b", same, x)
    x = p.comm("c", same, x, communicator="experts")
    ops = p.build(x).ops
    assert [(op.lane, op.communicator) for op in ops] == [(COMPUTE, None), (COMM, COMM), (COMM, "experts")]


def test_compute_is_the_first_lane_even_if_another_is_used_first(p: ProgramBuilder) -> None:
    x = p.comm("a", same, p.input("x"))
    assert p.build(p.compute("b", same, x)).lanes == (COMPUTE, COMM)


def test_an_op_may_write_nothing_one_value_or_several(p: ProgramBuilder) -> None:
    x = p.input("x")
    assert p.compute("none", same, x, outputs=0) == ()
    assert isinstance(p.compute("one", same, x), Value)
    assert len(p.compute("three", same, x, outputs=3)) == 3


def test_a_name_may_return_in_another_layer(p: ProgramBuilder) -> None:
    x = p.input("x")
    for index in range(2):
        with p.layer(index):
            x = p.compute("norm", same, x)
    assert [op.label for op in p.build(x).ops] == ["L0.norm", "L1.norm"]


def test_outputs_that_are_named_come_after_those_that_are_returned(p: ProgramBuilder) -> None:
    x, residual = p.compute("norm", same, p.input("x"), outputs=2)
    p.output("residual", residual)
    hidden = p.compute("mlp", same, x)
    program = p.build(hidden)
    assert (program.outputs, program.named) == ((hidden, residual), ("residual",))
    plain = ProgramBuilder()
    assert plain.build(plain.compute("mlp", same, plain.input("x"))).named == ()


def test_an_output_is_named_once_and_must_last_to_the_end(p: ProgramBuilder) -> None:
    x = p.compute("norm", same, p.input("x"))
    p.output("residual", x)
    with pytest.raises(ProgramError, match=r"output 'residual' was declared already, as %1:norm") as raised:
        p.output("residual", x)
    assert find_line(1) in str(raised.value)
    y = p.compute("mlp", same, x, overwrites=(x,))
    with pytest.raises(ProgramError, match=r"the program's result reads %1:norm after op 'mlp'"):
        p.build(y)


def test_results_of_an_op_that_overwrites_live_where_the_overwritten_values_do(p: ProgramBuilder) -> None:
    x = p.input("x")
    made = p.op("make", same, x, lane="aux")
    reduced = p.comm("reduce", same, made, overwrites=(made,))
    final = p.compute("final", same, reduced)
    owning = p.build(final).get_owning_lanes()
    assert owning[x] == {COMPUTE}
    assert owning[made] == {"aux"}
    assert owning[reduced] == {COMM, "aux"}
    assert owning[final] == {COMPUTE}


def test_an_input_after_the_first_op_is_refused(p: ProgramBuilder) -> None:
    p.compute("a", same)
    with pytest.raises(ProgramError) as raised:
        p.input("late")
    assert "input 'late' comes after the first op" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_an_input_of_a_name_that_another_has_is_refused(p: ProgramBuilder) -> None:
    p.input("x")
    with pytest.raises(ProgramError) as raised:
        p.input("x")
    assert "input 'x' was declared already" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


TOKENS, REQUESTS = slice(1, 3), slice(0, 1)


@pytest.mark.parametrize(
    ("cut", "given", "expected"),
    [
        ({}, list("abcd"), list("bc")),
        ({"token_dim": 0}, np.arange(8).reshape(4, 2), np.array([[2, 3], [4, 5]])),
        ({"token_dim": 1}, np.arange(8).reshape(2, 4), np.array([[1, 2], [5, 6]])),
        ({"token_dim": -1}, np.arange(4), np.array([1, 2])),
        ({"token_dim": -1}, np.arange(8).reshape(2, 4), np.array([[1, 2], [5, 6]])),
        ({"token_dim": -2}, np.arange(8).reshape(4, 2), np.array([[2, 3], [4, 5]])),
        ({"token_dim": None, "request_dim": 0}, ["one", "two"], ["one"]),
        ({"token_dim": None, "request_dim": 1}, np.arange(4).reshape(2, 2), np.array([[0], [2]])),
        ({"token_dim": None}, 7, 7),
    ],
)
def test_an_input_is_cut_along_the_dimension_it_declares(
    p: ProgramBuilder, cut: Any, given: Any, expected: Any
) -> None:
    x, other = p.input("x", **cut), p.input("other", token_dim=None)
    program = p.build(p.compute("a", same, x, other))
    actual, rest = program.cut_inputs({"other": "all of it", "x": given}, TOKENS, REQUESTS)
    assert rest == "all of it"
    assert np.array_equal(actual, expected)
    assert program.order_inputs({"other": 1, "x": 2}) == (2, 1)


@pytest.mark.parametrize("given", [{}, {"x": 1}, {"x": 1, "y": 2, "z": 3}])
def test_inputs_of_other_names_are_refused(p: ProgramBuilder, given: dict[str, int]) -> None:
    program = p.build(p.compute("a", same, p.input("x"), p.input("y")))
    with pytest.raises(ProgramError, match=r"takes the inputs x, y, but is given"):
        program.cut_inputs(given, TOKENS, REQUESTS)


def test_a_layer_inside_a_layer_is_refused(p: ProgramBuilder) -> None:
    with p.layer(0), pytest.raises(ProgramError) as raised, p.layer(1):
        pass
    assert "layer 1 opens inside layer 0" in str(raised.value)
    assert find_line(up=3) in str(raised.value)


def test_a_layer_is_closed_after_an_error_inside(p: ProgramBuilder) -> None:
    with pytest.raises(ZeroDivisionError), p.layer(0):
        raise ZeroDivisionError
    with p.layer(1):
        x = p.compute("a", same)
    assert p.build(x).ops[0].layer == 1


@pytest.mark.parametrize("word", ["two words", "", "L0.norm", "a/0", 5, None])
def test_a_name_that_is_no_plain_word_is_refused(p: ProgramBuilder, word: Any) -> None:
    with pytest.raises(ProgramError) as raised:
        p.compute(word, same)
    assert f"op name {word!r} must be a plain word" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_a_lane_that_is_no_plain_word_is_refused(p: ProgramBuilder) -> None:
    with pytest.raises(ProgramError) as raised:
        p.op("a", same, lane="side lane")
    assert "lane 'side lane' must be a plain word" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_something_that_cannot_be_called_is_refused(p: ProgramBuilder) -> None:
    with pytest.raises(ProgramError) as raised:
        p.compute("a", "fn")  # type: ignore[arg-type]  # wrong on purpose
    assert "op 'a' needs a function to call, not 'fn'" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_a_name_taken_twice_is_refused_with_both_lines(p: ProgramBuilder) -> None:
    with p.layer(0):
        p.compute("norm", same)
        with pytest.raises(ProgramError) as raised:
            p.compute("norm", same)
    assert f"op 'L0.norm' was declared already at {find_line(up=3)}" in str(raised.value)
    assert f"({find_line(up=2)})" in str(raised.value)


def test_reading_what_is_no_value_is_refused(p: ProgramBuilder) -> None:
    with pytest.raises(ProgramError) as raised:
        p.compute("a", same, 3.5)  # type: ignore[arg-type]  # wrong on purpose
    assert "op 'a' reads 3.5, which is no value of the program" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_reading_another_programs_value_is_refused(p: ProgramBuilder) -> None:
    p.input("x")
    foreign = ProgramBuilder().input("x")
    with pytest.raises(ProgramError) as raised:
        p.compute("a", same, foreign)
    assert "op 'a' reads %0:x, which belongs to another program" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_overwriting_what_is_not_read_is_refused(p: ProgramBuilder) -> None:
    x, y = p.input("x"), p.input("y")
    with pytest.raises(ProgramError) as raised:
        p.compute("a", same, x, overwrites=(y,))
    assert "op 'a' overwrites %1:y, which it does not read" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_reading_an_overwritten_value_is_refused_with_the_op_that_overwrote_it(p: ProgramBuilder) -> None:
    x = p.input("x")
    p.compute("add_norm", same, x, overwrites=(x,))
    with pytest.raises(ProgramError) as raised:
        p.compute("late", same, x)
    assert f"op 'late' reads %0:x after op 'add_norm' ({find_line(up=3)}) overwrote it" in str(raised.value)
    assert f"({find_line(up=2)})" in str(raised.value)


def test_returning_an_overwritten_value_is_refused(p: ProgramBuilder) -> None:
    x = p.input("x")
    p.compute("add_norm", same, x, overwrites=(x,))
    with pytest.raises(ProgramError) as raised:
        p.build(x)
    assert "the program's result reads %0:x after op 'add_norm'" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


def test_returning_what_is_no_value_is_refused(p: ProgramBuilder) -> None:
    x = p.compute("a", same)
    with pytest.raises(ProgramError, match="the program's result reads None, which is no value"):
        p.build(x, None)  # type: ignore[arg-type]  # wrong on purpose


def test_a_program_without_ops_is_refused(p: ProgramBuilder) -> None:
    x = p.input("x")
    with pytest.raises(ProgramError) as raised:
        p.build(x)
    assert "the program has no ops" in str(raised.value)
    assert find_line(up=2) in str(raised.value)


COMPUTATIONS: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "x - 1": lambda x: x - 1,
    "1 - x": lambda x: 1 - x,
    "x * 2": lambda x: x * 2,
    "2 * x": lambda x: 2 * x,
    "x / 2": lambda x: x / 2,
    "2 / x": lambda x: 2 / x,
    "x // 2": lambda x: x // 2,
    "x % 2": lambda x: x % 2,
    "x ** 2": lambda x: x**2,
    "x @ x": lambda x: x @ x,
    "-x": operator.neg,
    "x < 1": lambda x: x < 1,
    "x >= 1": lambda x: x >= 1,
    "x[0]": lambda x: x[0],
    "x[:, 1:]": lambda x: x[:, 1:],
    "if x": bool,
    "len(x)": len,
    "*x": list,
    "float(x)": float,
    "int(x)": int,
    "x.shape": lambda x: x.shape,
    "x.to('cpu')": lambda x: x.to("cpu"),
    "x & x": lambda x: x & x,
}


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS.keys())
def test_computing_with_a_value_is_refused(p: ProgramBuilder, compute: Callable[[Any], Any]) -> None:
    x = p.input("x")
    with pytest.raises(ProgramError, match=r"%0:x is a value of a program, not a tensor.*Move the computation"):
        compute(x)


def test_the_refusal_names_the_line_that_computes(p: ProgramBuilder) -> None:
    x = p.input("x")
    with pytest.raises(ProgramError) as raised:
        x * 2
    assert find_line(up=1) in str(raised.value)


def test_values_can_be_copied_and_compared(p: ProgramBuilder) -> None:
    x, y = p.input("x"), p.input("y")
    assert copy.deepcopy(x) == x == pickle.loads(pickle.dumps(x))
    assert x != y
    assert len({x, y}) == 2


def record_concurrent(has_side: bool) -> Program:
    p = ProgramBuilder(has_side)
    x = p.input("x")
    first, second = p.side("first", same, x), p.side("second", same, x)
    return p.build(p.compute("last", lambda a, b: a + b, first, second))


def test_ops_for_the_side_lane_are_on_compute_where_there_is_none() -> None:
    assert [op.lane for op in record_concurrent(has_side=True).ops] == ["side", "side", "compute"]
    assert [op.lane for op in record_concurrent(has_side=False).ops] == ["compute"] * 3
    assert not ProgramBuilder().has_side


def test_folding_puts_the_side_lane_on_compute_but_for_the_ops_that_are_kept() -> None:
    program = record_concurrent(has_side=True)
    folded, kept = program.fold_side(), program.fold_side("second")
    assert folded.lanes == ("compute",)
    assert [op.lane for op in kept.ops] == ["compute", "side", "compute"]
    assert [op.fn for op in folded.ops] == [op.fn for op in program.ops]
    assert folded.fold_side() is folded
    assert (folded.inputs, folded.outputs) == (program.inputs, program.outputs)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"outputs": -1}, r"outputs=-1; it must be from 0 to 1000"),
        ({"outputs": 1001}, r"outputs=1001; it must be from 0 to 1000"),
        ({"outputs": True}, r"outputs=True; it must be from 0 to 1000"),
        ({"exclusive": []}, r"exclusive=\[\]; it must be a name or None"),
        ({"communicator": 1}, r"communicator=1; it must be a name or None"),
        ({"overwrites": ["x"]}, r"overwrites=\['x'\]; it must be a tuple of values"),
        ({"overwrites": ("x",)}, r"overwrites=\('x',\); it must be a tuple of values"),
    ],
)
def test_what_is_declared_of_an_op_has_the_type_that_it_takes(
    p: ProgramBuilder, declared: dict[str, Any], says: str
) -> None:
    x = p.input("x")
    with pytest.raises(ProgramError, match=f"op 'op' has {says}"):
        p.comm("op", abs, x, **declared)


def test_an_op_may_write_a_thousand_values(p: ProgramBuilder) -> None:
    assert len(p.compute("op", list, p.input("x"), outputs=1000)) == 1000
