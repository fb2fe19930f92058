"""A program without its functions, as stored in cost files: enough to plan without the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.ir.op import MAX_OUTPUTS, Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.values import Value

# A program spec is read from a file and its layers are unrolled. Numbers larger than in any model are errors.
MAX_LAYERS = 10_000
MAX_INPUTS = 1_000
MAX_LANES = 16
MAX_VALUES = 100_000  # values written by all ops; a model of 61 layers has about 1,000 ops

_COUNTED = re.compile(r"(.*)~([0-9]{1,6})", re.DOTALL)  # a name, and how many later writes hide the value


class OpSpec(NamedTuple):
    """An op without its function. The attributes are those of `dbo_runtime.ir.program.Op`.

    A value is named after the op or input that wrote it, such as `attn_norm`, or `attn_norm.1` for an op's second
    output. A name refers to its latest earlier write, and `attn_norm~2` to the write two before that.
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
    token_wise: bool = False


class LayerRun(NamedTuple):
    """Consecutive equal layers; or, if *layered* is false, ops outside any layer, which do not repeat."""

    repeat: int
    ops: tuple[OpSpec, ...]
    layered: bool = True


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The ops of one micro-batch in program order. Layers are numbered from 0.

    Attributes:
        inputs: names of the input values.
        runs: the ops, grouped.
        outputs: names of the returned values.

    Raises:
        ConfigError: no program can be built from the spec. The message names the field.
    """

    inputs: tuple[str, ...]
    runs: tuple[LayerRun, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        build_program(self)


def describe_program(program: Program) -> ProgramSpec:
    """Return the spec of *program*, from which `build_program` makes an equal program.

    Functions, names of outputs and layer numbers are lost.
    """
    writes = _Writes()
    for value in program.inputs:
        writes.add(value.name, value)
    specs = [_describe_op(op, writes) for op in program.ops]
    outputs = tuple(map(writes.name, program.outputs))
    return ProgramSpec(tuple(value.name for value in program.inputs), _group_runs(program.ops, specs), outputs)


def build_program(spec: ProgramSpec) -> Program:
    """Return the program of a spec. It can be planned, but its ops raise ProgramError if run.

    Raises:
        ConfigError: the spec violates the rules of programs. The message names the field.
    """
    _check_size(spec)
    p = ProgramBuilder()
    writes = _Writes()
    for number, name in enumerate(spec.inputs):
        try:
            writes.add(name, p.input(name))
        except ProgramError as error:
            raise ConfigError(f"program.inputs[{number}]: {error}") from None
    layers = 0
    for number, run in enumerate(spec.runs):
        path = f"program.runs[{number}]"
        for _ in range(run.repeat):
            with p.layer(layers) if run.layered else nullcontext():
                for position, op in enumerate(run.ops):
                    _record_op(p, op, writes, f"{path}.ops[{position}]")
            layers += run.layered
    outputs = [writes.find(reference, "program.outputs") for reference in spec.outputs]
    try:
        return p.build(*outputs)
    except ProgramError as error:
        raise ConfigError(f"program: {error}") from None


def repeat_runs(spec: ProgramSpec, repeats: Sequence[int]) -> ProgramSpec:
    """Return *spec* with this number of equal layers in each run [runs]. A run with 0 layers is left out.

    Raises:
        ConfigError: an op or output reads a value hidden by a changed run before it. With another number of layers it
            would read another value.
    """
    changed: set[str] = set()  # names of values that earlier runs now write more or less often
    for run, repeat in zip(spec.runs, repeats, strict=True):
        _check_references(changed, [name for op in run.ops for name in (*op.reads, *op.overwrites)])
        if repeat != run.repeat:
            changed.update(_name_output(op.name, number) for op in run.ops for number in range(op.outputs))
    _check_references(changed, spec.outputs)
    kept = (run._replace(repeat=repeat) for run, repeat in zip(spec.runs, repeats, strict=True) if repeat)
    return replace(spec, runs=tuple(kept))


def are_alike(one: ProgramSpec, other: ProgramSpec) -> bool:
    """Return whether costs of one program are costs of the other. Older cost files do not say what is token-wise."""
    return forget_token_wise(one) == forget_token_wise(other)


def forget_token_wise(spec: ProgramSpec) -> ProgramSpec:
    """Return the spec as files had it before ops could be declared token-wise."""
    runs = (run._replace(ops=tuple(op._replace(token_wise=False) for op in run.ops)) for run in spec.runs)
    return replace(spec, runs=tuple(runs))


def _check_references(changed: Collection[str], references: Sequence[str]) -> None:
    for reference in references:
        name, hidden_by = _split_reference(reference)
        if hidden_by and name in changed:
            raise ConfigError(f"layers cannot be added or left out before what reads {reference!r} of program.runs.")


class _Writes:
    """The values written so far by a program, under their names in the spec."""

    def __init__(self) -> None:
        self._values: dict[str, list[Value]] = {}
        self._places: dict[Value, tuple[str, int]] = {}

    def add(self, name: str, value: Value) -> None:
        """Note that *value* was written, after earlier values of this name."""
        values = self._values.setdefault(name, [])
        self._places[value] = name, len(values)
        values.append(value)

    def name(self, value: Value) -> str:
        """Return the reference that `find` would find a value by at this point."""
        name, place = self._places[value]
        hidden_by = len(self._values[name]) - place - 1
        return f"{name}~{hidden_by}" if hidden_by or _COUNTED.fullmatch(name) else name

    def find(self, reference: str, path: str) -> Value:
        """Return the value of a reference. Raises ConfigError with the *path* if there is none."""
        name, hidden_by = _split_reference(reference)
        values = self._values.get(name, [])
        if len(values) <= hidden_by:
            raise ConfigError(f"{path} has {reference!r}, which no input and no earlier op writes.")
        return values[-1 - hidden_by]


def _split_reference(reference: str) -> tuple[str, int]:
    """Return a reference's name, and the number of later writes of this name that hide the value."""
    counted = _COUNTED.fullmatch(reference)
    return (counted[1], int(counted[2])) if counted else (reference, 0)


