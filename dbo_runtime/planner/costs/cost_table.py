"""What ops cost: seconds as a function of what a micro-batch asks of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from datetime import date
from types import MappingProxyType
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.program_spec import ProgramSpec
from dbo_runtime.program import COMM, COMPUTE, Program

CALIBRATE = "calibrate anew: `python -m dbo_runtime calibrate`"


ATTENTION = MappingProxyType(
    {
        "per_pair": "pairs",
        "per_context_pair": "context_pairs",
        "per_prefill": "prefills",
        "per_context": "context",
        "per_decode": "decodes",
        "per_decode_pair": "decode_pairs",
    }
)
"""What attention may add: the cost's name for it -> the load's name for what it is paid for."""


def _in_file(name: str, least: float = 0.0, optional: bool = False) -> dict[str, Any]:
    """Describe a number of a cost file: its name there, in microseconds if that says so, and its least value.

    An optional one is left out where it is 0.
    """
    return {"name": name, "least": least, "is_time": "_us" in name, "optional": optional}


class _Numbers:
    """What a cost file has as numbers and switches. Times are rounded to what the file keeps of them."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # whoever inherits is a dataclass
            if item.metadata:
                value = float(getattr(self, item.name))
                kept = to_microseconds(value) / 1e6 if item.metadata["is_time"] else value
                object.__setattr__(self, item.name, kept + 0.0)  # no -0.0, which is equal but written differently

    def list_numbers(self) -> Iterator[tuple[str, float | bool, float]]:
        """Yield the name in a cost file, the value (times in microseconds) and the least value of each."""
        for item in fields(self):  # type: ignore[arg-type]  # as above
            value = getattr(self, item.name)
            if item.metadata.get("optional") and value == 0:
                continue
            is_time = item.metadata.get("is_time", False)
            yield name_field(item), to_microseconds(value) if is_time else value, item.metadata.get("least", 0.0)


@dataclass(frozen=True, slots=True)
class ComputeCost(_Numbers):
    """What a compute op takes: fixed + max(weights, per_token * tokens) + what attention adds; see `ATTENTION`.

    The maximum is the roofline (Williams, Waterman and Patterson 2009): few tokens wait for the weights to be read.

    Attributes:
        fixed: seconds whatever the load.
        per_token: seconds a token.
        weights: seconds that reading the weights takes.
        per_pair: seconds a query-key pair among the new tokens of a prefill. A kernel that computes masked pairs, too,
            pays for two where we count one.
        per_context_pair: seconds a pair of a new token and a cached one.
        per_prefill: seconds a prefill, however short.
        per_context: seconds a token of prefills that is fetched from the KV cache.
        per_decode: seconds a token of decodes, beside what any token takes.
        per_decode_pair: seconds a query-key pair of decodes.
    """

    fixed: float = field(default=0.0, metadata=_in_file("fixed_us"))
    per_token: float = field(default=0.0, metadata=_in_file("per_token_us"))
    weights: float = field(default=0.0, metadata=_in_file("weights_us"))
    per_pair: float = field(default=0.0, metadata=_in_file("per_pair_us"))
    per_context_pair: float = field(default=0.0, metadata=_in_file("per_context_pair_us"))
    per_prefill: float = field(default=0.0, metadata=_in_file("per_prefill_us", optional=True))
    per_context: float = field(default=0.0, metadata=_in_file("per_context_us", optional=True))
    per_decode: float = field(default=0.0, metadata=_in_file("per_decode_us", optional=True))
    per_decode_pair: float = field(default=0.0, metadata=_in_file("per_decode_pair_us", optional=True))

    def time(self, load: BatchFeatures) -> float:
        """Return seconds."""
        return self._time(load, 1.0)

    def weight_share(self, load: BatchFeatures) -> float:
        """Return the w of theory.md, in [0, 1]: the share of time that does not shrink when the load halves."""
        whole = self._time(load, 1.0)
        return min(max(2 * self._time(load, 0.5) / whole - 1, 0.0), 1.0) if whole else 0.0

    def _time(self, load: BatchFeatures, share: float) -> float:
        attention: float = sum(getattr(self, rate) * getattr(load, amount) for rate, amount in ATTENTION.items())
        return self.fixed + max(self.weights, self.per_token * load.tokens * share) + attention * share


@dataclass(frozen=True, slots=True)
class CommCost(_Numbers):
    """What a communication op takes: alpha + beta * (bytes - free_bytes), the model of Hockney (1994) with a buffer.

    The buffer empties while nothing is sent: what follows another op at once finds it full, and takes `credit` longer.

    Attributes:
        alpha: seconds however little is sent.
        beta: seconds a byte.
        bytes_per_token: bytes that a token adds to the message.
        free_bytes: how much of a message costs nothing, because buffers take it at once.
    """

    alpha: float = field(metadata=_in_file("alpha_us"))
    beta: float = field(metadata=_in_file("beta_us_per_byte"))
    bytes_per_token: float = field(metadata=_in_file("bytes_per_token"))
    free_bytes: float = field(default=0.0, metadata=_in_file("free_bytes", optional=True))

    def time(self, load: BatchFeatures) -> float:
        """Return seconds."""
        return self.alpha + self.beta * max(self.bytes_per_token * load.tokens - self.free_bytes, 0.0)

    def credit(self, load: BatchFeatures) -> float:
        """Return the seconds that the buffer saves."""
        return self.beta * min(self.bytes_per_token * load.tokens, self.free_bytes)


Cost = ComputeCost | CommCost


