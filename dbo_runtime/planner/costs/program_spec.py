"""A program without its functions: what a cost file says it measured, and what can be planned with no model at hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.program import Op, Program, ProgramBuilder, Value

# A sketch comes from a file and is unrolled when it is recorded: what no model has is a slip of the pen.
MOST_LAYERS = 10_000
MOST_OUTPUTS = 1_000


class OpSpec(NamedTuple):
    """An op without its function; the attributes are those of `dbo_runtime.program.Op`.

    A value is named after the op or input that wrote it, `attn_norm`, or `attn_norm.1` for an op's second output. Such
    a name means the latest earlier write of that name.
    """

    name: str
    lane: str
    reads: tuple[str, ...]
    outputs: int = 1
    ordered: bool = False
    exclusive: str | None = None
    communicator: str | None = None
    host_sync: bool = False
    overwrites: tuple[str, ...] = ()


class LayerRun(NamedTuple):
    """Equal layers in a row; with *layered* false, ops outside any layer, which do not repeat."""

    repeat: int
    ops: tuple[OpSpec, ...]
    layered: bool = True


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The ops of one micro-batch in program order. Its layers are numbered from 0, wherever the program's begin.

    Attributes:
        inputs: names of the values handed in.
        runs: the ops.
        outputs: names of the values returned.

    Raises:
        ConfigError: if no program can be recorded from it, naming the field.
    """

    inputs: tuple[str, ...]
    runs: tuple[LayerRun, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        build_program(self)


def describe_program(program: Program) -> ProgramSpec:
    """Return the sketch of *program*, from which `build_program` makes an equal one.

    But for the functions, the names that outputs have, and the number of the first layer.

    Raises:
        ProgramError: if it reads a value that a later write of the same name hides, or if its layers do not count up.
    """
    names = _Names()
    for value in program.inputs:
        names.write(value.name, value)
    sketches = [_describe_op(op, names) for op in program.ops]
    outputs = tuple(names.find(value, "the program's result") for value in program.outputs)
    return ProgramSpec(tuple(value.name for value in program.inputs), _find_runs(program.ops, sketches), outputs)


def build_program(sketch: ProgramSpec) -> Program:
    """Return the program of a sketch. It can be planned, but its ops refuse to run.

    Raises:
        ConfigError: if the sketch is against the rules of programs, naming the field.
    """
    p = ProgramBuilder()
    written = {name: p.input(name) for name in sketch.inputs}
    layers = 0
    for number, run in enumerate(sketch.runs):
        path = f"program.runs[{number}]"
        _check_run(run, path)
        for _ in range(run.repeat):
            with p.layer(layers) if run.layered else nullcontext():
                for position, op in enumerate(run.ops):
                    _record_op(p, op, written, f"{path}.ops[{position}]")
            layers += run.layered
    outputs = [_find_write(written, name, "program.outputs") for name in sketch.outputs]
    try:
        return p.build(*outputs)
    except ProgramError as error:
        raise ConfigError(f"program: {error}") from None


class _Names:
    """What the values of a program are called in its sketch."""

    def __init__(self) -> None:
        self._names: dict[Value, str] = {}
        self._latest: dict[str, Value] = {}

    def write(self, name: str, value: Value) -> None:
        self._names[value] = name
        self._latest[name] = value

    def find(self, value: Value, reader: str) -> str:
        name = self._names.get(value, value.name)
        if self._latest.get(name) != value:
            raise ProgramError(
                f"{reader} reads {value}, but the latest {name!r} before it is {self._latest.get(name)}; a sketch "
                f"cannot tell them apart. Rename one of the ops that write them."
            )
        return name


def _name_output(op: str, number: int) -> str:
    return f"{op}.{number}" if number else op


def _describe_op(op: Op, names: _Names) -> OpSpec:
    reader = f"op {op.label!r} ({op.declared_at})"
    reads = tuple(names.find(value, reader) for value in op.reads)
    overwrites = tuple(names.find(value, reader) for value in op.overwrites)
    for number, value in enumerate(op.writes):
        names.write(_name_output(op.name, number), value)
    return OpSpec(
        op.name, op.lane, reads, len(op.writes), op.ordered, op.exclusive, op.communicator, op.host_sync, overwrites
    )


def _find_runs(ops: Sequence[Op], sketches: Sequence[OpSpec]) -> tuple[LayerRun, ...]:
    by_layer = groupby(zip(ops, sketches, strict=True), key=lambda pair: pair[0].layer)
    layers = [(layer, tuple(sketch for _, sketch in pairs)) for layer, pairs in by_layer]
    numbers = [layer for layer, _ in layers if layer is not None]
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + len(numbers))):
        raise ProgramError(
            f"the program's layers are {numbers}, in this order; a sketch needs them to count up, each in one piece."
        )
    alike = groupby(layers, key=lambda layer: (layer[0] is not None, layer[1]))
    return tuple(LayerRun(len(list(same)), body, layered) for (layered, body), same in alike)


def _check_run(run: LayerRun, path: str) -> None:
    if not 1 <= run.repeat <= (MOST_LAYERS if run.layered else 1):
        allowed = f"from 1 to {MOST_LAYERS}" if run.layered else "1 for ops outside any layer"
        raise ConfigError(f"{path}.repeat is {run.repeat}; it must be {allowed}.")
    if not run.ops:
        raise ConfigError(f"{path}.ops is empty; a run needs at least one op.")


def _record_op(p: ProgramBuilder, op: OpSpec, written: dict[str, Value], path: str) -> None:
    if not 0 <= op.outputs <= MOST_OUTPUTS:
        raise ConfigError(f"{path}.outputs is {op.outputs}; it must be from 0 to {MOST_OUTPUTS}.")
    reads = [_find_write(written, name, f"{path}.reads") for name in op.reads]
    overwrites = tuple(_find_write(written, name, f"{path}.overwrites") for name in op.overwrites)
    try:
        result = p.op(
            op.name,
            _refuse_to_run,
            *reads,
            lane=op.lane,
            outputs=op.outputs,
            ordered=op.ordered,
            exclusive=op.exclusive,
            communicator=op.communicator,
            overwrites=overwrites,
            host_sync=op.host_sync,
        )
    except ProgramError as error:
        raise ConfigError(f"{path}: {error}") from None
    for number, value in enumerate((result,) if op.outputs == 1 else result):
        written[_name_output(op.name, number)] = value


def _find_write(written: dict[str, Value], name: str, path: str) -> Value:
    if name not in written:
        raise ConfigError(f"{path} has {name!r}, which no input and no earlier op writes.")
    return written[name]


def _refuse_to_run(*_: Any) -> Any:
    raise ProgramError("this program was recorded from a sketch: it can be planned, but has no functions to run.")