def _name_output(op: str, number: int) -> str:
    return f"{op}.{number}" if number else op


def _describe_op(op: Op, writes: _Writes) -> OpSpec:
    reads = tuple(map(writes.name, op.reads))
    overwrites = tuple(map(writes.name, op.overwrites))
    for number, value in enumerate(op.writes):
        writes.add(_name_output(op.name, number), value)
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
        op.may_move_to_side,
        op.token_wise,
    )


def _group_runs(ops: Sequence[Op], specs: Sequence[OpSpec]) -> tuple[LayerRun, ...]:
    by_layer = groupby(zip(ops, specs, strict=True), key=lambda pair: pair[0].layer)
    layers = [(layer, tuple(spec for _, spec in pairs)) for layer, pairs in by_layer]
    alike = groupby(layers, key=lambda layer: (layer[0] is not None, layer[1]))
    return tuple(LayerRun(len(list(same)), body, layered) for (layered, body), same in alike)


def _check_size(spec: ProgramSpec) -> None:
    """Raise ConfigError if there are more layers or values than can be unrolled."""
    for number, run in enumerate(spec.runs):
        _check_run(run, f"program.runs[{number}]")
    values = sum(run.repeat * sum(1 + max(op.outputs, 0) for op in run.ops) for run in spec.runs)
    reads = sum(run.repeat * sum(len(op.reads) + len(op.overwrites) for op in run.ops) for run in spec.runs)
    layers = sum(run.repeat for run in spec.runs if run.layered)
    if layers > MAX_LAYERS:
        raise ConfigError(f"program.runs have {layers} layers; there must be at most {MAX_LAYERS}.")
    if len(spec.inputs) > MAX_INPUTS:
        raise ConfigError(f"program.inputs are {len(spec.inputs)}; there must be at most {MAX_INPUTS}.")
    lanes = {op.lane for run in spec.runs for op in run.ops}
    if len(lanes) > MAX_LANES:
        raise ConfigError(f"program.runs have ops on {len(lanes)} lanes; there must be at most {MAX_LANES}.")
    if max(values, reads) > MAX_VALUES:
        raise ConfigError(f"program.runs write {values} values and read {reads}; at most {MAX_VALUES} can be planned.")


def _check_run(run: LayerRun, path: str) -> None:
    if not 1 <= run.repeat <= (MAX_LAYERS if run.layered else 1):
        allowed = f"from 1 to {MAX_LAYERS}" if run.layered else "1 for ops outside any layer"
        raise ConfigError(f"{path}.repeat is {run.repeat}; it must be {allowed}.")
    if not run.ops:
        raise ConfigError(f"{path}.ops is empty; a run needs at least one op.")


def _record_op(p: ProgramBuilder, op: OpSpec, writes: _Writes, path: str) -> None:
    if not 0 <= op.outputs <= MAX_OUTPUTS:
        raise ConfigError(f"{path}.outputs is {op.outputs}; it must be from 0 to {MAX_OUTPUTS}.")
    reads = [writes.find(reference, f"{path}.reads") for reference in op.reads]
    overwrites = tuple(writes.find(reference, f"{path}.overwrites") for reference in op.overwrites)
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
            may_move_to_side=op.movable,
            token_wise=op.token_wise,
        )
    except ProgramError as error:
        raise ConfigError(f"{path}: {error}") from None
    for number, value in enumerate((result,) if op.outputs == 1 else result):
        writes.add(_name_output(op.name, number), value)


def _refuse_to_run(*_: Any) -> Any:
    raise ProgramError("this program was built from a program spec: it can be planned, but has no functions to run.")