@dataclass(frozen=True, slots=True)
class HostCost(_Numbers):
    """What the host adds.

    Attributes:
        issue: seconds the host needs to issue one op.
        handover: seconds from an op's end until one on another lane that waits for it can begin.
        computes: the compute lane is the issuing thread itself (CPU), so nothing is issued while it computes.
        whole: seconds of a whole step outside its ops; negative where the whole step is compiled and its ops are not.
        split: seconds of a split step outside its ops, such as for the metadata of the slices.
        whole_per_token, split_per_token: the same for each token, such as for the embedding.
    """

    issue: float = field(default=0.0, metadata=_in_file("issue_us"))
    computes: bool = False
    whole: float = field(default=0.0, metadata=_in_file("whole_us", least=-math.inf))
    split: float = field(default=0.0, metadata=_in_file("split_us", least=-math.inf))
    whole_per_token: float = field(default=0.0, metadata=_in_file("whole_us_per_token", -math.inf, optional=True))
    split_per_token: float = field(default=0.0, metadata=_in_file("split_us_per_token", -math.inf, optional=True))
    handover: float = field(default=0.0, metadata=_in_file("handover_us", optional=True))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where costs come from, and what they hold for.

    Attributes:
        kind: `measured` or `modelled`.
        source: a command, a paper, a pull request.
        date: such as 2026-01-31.
        machine: such as {"platform": "cpu", "chip": "..."}.
        model: such as {"name": "...", "dtype": "..."}.
        parallel: such as {"tensor": 16, "data": 1, "hosts": 2}.
        versions: of the software that was measured.

    Raises:
        ConfigError: if kind or date are not of these forms, or a mapping holds something else.
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
    """What the ops of a program cost on one machine. Equal tables have equal digests, on every rank.

    Attributes:
        origin: where the costs come from.
        program: the program they belong to.
        ops: by op name without the layer: ops named alike cost alike.
        contention: by how much a lane is slower while another one runs, by lane; 1 for lanes left out. Two lanes that
            compute share more than one that communicates does: `compute/side` is by how much `compute` is slower while
            `side` runs, where that is known by itself.
        host: what the host adds.
        errors: relative error of the fit by op name; empty if modelled.
        split_error: by which share of their time split steps may take longer than these costs say, next to whole ones;
            0 if modelled.

    Raises:
        ConfigError: if a number is impossible, or an op of the program has no cost of the kind that its lane needs;
            fields are named as in a cost file, such as `ops.attention.per_token_us`.
    """

    origin: Origin
    program: ProgramSpec
    ops: Mapping[str, Cost]
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

    def times(self, program: Program, load: BatchFeatures) -> list[float]:
        """Return the seconds of each op alone, in program order; ConfigError names an op without a cost."""
        seconds = {name: cost.time(load) for name, cost in self.ops.items()}
        try:
            return [seconds[op.name] for op in program.ops]
        except KeyError as name:
            raise ConfigError(f"op {name} has no cost: the costs are of another program; {CALIBRATE}.") from None

    def credits(self, program: Program, load: BatchFeatures) -> list[float]:
        """Return the seconds of each op that a lane which has rested spares, in program order."""
        spared = {name: cost.credit(load) for name, cost in self.ops.items() if isinstance(cost, CommCost)}
        return [spared.get(op.name, 0.0) for op in program.ops]

    def check_fits(self, machine: Mapping[str, str], model: Mapping[str, str], parallel: Mapping[str, int]) -> None:
        """Raise ConfigError, listing all that differs, unless the costs are of this machine, model and layout."""
        here = {"machine": machine, "model": model, "parallel": parallel}
        differing = [
            f"{name}.{key} is {recorded.get(key)!r}, here it is {values.get(key)!r}"
            for name, values in here.items()
            for recorded in [getattr(self.origin, name)]
            for key in sorted({*recorded, *values})
            if recorded.get(key) != values.get(key)
        ]
        if differing:
            raise ConfigError(f"the costs are not of what runs here: {'; '.join(differing)}; {CALIBRATE}.")

    @property
    def digest(self) -> str:
        """A short hash of all that the table says. Ranks whose digests agree plan alike."""
        return hashlib.sha256(repr(_canonicalise(self)).encode()).hexdigest()[:16]


def to_microseconds(seconds: float) -> float:
    """Return microseconds to 12 digits. Divided by 1e6 and passed here again, they stay what they are."""
    return float(f"{seconds * 1e6:.12g}")


def name_field(item: Field[Any]) -> str:
    """Return what a cost file calls a field of a cost."""
    return str(item.metadata.get("name", item.name))


def _freeze(part: Any, name: str, convert: Any = None) -> None:
    items = getattr(part, name).items()
    object.__setattr__(part, name, MappingProxyType({key: convert(v) if convert else v for key, v in items}))


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _list_numbers(table: CostTable) -> Iterator[tuple[str, float, float]]:
    """Yield the path, value and least value of each number."""
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
        wanted = CommCost if op.lane == COMM else ComputeCost
        if not isinstance(table.ops[op.name], wanted):
            names = ", ".join(map(name_field, fields(wanted)))
            raise ConfigError(f"ops.{op.name} must have {names}, because the op is on lane {op.lane}.")
    slowed = {*lanes, *(f"{lane}/{other}" for lane in lanes for other in lanes if lane != other)}
    for path, known, given in (("contention", slowed, table.contention), ("errors", table.ops, table.errors)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{path}.{name} is unknown; known are {', '.join(sorted(known))}.")


def _canonicalise(part: Any) -> Any:
    """Return *part* as nested tuples of plain values that do not depend on the order of a mapping."""
    if isinstance(part, Mapping):
        return tuple((key, _canonicalise(part[key])) for key in sorted(part))
    if is_dataclass(part):
        return (type(part).__name__, *(_canonicalise(getattr(part, item.name)) for item in fields(part)))
    if isinstance(part, tuple):
        return tuple(_canonicalise(item) for item in part)
    return part
