"""The costs of ops: seconds as a function of batch features."""

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
from dbo_runtime.planner.costs.program_spec import OpSpec, ProgramSpec
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
"""The terms that attention may add: name of the cost -> name of the feature that it is multiplied with."""

# Class names in digests. They stay when classes are renamed, so that the digest of a cost file does.
_DIGEST_NAMES = MappingProxyType({"ProgramSpec": "Sketch", "Provenance": "Origin"})


def _in_file(name: str, least: float = 0.0, optional: bool = False, is_new: bool = False) -> dict[str, Any]:
    """Describe a number of a cost file: its name there, with `_us` if it is in microseconds, and its minimum.

    An optional number is left out of files if it is its default; a new one of digests, too, so that those of files from
    before stay.
    """
    return {"name": name, "least": least, "is_time": "_us" in name, "optional": optional, "is_new": is_new}


def _imbalance() -> float:
    """Declare the tokens of the busiest rank by the mean, a number of ops on dispatched tokens."""
    number: float = field(default=1.0, metadata=_in_file("imbalance", least=1.0, optional=True, is_new=True))
    return number


class _Numbers:
    """A group of numbers and switches of a cost file. Times are rounded to the digits that the file keeps."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # all subclasses are dataclasses
            if item.metadata:
                value = float(getattr(self, item.name))
                kept = to_microseconds(value) / 1e6 if item.metadata["is_time"] else value
                object.__setattr__(self, item.name, kept + 0.0)  # no -0.0, which is equal but written differently

    def list_numbers(self) -> Iterator[tuple[str, float | bool, float]]:
        """Yield the name in a cost file, the value (times in microseconds) and the minimum of each."""
        for item in fields(self):  # type: ignore[arg-type]  # as above
            value = getattr(self, item.name)
            if item.metadata.get("optional") and value == item.default:
                continue
            is_time = item.metadata.get("is_time", False)
            yield name_field(item), to_microseconds(value) if is_time else value, item.metadata.get("least", 0.0)


@dataclass(frozen=True, slots=True)
class ComputeCost(_Numbers):
    """The time of a compute op: fixed + max(weights, per_token * imbalance * tokens) + attention terms: `ATTENTION`.

    The maximum is the roofline (Williams, Waterman and Patterson 2009): with few tokens, reading the weights dominates.

    Attributes:
        fixed: seconds, independent of the batch.
        per_token: seconds a token.
        weights: seconds to read the weights.
        per_pair: seconds a query-key pair among the new tokens of a prefill. A kernel that computes masked pairs, too,
            computes two for each that is counted.
        per_context_pair: seconds a pair of a new token and a cached one.
        per_prefill: seconds a prefill, independent of its length.
        per_context: seconds a token of prefills that is fetched from the KV cache.
        per_decode: seconds a token of decodes, in addition to `per_token`.
        per_decode_pair: seconds a query-key pair of decodes.
        imbalance: tokens of the busiest rank by the mean; all wait for that rank. Above 1 for experts only.
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
    imbalance: float = _imbalance()

    @property
    def token_seconds(self) -> float:
        """Seconds a token, on the busiest rank."""
        return self.per_token * self.imbalance

    def time(self, features: BatchFeatures) -> float:
        """Return seconds."""
        attention: float = sum(getattr(self, rate) * getattr(features, amount) for rate, amount in ATTENTION.items())
        return self.fixed + max(self.weights, self.token_seconds * features.tokens) + attention


@dataclass(frozen=True, slots=True)
class CommCost(_Numbers):
    """The time of a communication op: alpha + beta * (bytes - free_bytes), Hockney's model (1994) with a buffer.

    The buffer empties while nothing is sent: an op that directly follows another finds it full and takes
    `credit` longer.

    Attributes:
        alpha: seconds, independent of the size.
        beta: seconds a byte.
        bytes_per_token: bytes that a token adds to the message.
        free_bytes: bytes of a message that cost nothing, because buffers take them at once.
        imbalance: bytes of the busiest rank by the mean; all wait for that rank. Above 1 for dispatched tokens only.
    """

    alpha: float = field(metadata=_in_file("alpha_us"))
    beta: float = field(metadata=_in_file("beta_us_per_byte"))
    bytes_per_token: float = field(metadata=_in_file("bytes_per_token"))
    free_bytes: float = field(default=0.0, metadata=_in_file("free_bytes", optional=True))
    imbalance: float = _imbalance()

    @property
    def token_seconds(self) -> float:
        """Seconds to send what a token adds to the message, on the busiest rank."""
        return self.beta * self.bytes_per_token * self.imbalance

    @property
    def free_seconds(self) -> float:
        """Seconds that buffers save at most."""
        return self.beta * self.free_bytes

    def time(self, features: BatchFeatures) -> float:
        """Return seconds."""
        return self.alpha + self.beta * max(self._count_bytes(features) - self.free_bytes, 0.0)

    def credit(self, features: BatchFeatures) -> float:
        """Return the seconds that an empty buffer saves."""
        return self.beta * min(self._count_bytes(features), self.free_bytes)

    def _count_bytes(self, features: BatchFeatures) -> float:
        return self.bytes_per_token * self.imbalance * features.tokens


