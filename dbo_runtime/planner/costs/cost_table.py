"""The costs of a program on one machine: of each op and of the host, with their provenance."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost, name_field
from dbo_runtime.planner.costs.program_spec import OpSpec, ProgramSpec

CALIBRATE = "calibrate anew: `dbo calibrate`"

# Class names in digests. They stay when classes are renamed, so that digests of cost files do not change.
_DIGEST_NAMES = MappingProxyType({"ProgramSpec": "Sketch", "Provenance": "Origin"})


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of costs, and the conditions that they are valid for.

    Attributes:
        kind: `measured` or `modelled`.
        source: a command, a paper or a pull request.
        date: the day, such as 2026-01-31.
        machine: the machine, such as {"platform": "cpu", "chip": "..."}.
        model: the model, such as {"name": "...", "dtype": "..."}.
        parallel: the parallelism, such as {"tensor": 16, "data": 1, "hosts": 2}.
        versions: versions of the measured software.

    Raises:
        ConfigError: a field has another form.
    """

    kind: str
    source: str
    date: str
    machine: Mapping[str, str]
    model: Mapping[str, str]
    parallel: Mapping[str, int]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.kind not in ("measured", "modelled"):
            raise ConfigError(f"kind is {self.kind!r}; it must be 'measured' or 'modelled'.")
        if not _is_date(self.date):
            raise ConfigError(f"date is {self.date!r}; it must be a day, such as 2026-01-31.")
        for name in ("machine", "model", "parallel", "versions"):
            _freeze(self, name)
            kind, allowed = (int, "a whole number") if name == "parallel" else (str, "text")
            for key, value in getattr(self, name).items():
                if type(value) is not kind:
                    raise ConfigError(f"{name}.{key} is {value!r}; it must be {allowed}.")


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of a program's ops on one machine. Equal tables have equal digests on every rank.

    Attributes:
        provenance: origin of the costs.
        program: the program that the costs belong to.
        ops: costs by op name, without the layer; ops with the same name share one cost. Where calibration measured it,
            also those of the ops that divided ops are divided into.
        contention: factor by which each lane is slower while another lane runs; 1 for lanes left out, but decisions
            allow for contention there (`predictor.make_worst_cases`). Two computing lanes share more hardware than a
            computing and a communicating one: `compute/side` is the factor of `compute` while `side` runs, if measured
            separately.
        host: time that the host adds.
        errors: relative error of the fit by op name; empty if modelled.
        split_error: share of their time by which split steps may take longer than predicted, relative to unsplit steps;
            0 if modelled.

    Raises:
        ConfigError: a number is impossible, or an op of the program has no cost of the kind that its lane needs. The
            message names fields as in a cost file, such as `ops.attention.per_token_us`.
    """

    provenance: Provenance
    program: ProgramSpec
    ops: Mapping[str, OpCost]
    contention: Mapping[str, float]
    host: HostCost
    errors: Mapping[str, float]
    split_error: float = 0.0

    def __post_init__(self) -> None:
        _freeze(self, "ops")
        _freeze(self, "contention", float)
        _freeze(self, "errors", float)
        for path, value, least in _list_numbers(self):
            if not (math.isfinite(value) and value >= least):
                bound = f" of at least {least:g}" if math.isfinite(least) else ""
                raise ConfigError(f"{path} is {value:g}; it must be a finite number{bound}.")
        _check_names(self)

    def times(self, program: Program, features: BatchFeatures) -> list[float]:
        """Return the seconds of each op alone, in program order [ops]. Raises ConfigError for an op without a cost."""
        seconds = {name: cost.time(features) for name, cost in self.ops.items()}
        try:
            return [seconds[op.name] for op in program.ops]
        except KeyError as name:
            raise ConfigError(f"op {name} has no cost: the costs belong to another program; {CALIBRATE}.") from None

    def credits(self, program: Program, features: BatchFeatures) -> list[float]:
        """Return the seconds that an idle lane saves each op, in program order [ops]."""
        saved = {name: cost.credit(features) for name, cost in self.ops.items() if isinstance(cost, CommCost)}
        return [saved.get(op.name, 0.0) for op in program.ops]

    def check_fits(self, machine: Mapping[str, str], model: Mapping[str, str], parallel: Mapping[str, int]) -> None:
        """Raise ConfigError, with all differences, unless the costs are for this machine, model and layout."""
        here = {"parallel": parallel, "model": model, "machine": machine}  # what a user chooses comes first
        differing = [
            f"{name}.{key} is {recorded.get(key)!r}, here it is {values.get(key)!r}"
            for name, values in here.items()
            for recorded in [getattr(self.provenance, name)]
            for key in sorted({*recorded, *values})
            if recorded.get(key) != values.get(key)
        ]
        if differing:
            raise ConfigError(f"the costs do not fit this server: {'; '.join(differing)}; {CALIBRATE}.")

    @property
    def digest(self) -> str:
        """A short hash of the whole table. Ranks with equal digests make equal plans."""
        return hashlib.sha256(repr(_canonicalise(self)).encode()).hexdigest()[:16]


def _freeze(part: Any, name: str, convert: Any = None) -> None:
    items = getattr(part, name).items()
    object.__setattr__(part, name, MappingProxyType({key: convert(v) if convert else v for key, v in items}))


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _list_numbers(table: CostTable) -> Iterator[tuple[str, float, float]]:
    """Yield the path, value and minimum of each number."""
    for path, part in (*((f"ops.{name}", cost) for name, cost in table.ops.items()), ("host", table.host)):
        yield from ((f"{path}.{name}", value, least) for name, value, least in part.list_numbers())
    yield from ((f"contention.{lane}", factor, 1.0) for lane, factor in table.contention.items())
    yield from ((f"errors.{name}", error, 0.0) for name, error in table.errors.items())
    yield "split_error", table.split_error, 0.0


def _check_names(table: CostTable) -> None:
    lanes = {COMPUTE}
    for op in (op for run in table.program.runs for op in run.ops):
        lanes.add(op.lane)
        if op.name not in table.ops:
            raise ConfigError(f"ops.{op.name} is missing, but the program has this op.")
        expected = CommCost if op.lane == COMM else ComputeCost
        if not isinstance(table.ops[op.name], expected):
            names = ", ".join(map(name_field, fields(expected)))
            raise ConfigError(f"ops.{op.name} must have {names}, because the op is on lane {op.lane}.")
    slowed = {*lanes, *(f"{lane}/{other}" for lane in lanes for other in lanes if lane != other)}
    for path, known, given in (("contention", slowed, table.contention), ("errors", table.ops, table.errors)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{path}.{name} is unknown; known are {', '.join(sorted(known))}.")


def _canonicalise(part: Any) -> Any:
    """Return *part* as nested tuples of plain values, independent of the order of mappings.

    Fields that the first cost files lacked count only if set, so that the digests of older files do not change.
    """
    if isinstance(part, Mapping):
        return tuple((key, _canonicalise(part[key])) for key in sorted(part))
    if is_dataclass(part):
        name = type(part).__name__
        values = (
            _canonicalise(getattr(part, item.name))
            for item in fields(part)
            if not (item.metadata.get("is_new") and getattr(part, item.name) == item.default)
        )
        return (_DIGEST_NAMES.get(name, name), *values)
    if isinstance(part, OpSpec):
        known = OpSpec._fields.index("token_wise" if part.movable else "movable")
        newer = () if not part.token_wise else ("token_wise",)
        return (*(_canonicalise(item) for item in part[:known]), *newer)
    if isinstance(part, tuple):
        return tuple(_canonicalise(item) for item in part)
    return part
