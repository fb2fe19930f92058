"""Programs cut into nano-batches compute what the program computes, in every order and on every lane."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import SIZES, NanoProgram, Rows, cut_program, group_outputs
from dbo_runtime.ir.policies import alternate, get_policy, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate, validate_collectives

Cells = list[int]
EXECUTORS = pytest.mark.parametrize("make", [Executor, GeneratedExecutor])
POLICIES = st.sampled_from(
    [("sequential", 0), ("alternate", 0), ("staggered", 1), ("staggered", 2), ("latest_first", 0)]
)


def join(parts: Sequence[Cells]) -> Cells:
    return [*itertools.chain.from_iterable(parts)]


def cut(cells: Cells, sizes: Sequence[int]) -> list[Cells]:
    edges = [0, *itertools.accumulate(sizes)]
    if edges[-1] != len(cells):
        raise ValueError(f"{len(cells)} rows cannot be cut into {sizes}")
    return [cells[first:last] for first, last in itertools.pairwise(edges)]


ROWS = Rows(join, cut)


def per_token(salt: int, outputs: int, overwrites: bool) -> Callable[..., Any]:
    """Return a function whose row i depends on row i of what it reads; it may change its first argument in place."""

    def run(*reads: Cells) -> Any:
        rows = [hash((salt, *row)) for row in zip(*reads, strict=True)]
        if overwrites:
            reads[0][:] = rows
        results = [reads[0] if overwrites else rows, *([row + n for row in rows] for n in range(1, outputs))]
        return results[0] if outputs == 1 else tuple(results[:outputs])

    return run


def over_all(salt: int, outputs: int, overwrites: bool) -> Callable[..., Any]:
    """Return a function whose row i depends on all rows before it, like attention, and on the number of rows."""

    def run(*reads: Cells) -> Any:
        rows, total = [], hash((salt, len(reads[0])))
        for row in zip(*reads, strict=True):
            total = hash((total, *row))
            rows.append(total)
        if overwrites:
            reads[0][:] = rows
        results = [reads[0] if overwrites else rows, *([row + n for row in rows] for n in range(1, outputs))]
        return results[0] if outputs == 1 else tuple(results[:outputs])

    return run


def record_divided(salt: int, reads: int, outputs: int) -> Program:
    """Return what an op is divided into: as in attention, ops before and after the joint one are token-wise."""
    p = ProgramBuilder()
    *queries, kept = p.compute(
        f"before{salt}", per_token(salt, 3, False), *(p.input(str(n)) for n in range(reads)), outputs=3, token_wise=True
    )
    core = p.compute(f"core{salt}", over_all(salt + 1, 1, False), *queries, ordered=True)
    after = p.compute(f"after{salt}", per_token(salt + 2, outputs, False), core, kept, outputs=outputs, token_wise=True)
    return p.build(*(after if outputs > 1 else (after,)))


def run_divided(divided: Program) -> Callable[..., Any]:
    """Return a function that computes an op by those that it is divided into, one after the other."""

    def run(*reads: Cells) -> Any:
        (results,) = run_sequential([divided], [reads])
        return results if len(results) > 1 else results[0]

    return run


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to nine ops on two lanes, in layers; at least the first is token-wise."""
    p = ProgramBuilder()
    readable = [p.input("x"), p.input("positions")]
    for number in range(draw(st.integers(1, 9))):
        token_wise = number == 0 or draw(st.booleans())
        reads = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3, unique=True))
        overwrites = draw(st.booleans())
        outputs = draw(st.sampled_from([1, 1, 2]))
        lane = draw(st.sampled_from(["compute", "compute", "comm"]))
        make = per_token if token_wise else over_all
        is_divided = not token_wise and not overwrites and draw(st.booleans())
        divided = record_divided(number, len(reads), outputs) if is_divided else None
        written = p.op(
            f"op{number}",
            make(number, outputs, overwrites) if divided is None else run_divided(divided),
            *reads,
            divided=divided,
            lane=lane,
            outputs=outputs,
            ordered=not token_wise,
            communicator="group" if lane == "comm" else None,
            overwrites=tuple(reads[:1]) if overwrites else (),
            token_wise=token_wise,
        )
        readable = [value for value in readable if not (overwrites and value == reads[0])]
        readable += written if outputs > 1 else [written]
    count = draw(st.integers(1, min(3, len(readable))))
    return p.build(*readable[-count:])


def make_inputs(tokens: int) -> dict[str, Cells]:
    return {"x": [*range(tokens)], "positions": [7 * token for token in range(tokens)]}


def run_cut(nano: NanoProgram, sizes: Sequence[int], make: Callable[..., Executor] | None) -> list[tuple[Cells, ...]]:
    """Return the outputs of each nano-batch, by an executor on the CPU, or one op after the other."""
    names = {value.name for value in nano.program.inputs}
    given = {name: cells for name, cells in {**make_inputs(sum(sizes)), SIZES: sizes}.items() if name in names}
    edges = [0, *itertools.accumulate(sizes)]
    slices = [slice(first, last) for first, last in itertools.pairwise(edges)]
    inputs = [nano.program.cut_inputs(given, slice(0, sum(sizes)), slice(0, 1), slices)]
    if make is None:
        outputs = run_sequential([nano.program], inputs)
    else:
        schedule = lower([nano.program], sequential([nano.program]))
        validate(schedule)
        validate_collectives(schedule)
        device = CpuDevice()
        try:
            outputs = make(schedule, device, EventTable(device)).run(inputs)
        finally:
            device.close()
    return group_outputs(outputs[0], len(sizes))


