"""The costs of one op and of the host, in seconds, as functions of batch features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dbo_runtime.planner.costs.batch_features import BatchFeatures

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""Of one step, or of many."""

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
"""The terms that attention may add: name of the cost -> name of the feature it is multiplied with."""


def _in_file(name: str, least: float = 0.0, optional: bool = False, is_new: bool = False) -> dict[str, Any]:
    """Describe a number of a cost file: its name there, with `_us` for microseconds, and its minimum.

    Files leave out an optional number that equals its default. Digests also leave out a new one, so that digests of
    older files do not change.
    """
    return {"name": name, "least": least, "is_time": "_us" in name, "optional": optional, "is_new": is_new}


def _imbalance() -> float:
    """Declare the ratio of the busiest rank's tokens to the mean, for ops on dispatched tokens."""
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
                object.__setattr__(self, item.name, kept + 0.0)  # avoids -0.0, which is equal but written differently

    def list_numbers(self) -> Iterator[tuple[str, float | bool, float]]:
        """Yield each number's name in a cost file, its value (times in microseconds) and its minimum."""
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
        per_token: seconds per token.
        weights: seconds to read the weights.
        per_pair: seconds per query-key pair among a prefill's new tokens. A kernel that also computes masked pairs
            computes two for each counted pair.
        per_context_pair: seconds per pair of a new and a cached token.
        per_prefill: seconds per prefill, independent of its length.
        per_context: seconds per token of prefills fetched from the KV cache.
        per_decode: seconds per token of decodes, in addition to `per_token`.
        per_decode_pair: seconds per query-key pair of decodes.
        imbalance: ratio of the busiest rank's tokens to the mean; all ranks wait for that one. Above 1 only for
            experts.
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
        """Seconds per token, on the busiest rank."""
        return self.per_token * self.imbalance

    def time(self, features: BatchFeatures) -> float:
        """Return seconds."""
        attention: float = sum(getattr(self, rate) * getattr(features, amount) for rate, amount in ATTENTION.items())
        return self.fixed + max(self.weights, self.token_seconds * features.tokens) + attention


@dataclass(frozen=True, slots=True)
class CommCost(_Numbers):
    """The time of a communication op: alpha + beta * (bytes - free_bytes), Hockney's model (1994) with a buffer.

    The buffer empties while nothing is sent. An op that directly follows another op finds it full, and takes `credit`
    longer.

    Attributes:
        alpha: seconds, independent of the size.
        beta: seconds per byte.
        bytes_per_token: bytes that a token adds to the message.
        free_bytes: bytes of a message that cost nothing, because buffers take them at once.
        imbalance: ratio of the busiest rank's bytes to the mean; all ranks wait for that one. Above 1 only for
            dispatched tokens.
    """

    alpha: float = field(metadata=_in_file("alpha_us"))
    beta: float = field(metadata=_in_file("beta_us_per_byte"))
    bytes_per_token: float = field(metadata=_in_file("bytes_per_token"))
    free_bytes: float = field(default=0.0, metadata=_in_file("free_bytes", optional=True))
    imbalance: float = _imbalance()

    @property
    def token_seconds(self) -> float:
        """Seconds to send the bytes that a token adds to the message, on the busiest rank."""
        return self.beta * self.bytes_per_token * self.imbalance

    @property
    def free_seconds(self) -> float:
        """Largest number of seconds that buffers save."""
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
"""The cost of an op, by its lane's kind."""


@dataclass(frozen=True, slots=True)
class HostCost(_Numbers):
    """The time that the host adds.

    Attributes:
        issue: seconds to issue one op of a split step.
        unsplit_issue: seconds to issue one op of an unsplit step; 0 if equal to `issue`.
        handover: seconds from an op's end until an op on another lane that waits for it can start.
        computes: whether the compute lane is the issuing thread itself (CPU), so that nothing is issued while it
            computes.
        unsplit: seconds of an unsplit step outside its ops; negative if the step is compiled as one graph and its ops
            are not.
        split: seconds of a split step outside its ops, such as for the metadata of the slices.
        unsplit_per_token, split_per_token: seconds per token outside ops, such as for the embedding.
    """

    issue: float = field(default=0.0, metadata=_in_file("issue_us"))
    computes: bool = False
    unsplit: float = field(default=0.0, metadata=_in_file("whole_us", least=-math.inf))
    split: float = field(default=0.0, metadata=_in_file("split_us", least=-math.inf))
    unsplit_per_token: float = field(default=0.0, metadata=_in_file("whole_us_per_token", -math.inf, optional=True))
    split_per_token: float = field(default=0.0, metadata=_in_file("split_us_per_token", -math.inf, optional=True))
    handover: float = field(default=0.0, metadata=_in_file("handover_us", optional=True))
    unsplit_issue: float = field(default=0.0, metadata=_in_file("whole_issue_us", optional=True, is_new=True))

    def issue_unsplit(self, count: int) -> float:
        """Return the seconds to issue *count* ops of an unsplit step."""
        return (self.unsplit_issue or self.issue) * count

    def time_unsplit(self, ops: Seconds, count: int, tokens: int) -> Seconds:
        """Return the seconds of an unsplit step of *tokens* tokens, whose *count* ops take *ops* seconds in sequence.

        It lasts at least as long as the host takes to issue them.
        """
        issued = _raise_to(self.issue_unsplit(count), ops)
        return _raise_to(0.0, issued + self.unsplit + self.unsplit_per_token * tokens)

    def time_split(self, ops: Seconds, tokens: int) -> Seconds:
        """Return the seconds of a split step of *tokens* tokens, whose last op ends after *ops* seconds."""
        return _raise_to(0.0, ops + self.split + self.split_per_token * tokens)


def _raise_to(least: float, seconds: Seconds) -> Seconds:
    """Return *seconds*, or *least* where that is more."""
    return max(seconds, least) if isinstance(seconds, float) else np.maximum(seconds, least)


def to_microseconds(seconds: float) -> float:
    """Return microseconds to 12 digits; converting them to seconds and back does not change them."""
    return float(f"{seconds * 1e6:.12g}")


def name_field(item: Field[Any]) -> str:
    """Return the name of a field in cost files."""
    return str(item.metadata.get("name", item.name))
