"""Programs without functions: they come back as they were, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_models.deepseek import DeepseekAdapter
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.render import digest
from dbo_runtime.ir.validate import validate
from dbo_runtime.planner.costs.program_spec import (
    MAX_LAYERS,
    LayerRun,
    OpSpec,
    ProgramSpec,
    build_program,
    describe_program,
    repeat_runs,
)
from tests.support.programs import record_chain, record_three_lanes, record_toy
from tests.support.strategies import programs


def do_nothing(*_: Any) -> None:
    return None


class Experts(SimpleNamespace):
    """A mixture of experts whose parts are never called."""

    has_shared_experts = True
    may_move_to_side = is_fused = is_sequence_parallel = reduces_shared_experts = False
    gate = exchange_sizes = dispatch = shared_experts = experts = combine = merge = staticmethod(do_nothing)


class Collectives:
    """Tensor parallel without *experts*, data and expert parallel with them."""

    def __init__(self, experts: Experts | None) -> None:
        self.experts = experts
        self.reduces = experts is None

    def decompose(self, experts: Any, get_logits: Any = None, takes_chunks: bool = False) -> Experts | None:
        return self.experts

    def divide_attention(self, attention: Any, attend: Any) -> None:
        """Return None: attention stays one op."""

    def without_reduce(self, module: Any) -> Any:
        return module

    all_reduce = staticmethod(do_nothing)


def record_deepseek(experts: Experts | None) -> Program:
    """Return the program of the 61 layers of DeepSeek-V3, the first three of which are dense."""

    class Module:
        __call__ = do_nothing

    def make_layer(index: int) -> SimpleNamespace:
        mlp: Any = Module()
        if index >= 3:
            mlp.experts = Module()
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), do_nothing)
        return SimpleNamespace(**norms, self_attn=do_nothing, mlp=mlp)

    layers = [make_layer(index) for index in range(61)]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers, norm=do_nothing))
    return record_program(DeepseekAdapter(), model, Collectives(experts))


DEEPSEEK = {
    "tensor parallel": record_deepseek(None),
    "expert parallel": record_deepseek(Experts(exchanges_sizes=False)),
    "expert parallel with sizes": record_deepseek(Experts(exchanges_sizes=True)),
}
PROGRAMS = {
    "toy": record_toy(layers=4),
    "three lanes": record_three_lanes(layers=3),
    "chain": record_chain(do_nothing, do_nothing),
    **DEEPSEEK,
}


def strip(program: Program) -> Program:
    """Return the program without what a spec leaves out."""
    ops = tuple(replace(op, fn=do_nothing, declared_at="") for op in program.ops)
    return replace(program, ops=ops)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_comes_back_as_it_was(name: str) -> None:
    program = PROGRAMS[name]
    assert strip(build_program(describe_program(program))) == strip(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_comes_back_has_the_same_schedule(name: str) -> None:
    program = PROGRAMS[name]
    again = build_program(describe_program(program))
    schedule = lower([again] * 2, alternate([again] * 2))
    validate(schedule)
    assert digest(schedule) == digest(lower([program] * 2, alternate([program] * 2)))


@given(programs())
def test_any_program_with_op_names_of_its_own_comes_back_as_it_was(program: Program) -> None:
    assert strip(build_program(describe_program(program))) == strip(program)


@st.composite
def layered_programs(draw: st.DrawFn) -> Program:
    """Up to four layers and ops between them, of few names, that read any value there is, hidden or not."""
    p = ProgramBuilder()
    values = [p.input("a"), p.input("x")]

    def record_ops() -> None:
        for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
            reads = draw(st.lists(st.sampled_from(values[-4:]), max_size=2))
            written = p.compute(name, do_nothing, *reads, outputs=draw(st.sampled_from([1, 1, 2])))
            values.extend(written if isinstance(written, tuple) else [written])

    for index in range(draw(st.integers(1, 4))):
        with p.layer(index):
            record_ops()
    if draw(st.booleans()):
        record_ops()
    return p.build(draw(st.sampled_from(values)))


@given(layered_programs())
def test_a_program_with_layers_comes_back_as_it_was(program: Program) -> None:
    """Also if it reads a value although a later op of the same name has written."""
    spec = describe_program(program)
    assert strip(build_program(spec)) == strip(program)
    assert describe_program(build_program(spec)) == spec
    assert lower_two(build_program(spec)) == lower_two(program)


def lower_two(program: Program) -> str:
    schedule = lower([program] * 2, alternate([program] * 2))
    validate(schedule)
    return digest(schedule)


@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        ("tensor parallel", [1, 2, 58, 1]),
        ("expert parallel", [1, 2, 1, 57, 1]),
        ("expert parallel with sizes", [1, 2, 1, 57, 1]),
    ],
)
def test_equal_layers_become_one_run(name: str, repeats: list[int]) -> None:
    runs = describe_program(DEEPSEEK[name]).runs
    assert [run.repeat for run in runs] == repeats
    assert [run.layered for run in runs] == [True] * (len(runs) - 1) + [False]


def test_values_are_named_after_who_wrote_them() -> None:
    spec = describe_program(record_toy(layers=2))
    first, second, last = spec.runs
    assert spec.inputs == ("x", "positions")
    assert spec.outputs == ("final_norm",)
    assert first.ops[0] == OpSpec("attn_norm", "compute", ("x", "x"), outputs=2, token_wise=True)
    assert first.ops[3] == OpSpec("mlp_norm", "compute", ("attn_reduce", "attn_norm.1"), outputs=2, token_wise=True)
    assert second.ops[0] == OpSpec("attn_norm", "compute", ("mlp_reduce", "mlp_norm.1"), outputs=2, token_wise=True)
    assert last.ops[0].reads == ("mlp_reduce", "mlp_norm.1")


def record_hidden_input() -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    y = p.compute("x", do_nothing, x)
    return p.build(p.compute("add", do_nothing, y, x))


def record_skips(layers: int, back: int) -> Program:
    """Return layers of which each reads what an earlier one wrote, *back* layers before the last one."""
    p = ProgramBuilder()
    values = [p.input("x")]
    for index in range(layers):
        with p.layer(index):
            values.append(p.compute("mlp", do_nothing, values[-1], *values[-1 - back : -back]))
    return p.build(values[-1], values[1])


def record_counted_names() -> Program:
    """Return a program with inputs that are called like references."""
    p = ProgramBuilder()
    values = [p.input(name) for name in ("x", "x~1", "x~0~0", "x.1~2", "~1", "x~")]
    written = p.compute("x", do_nothing, *values, outputs=2)
    return p.build(p.compute("add", do_nothing, *written, *values))


@pytest.mark.parametrize(
    ("program", "reads"),
    [
        (record_hidden_input(), ("x", "x~1")),
        (record_skips(5, 2), ("mlp", "mlp~2")),
        (record_counted_names(), ("x", "x.1", "x~1", "x~1~0", "x~0~0~0", "x.1~2~0", "~1~0", "x~")),
    ],
)
def test_a_read_of_a_value_that_later_writes_hide_counts_them(program: Program, reads: tuple[str, ...]) -> None:
    spec = describe_program(program)
    assert spec.runs[-1].ops[-1].reads == reads
    assert strip(build_program(spec)) == strip(program)


def test_equal_layers_that_read_hidden_values_are_one_run() -> None:
    spec = describe_program(record_skips(9, 2))
    assert [run.repeat for run in spec.runs] == [1, 1, 1, 6]
    assert spec.outputs == ("mlp", "mlp~8")


@pytest.mark.parametrize("reference", ["x~1", "mlp~1", "y~0", "x~9999999", "x~-1", "x~1.0", "x~²"])
def test_references_to_what_nothing_wrote_are_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"program\.outputs has '.*', which no input and no earlier op writes"):
        make_spec(outputs=(reference,))


@pytest.mark.parametrize(
    ("repeats", "says"),
    [([1, 1, 1, 2], ""), ([1, 1, 1, 6], ""), ([1, 1, 2, 6], "before what reads 'mlp~2'")],
)
def test_layers_that_a_read_counts_over_are_not_repeated_otherwise(repeats: Sequence[int], says: str) -> None:
    spec = describe_program(record_skips(9, 2))
    spec = replace(spec, outputs=("mlp",))
    if says:
        with pytest.raises(ConfigError, match=says):
            repeat_runs(spec, repeats)
    else:
        assert [run.repeat for run in repeat_runs(spec, repeats).runs] == repeats


def test_layers_before_a_result_that_they_hide_are_not_repeated_otherwise() -> None:
    with pytest.raises(ConfigError, match="before what reads 'mlp~8'"):
        repeat_runs(describe_program(record_skips(9, 2)), [1, 1, 1, 2])


def record_mlps(layers: list[int]) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for index in layers:
        with p.layer(index):
            x = p.compute("mlp", do_nothing, x)
    return p.build(x)


def test_layers_of_a_stage_of_a_pipeline_are_numbered_from_0() -> None:
    assert describe_program(record_mlps([3, 4])) == describe_program(record_mlps([0, 1]))


@pytest.mark.parametrize("layers", [[0, 2], [1, 0], [3, 2]])
def test_layers_that_do_not_count_up_are_numbered_from_0(layers: list[int]) -> None:
    assert describe_program(record_mlps(layers)) == describe_program(record_mlps([0, 1]))


def test_ops_recorded_from_a_spec_refuse_to_run() -> None:
    program = build_program(describe_program(record_toy(layers=1)))
    with pytest.raises(ProgramError, match="can be planned, but has no functions to run"):
        program.ops[0].fn(1, 2)


def make_spec(
    repeat: int = 1, layered: bool = True, outputs: tuple[str, ...] = ("mlp",), **changes: Any
) -> ProgramSpec:
    op = OpSpec("mlp", "compute", ("x",))._replace(**changes)
    return ProgramSpec(("x",), (LayerRun(repeat, (op,), layered),), outputs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_spec(repeat=0), r"program\.runs\[0\]\.repeat is 0; it must be from 1 to 10000"),
        (lambda: make_spec(repeat=MAX_LAYERS + 1), r"program\.runs\[0\]\.repeat is 10001"),
        (lambda: make_spec(repeat=2, layered=False), r"runs\[0\]\.repeat is 2; it must be 1 for ops outside any"),
        (lambda: make_spec(name="a b"), r"program\.runs\[0\]\.ops\[0\]: op name 'a b' must be a plain word"),
        (lambda: make_spec(lane=""), r"program\.runs\[0\]\.ops\[0\]: lane '' must be a plain word"),
        (lambda: make_spec(reads=("y",)), r"program\.runs\[0\]\.ops\[0\]\.reads has 'y', which no input and no"),
        (lambda: make_spec(overwrites=("y",)), r"program\.runs\[0\]\.ops\[0\]\.overwrites has 'y', which no"),
        (lambda: make_spec(reads=(), overwrites=("x",)), r"runs\[0\]\.ops\[0\]: .* overwrites %0:x, which it does"),
        (lambda: make_spec(outputs=("y",)), r"program\.outputs has 'y', which no input and no earlier op writes"),
        (lambda: make_spec(overwrites=("x",), outputs=("x",)), r"program: the program's result reads %0:x after"),
        (lambda: ProgramSpec(("x",), (LayerRun(1, ()),), ()), r"program\.runs\[0\]\.ops is empty"),
        (lambda: ProgramSpec(("x",), (), ()), "program: the program has no ops"),
        (lambda: ProgramSpec(("x", "y", "x"), (), ()), r"program\.inputs\[2\]: input 'x' was declared already"),
    ],
)
def test_a_spec_of_no_program_cannot_be_made(make: Callable[[], ProgramSpec], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("outputs", [-1, 1001])
def test_impossible_numbers_of_outputs_are_refused(outputs: int) -> None:
    op = OpSpec("mlp", "compute", (), outputs)
    with pytest.raises(ConfigError, match=rf"program\.runs\[0\]\.ops\[0\]\.outputs is {outputs}; it must be from 0"):
        ProgramSpec((), (LayerRun(1, (op,)),), ())


def test_two_ops_of_one_name_in_a_layer_are_refused() -> None:
    op = OpSpec("mlp", "compute", ())
    with pytest.raises(ConfigError, match=r"program\.runs\[0\]\.ops\[1\]: op 'L0.mlp' was declared already"):
        ProgramSpec((), (LayerRun(1, (op, op)),), ())