def join_outputs(outputs: Sequence[Sequence[Cells]]) -> list[Cells]:
    return [join(parts) for parts in zip(*outputs, strict=True)]


@given(programs(), st.lists(st.integers(1, 5), min_size=2, max_size=4), POLICIES)
def test_a_cut_program_computes_what_the_program_computes(
    program: Program, sizes: list[int], policy: tuple[str, int]
) -> None:
    given = make_inputs(sum(sizes))
    (expected,) = run_sequential([program], [program.order_inputs(given)])
    for same in (program, divide_ops(program)):
        nano = cut_program(same, len(sizes), ROWS, get_policy(*policy))
        assert join_outputs(run_cut(nano, sizes, None)) == [*expected]


@EXECUTORS
@given(program=programs(), sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), policy=POLICIES)
def test_lanes_compute_the_same(
    make: Callable[..., Executor], program: Program, sizes: list[int], policy: tuple[str, int]
) -> None:
    given = make_inputs(sum(sizes))
    (expected,) = run_sequential([program], [program.order_inputs(given)])
    nano = cut_program(divide_ops(program), len(sizes), ROWS, get_policy(*policy))
    assert join_outputs(run_cut(nano, sizes, make)) == [*expected]


def record_layer(**of_norm: Any) -> Program:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions")
    with p.layer(0):
        x = p.compute("norm", per_token(1, 1, False), x, **{"token_wise": True, **of_norm})
        x = p.compute("attention", over_all(2, 1, False), positions, x, ordered=True)
        x = p.comm("attn_reduce", per_token(3, 1, True), x, overwrites=(x,), token_wise=True)
        x = p.compute("mlp", per_token(4, 1, False), x, token_wise=True)
        x = p.comm("mlp_reduce", per_token(5, 1, True), x, overwrites=(x,), token_wise=True)
    return p.build(x)


def test_joint_ops_run_once_and_others_take_turns_where_they_communicate() -> None:
    nano = cut_program(record_layer(), 2, ROWS, alternate)
    assert [op.label for op in nano.program.ops] == [
        "L0.norm#0",
        "L0.norm#1",
        "L0.attention",
        "L0.attn_reduce#0",
        "L0.attn_reduce#1",
        "L0.mlp#0",
        "L0.mlp_reduce#0",
        "L0.mlp#1",
        "L0.mlp_reduce#1",
    ]


def test_the_ops_of_a_divided_one_take_turns_with_what_communicates_after_it() -> None:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions")
    with p.layer(0):
        divided = record_divided(2, 2, 1)
        x = p.compute("attention", run_divided(divided), positions, x, ordered=True, divided=divided)
        x = p.comm("attn_reduce", per_token(5, 1, True), x, overwrites=(x,), token_wise=True)
    program = p.build(x)
    assert [op.label for op in program.ops] == ["L0.attention", "L0.attn_reduce"]  # in micro-batches
    assert [op.label for op in cut_program(divide_ops(program), 2, ROWS, alternate).program.ops] == [
        "L0.before2#0",
        "L0.before2#1",
        "L0.core2",
        "L0.after2#0",
        "L0.attn_reduce#0",
        "L0.after2#1",
        "L0.attn_reduce#1",
    ]


def test_a_division_with_other_numbers_of_values_is_refused() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    message = r"op 'attention' reads 1 values and writes 1, but is divided into ops that read 2 and write 1; give both"
    with pytest.raises(ProgramError, match=message + r" the same, in the same order\. \(.*test_nano_batches"):
        p.compute("attention", over_all(1, 1, False), x, divided=record_divided(1, 2, 1))


def test_ops_keep_what_they_were_declared_with() -> None:
    program = record_layer()
    declared = {op.name: op for op in program.ops}
    for op in cut_program(program, 3, ROWS).program.ops:
        own = declared[op.name]
        assert (op.lane, op.layer, op.communicator, op.declared_at) == (
            own.lane,
            own.layer,
            own.communicator,
            own.declared_at,
        )
        assert op.ordered == own.ordered


def test_an_input_is_cut_for_ops_per_token_and_whole_for_joint_ones() -> None:
    inputs = cut_program(record_layer(), 2, ROWS).program.inputs
    assert [(value.name, value.nano_batch) for value in inputs] == [
        (SIZES, None),
        ("x", 0),
        ("x", 1),
        ("positions", None),
    ]


def test_a_joint_op_that_reads_nothing_of_a_region_does_not_end_it() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    x = p.comm("send", per_token(1, 1, False), x, token_wise=True)
    slots = p.compute("slots", lambda: [5, 5, 5, 5])
    x = p.compute("mlp", per_token(2, 1, False), x, token_wise=True)
    nano = cut_program(p.build(p.compute("attention", over_all(3, 1, False), x, slots, ordered=True)), 2, ROWS)
    labels = [op.label for op in nano.program.ops]
    assert labels == ["slots", "send#0", "send#1", "mlp#0", "mlp#1", "attention"]


