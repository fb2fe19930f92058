"""A program without its functions, as cost files have it: enough to plan with, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.program import Op, Program, ProgramBuilder, Value

# A program spec is read from a file and its layers are unrolled: larger numbers than any model has are errors.
MAX_LAYERS = 10_000
MAX_OUTPUTS = 1_000
MAX_VALUES = 100_000  # that all ops write; a model of 61 layers has some 1,000 ops


class OpSpec(NamedTuple):
    """An op without its function; the attributes are those of `dbo_runtime.program.Op`.

    A value is named after the op or input that wrote it, `attn_norm`, or `attn_norm.1` for an op's second output. A
    name refers to the latest earlier write of that name.
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
    movable: bool = False


class LayerRun(NamedTuple):
    """Consecutive equal layers; with *layered* false, ops outside any layer, which do not repeat."""

    repeat: int
    ops: tuple[OpSpec, ...]
    layered: bool = True


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The ops of one micro-batch in program order. Layers are numbered from 0.

    Attributes:
        inputs: names of the input values.
        runs: the ops.
        outputs: names of the values returned.

    Raises:
        ConfigError: if no program can be built from it; names the field.
    """

    inputs: tuple[str, ...]
    runs: tuple[LayerRun, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        build_program(self)


def describe_program(program: Program) -> ProgramSpec:
    """Return the spec of *program*, from which `build_program` makes an equal one.

    Functions, the names of outputs and the number of the first layer are lost.

    Raises:
        ProgramError: if it reads a value that a later write of the same name hides, or if its layers do not count up.
    """
    names = _Names()
    for value in program.inputs:
        names.write(value.name, value)
    specs = [_describe_op(op, names) for op in program.ops]
    outputs = tuple(names.get(value, "the program's result") for value in program.outputs)
    return ProgramSpec(tuple(value.name for value in program.inputs), _group_runs(program.ops, specs), outputs)


def build_program(spec: ProgramSpec) -> Program:
    """Return the program of a spec. It can be planned, but its ops raise ProgramError when run.

    Raises:
        ConfigError: if the spec violates the rules of programs; names the field.
    """
    p = ProgramBuilder()
    written = {name: p.input(name) for name in spec.inputs}
    layers = 0
    _check_size(spec)
    for number, run in enumerate(spec.runs):
        path = f"program.runs[{number}]"
        for _ in range(run.repeat):
            with p.layer(layers) if run.layered else nullcontext():
                for position, op in enumerate(run.ops):
                    _record_op(p, op, written, f"{path}.ops[{position}]")
            layers += run.layered
    outputs = [_get_write(written, name, "program.outputs") for name in spec.outputs]
    try:
        return p.build(*outputs)
    except ProgramError as error:
        raise ConfigError(f"program: {error}") from None


class _Names:
    """The names that the values of a program have in its spec."""

    def __init__(self) -> None:
        self._names: dict[Value, str] = {}
        self._latest: dict[str, Value] = {}

    def write(self, name: str, value: Value) -> None:
        self._names[value] = name
        self._latest[name] = value

    def get(self, value: Value, reader: str) -> str:
        name = self._names.get(value, value.name)
        if self._latest.get(name) != value:
            raise ProgramError(
                f"{reader} reads {value}, but the latest {name!r} before it is {self._latest.get(name)}; a program "
                f"spec cannot distinguish them. Rename one of the ops that write them."
            )
        return name


def _name_output(op: str, number: int) -> str:
    return f"{op}.{number}" if number else op


def _describe_op(op: Op, names: _Names) -> OpSpec:
    reader = f"op {op.label!r} ({op.declared_at})"
    reads = tuple(names.get(value, reader) for value in op.reads)
    overwrites = tuple(names.get(value, reader) for value in op.overwrites)
    for number, value in enumerate(op.writes):
        names.write(_name_output(op.name, number), value)
    return OpSpec(
        op.name,
        op.lane,
        reads,
        len(op.writes),
        op.ordered,
        op.exclusive,
        op.communicator,
        op.host_sync,
        overwrites,
        op.movable,
    )


def _group_runs(ops: Sequence[Op], specs: Sequence[OpSpec]) -> tuple[LayerRun, ...]:
    by_layer = groupby(zip(ops, specs, strict=True), key=lambda pair: pair[0].layer)
    layers = [(layer, tuple(spec for _, spec in pairs)) for layer, pairs in by_layer]
    numbers = [layer for layer, _ in layers if layer is not None]
    first = numbers[0] if numbers else 0
    if numbers != list(range(first, first + len(numbers))):
        raise ProgramError(
            f"the program's layers are {numbers}, in this order; a program spec needs consecutive numbers, each once."
        )
    alike = groupby(layers, key=lambda layer: (layer[0] is not None, layer[1]))
    return tuple(LayerRun(len(list(same)), body, layered) for (layered, body), same in alike)


def _check_size(spec: ProgramSpec) -> None:
    """Raise ConfigError if layers or values are more than can be unrolled."""
    for number, run in enumerate(spec.runs):
        _check_run(run, f"program.runs[{number}]")
    values = sum(run.repeat * sum(1 + max(op.outputs, 0) for op in run.ops) for run in spec.runs)
    reads = sum(run.repeat * sum(len(op.reads) + len(op.overwrites) for op in run.ops) for run in spec.runs)
    layers = sum(run.repeat for run in spec.runs if run.layered)
    if layers > MAX_LAYERS:
        raise ConfigError(f"program.runs have {layers} layers; there must be at most {MAX_LAYERS}.")
    if max(values, reads) > MAX_VALUES:
        raise ConfigError(f"program.runs write {values} values and read {reads}; at most {MAX_VALUES} can be planned.")


def _check_run(run: LayerRun, path: str) -> None:
    if not 1 <= run.repeat <= (MAX_LAYERS if run.layered else 1):
        allowed = f"from 1 to {MAX_LAYERS}" if run.layered else "1 for ops outside any layer"
        raise ConfigError(f"{path}.repeat is {run.repeat}; it must be {allowed}.")
    if not run.ops:
        raise ConfigError(f"{path}.ops is empty; a run needs at least one op.")


def _record_op(p: ProgramBuilder, op: OpSpec, written: dict[str, Value], path: str) -> None:
    if not 0 <= op.outputs <= MAX_OUTPUTS:
        raise ConfigError(f"{path}.outputs is {op.outputs}; it must be from 0 to {MAX_OUTPUTS}.")
    reads = [_get_write(written, name, f"{path}.reads") for name in op.reads]
    overwrites = tuple(_get_write(written, name, f"{path}.overwrites") for name in op.overwrites)
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
            movable=op.movable,
        )
    except ProgramError as error:
        raise ConfigError(f"{path}: {error}") from None
    for number, value in enumerate((result,) if op.outputs == 1 else result):
        written[_name_output(op.name, number)] = value


def _get_write(written: dict[str, Value], name: str, path: str) -> Value:
    if name not in written:
        raise ConfigError(f"{path} has {name!r}, which no input and no earlier op writes.")
    return written[name]


def _refuse_to_run(*_: Any) -> Any:
    raise ProgramError("this program was built from a program spec: it can be planned, but has no functions to run.")