OpCost = ComputeCost | CommCost
"""The cost of an op, by the kind of its lane."""


@dataclass(frozen=True, slots=True)
class HostCost(_Numbers):
    """The time that the host adds.

    Attributes:
        issue: seconds to issue one op.
        handover: seconds from an op's end until one on another lane that waits for it can start.
        computes: the compute lane is the issuing thread itself (CPU), so nothing is issued while it computes.
        unsplit: seconds of an unsplit step outside its ops; negative if the step is compiled as one graph and its
            ops are not.
        split: seconds of a split step outside its ops, such as for the metadata of the slices.
        unsplit_per_token, split_per_token: the same for each token, such as for the embedding.
    """

    issue: float = field(default=0.0, metadata=_in_file("issue_us"))
    computes: bool = False
    unsplit: float = field(default=0.0, metadata=_in_file("whole_us", least=-math.inf))
    split: float = field(default=0.0, metadata=_in_file("split_us", least=-math.inf))
    unsplit_per_token: float = field(default=0.0, metadata=_in_file("whole_us_per_token", -math.inf, optional=True))
    split_per_token: float = field(default=0.0, metadata=_in_file("split_us_per_token", -math.inf, optional=True))
    handover: float = field(default=0.0, metadata=_in_file("handover_us", optional=True))


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where costs come from, and what they are valid for.

    Attributes:
        kind: `measured` or `modelled`.
        source: a command, a paper, a pull request.
        date: such as 2026-01-31.
        machine: such as {"platform": "cpu", "chip": "..."}.
        model: such as {"name": "...", "dtype": "..."}.
        parallel: such as {"tensor": 16, "data": 1, "hosts": 2}.
        versions: of the software that was measured.

    Raises:
        ConfigError: if a field is not of this form.
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
    """The costs of a program's ops on one machine. Equal tables have equal digests, on every rank.

    Attributes:
        origin: where the costs come from.
        program: the program they belong to.
        ops: by op name without the layer; ops of one name share one cost.
        contention: factor by which a lane is slower while another one runs, by lane; 1 for lanes left out, which
            decisions doubt (`predictor.make_worst_cases`). Two lanes that compute share more than one that communicates
            does: `compute/side` is the factor of `compute` while `side` runs, if that was measured separately.
        host: the time that the host adds.
        errors: relative error of the fit by op name; empty if modelled.
        split_error: share of their time by which split steps may take longer than predicted, compared with unsplit
            ones; 0 if modelled.

    Raises:
        ConfigError: if a number is impossible, or an op of the program has no cost of the kind that its lane needs;
            fields are named as in a cost file, such as `ops.attention.per_token_us`.
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
        """Return the seconds of each op alone, in program order [ops]; ConfigError names an op without a cost."""
        seconds = {name: cost.time(features) for name, cost in self.ops.items()}
        try:
            return [seconds[op.name] for op in program.ops]
        except KeyError as name:
            raise ConfigError(f"op {name} has no cost: the costs are of another program; {CALIBRATE}.") from None

    def credits(self, program: Program, features: BatchFeatures) -> list[float]:
        """Return the seconds of each op that an idle lane saves, in program order [ops]."""
        saved = {name: cost.credit(features) for name, cost in self.ops.items() if isinstance(cost, CommCost)}
        return [saved.get(op.name, 0.0) for op in program.ops]

    def check_fits(self, machine: Mapping[str, str], model: Mapping[str, str], parallel: Mapping[str, int]) -> None:
        """Raise ConfigError, listing all that differs, unless the costs are of this machine, model and layout."""
        here = {"machine": machine, "model": model, "parallel": parallel}
        differing = [
            f"{name}.{key} is {recorded.get(key)!r}, here it is {values.get(key)!r}"
            for name, values in here.items()
            for recorded in [getattr(self.provenance, name)]
            for key in sorted({*recorded, *values})
            if recorded.get(key) != values.get(key)
        ]
        if differing:
            raise ConfigError(f"the costs are not of what runs here: {'; '.join(differing)}; {CALIBRATE}.")

    @property
    def digest(self) -> str:
        """A short hash of the whole table. Ranks with equal digests make equal plans."""
        return hashlib.sha256(repr(_canonicalise(self)).encode()).hexdigest()[:16]


def to_microseconds(seconds: float) -> float:
    """Return microseconds to 12 digits; converting them to seconds and back does not change them."""
    return float(f"{seconds * 1e6:.12g}")


def name_field(item: Field[Any]) -> str:
    """Return the name of a field in cost files."""
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
    """Return *part* as nested tuples of plain values that do not depend on the order of a mapping.

    What cost files did not have at first counts where it is set only, so that the digest of an older file stays.
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
    if isinstance(part, OpSpec) and not part.movable:
        return tuple(_canonicalise(item) for item in part[: OpSpec._fields.index("movable")])
    if isinstance(part, tuple):
        return tuple(_canonicalise(item) for item in part)
    return part