def test_contexts_are_numbered_by_nano_batch() -> None:
    nano = cut_program(record_layer(), 2, ROWS).program
    programs = nano, record_layer()
    schedule = lower(programs, sequential(programs))
    entered: list[int] = []
    device = CpuDevice()
    try:
        sizes = [2, 3]
        given = {**make_inputs(5), SIZES: sizes}
        inputs = [
            nano.cut_inputs(given, slice(0, 5), slice(0, 1), [slice(0, 2), slice(2, 5)]),
            record_layer().order_inputs(make_inputs(5)),
        ]
        GeneratedExecutor(schedule, device, EventTable(device)).run(inputs, entered.append)
    finally:
        device.close()
    assert entered == [1, 2, 0, 1, 2, 1, 2, 3]


def test_an_error_says_which_nano_batch_it_was() -> None:
    def fail(cells: Cells) -> Cells:
        if 3 in cells:
            raise RuntimeError("boom")
        return cells

    p = ProgramBuilder()
    x = p.input("x")
    nano = cut_program(p.build(p.compute("mlp", fail, x, token_wise=True)), 2, ROWS)
    with pytest.raises(RuntimeError, match="boom") as caught:
        run_cut(nano, [2, 2], GeneratedExecutor)
    assert "micro-batch 0, nano-batch 1" in "".join(caught.value.__notes__)


def test_a_program_without_ops_per_token_is_refused() -> None:
    p = ProgramBuilder()
    with pytest.raises(ProgramError, match="no op of the program is token-wise"):
        cut_program(p.build(p.compute("attention", over_all(1, 1, False), p.input("x"), ordered=True)), 2, ROWS)


def test_an_ordered_op_is_not_token_wise() -> None:
    p = ProgramBuilder()
    with pytest.raises(ProgramError, match=r"'attention' is ordered.*not token-wise.*test_nano_batches.py"):
        p.compute("attention", abs, p.input("x"), ordered=True, token_wise=True)


def test_a_value_that_cannot_be_joined_is_an_error_with_both_lines() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    routing = p.compute("gate", len, x, token_wise=True)
    nano = cut_program(p.build(p.compute("experts", over_all(1, 1, False), routing)), 2, ROWS)
    with pytest.raises(ProgramError, match=r"'experts' takes all tokens, but %1:gate is not rows.*:\d+\).*:\d+\)"):
        run_cut(nano, [2, 2], GeneratedExecutor)


def test_a_value_that_cannot_be_cut_is_an_error() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    total = p.compute("sum", sum, x)
    nano = cut_program(p.build(p.compute("mlp", per_token(1, 1, False), total, token_wise=True)), 2, ROWS)
    with pytest.raises(ProgramError, match=r"a result of op 'sum', is not rows.*nano-batches of \[2, 2\]"):
        run_cut(nano, [2, 2], GeneratedExecutor)


def test_an_input_that_is_cut_by_requests_is_not_for_ops_per_token() -> None:
    p = ProgramBuilder()
    grids = p.input("grids", token_dim=None, request_dim=0)
    program = p.build(p.compute("embed", per_token(1, 1, False), grids, token_wise=True))
    with pytest.raises(ProgramError, match=r"'embed' is declared token-wise, but reads the input 'grids'"):
        cut_program(program, 2, ROWS)


def test_an_input_that_is_overwritten_in_parts_is_joined_along_the_first_dimension_only() -> None:
    p = ProgramBuilder()
    positions = p.input("positions", token_dim=-1)
    attended = p.compute("attention", over_all(1, 1, False), positions)
    moved = p.compute("rotate", per_token(2, 1, True), positions, overwrites=(positions,), token_wise=True)
    with pytest.raises(ProgramError, match=r"'attention' takes all of the input 'positions', which 'rotate' \("):
        cut_program(p.build(attended, moved), 2, ROWS)


def test_an_input_that_is_not_cut_is_shared_unless_it_is_overwritten() -> None:
    p = ProgramBuilder()
    x, scale = p.input("x"), p.input("scale", token_dim=None)
    shared = p.build(p.compute("scaled", lambda x, scale: [row * scale for row in x], x, scale, token_wise=True))
    nano = cut_program(shared, 2, ROWS)
    inputs = [
        nano.program.cut_inputs(
            {"x": [1, 2, 3], "scale": 10, SIZES: [1, 2]}, slice(0, 3), slice(0, 1), [slice(0, 1), slice(1, 3)]
        )
    ]
    assert group_outputs(run_sequential([nano.program], inputs)[0], 2) == [([10],), ([20, 30],)]
    p = ProgramBuilder()
    scale = p.input("scale", token_dim=None)
    overwritten = p.build(p.compute("scaled", lambda scale: scale, scale, overwrites=(scale,), token_wise=True))
    with pytest.raises(ProgramError, match="overwrites the input 'scale'"):
        cut_program(overwritten, 2, ROWS)
