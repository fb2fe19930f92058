"""What was measured over two hosts, and what is derived from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

OFF, SYNCHRONOUS = "unsplit", "split, no overlap"
NANO, PLANNED = "nano-batches", "overlap, planned"
MODES = {  # what is compared -> its settings; engines have measured their costs at each rate
    OFF: {"DBO_MODE": "off"},
    SYNCHRONOUS: {"DBO_MODE": "always", "DBO_SPLIT": "micro", "DBO_POLICY": "sequential", "DBO_MICRO_BATCHES": "2"},
    NANO: {"DBO_MODE": "always", "DBO_SPLIT": "nano"},
    PLANNED: {"DBO_MODE": "auto", "DBO_SPLIT": "auto", "DBO_PROBATION": "0"},  # probation runs some steps the other way
}
NO_LIMIT = "none"


@dataclass(frozen=True)
class StepFigures:
    """One split step on one rank, in seconds.

    Attributes:
        duration: of the forward, without embedding and sampling.
        communication: in which the lane `comm` was busy.
        hidden: in which it was, while `compute` ran.
        bound: that no issue order could beat with ops that take what they took; None where that is not known.
        micro_batches: their number; 1 in a step in nano-batches.
        nano_batches: their number; 1 in a step in micro-batches.
        joint: the share of the computation that is in joint ops, which nano-batches do not cut.
    """

    duration: float
    communication: float
    hidden: float
    bound: float | None
    micro_batches: int = 2
    nano_batches: int = 1
    joint: float = 1.0

    @property
    def form(self) -> str:
        """The number of parts, and that they are nano-batches if they are."""
        if self.micro_batches > 1:
            return str(self.micro_batches)
        return f"{self.nano_batches} nano" if self.nano_batches > 1 else "its order"


@dataclass(frozen=True)
class Cell:
    """One workload at one rate.

    Attributes:
        parallel: `tensor` or `data-expert`.
        rate: of the link, in the words of tc, or `none`.
        seconds: of each mode, in turn [modes][turns].
        steps: of the modes that split [modes][steps x ranks].
        same: whether all modes gave the same tokens.
        predicted: of the best split by the costs, the unsplit step's time by its own; None where it was not asked for.
    """

    parallel: str
    rate: str
    workload: str
    seconds: dict[str, list[float]]
    steps: dict[str, list[StepFigures]] = field(default_factory=dict)
    same: bool = True
    predicted: float | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        """Return what `as_dict` was called on."""
        steps = {mode: [StepFigures(**each) for each in all_of] for mode, all_of in data["steps"].items()}
        return cls(**{**data, "steps": steps})

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def median(self, mode: str) -> float:
        """Seconds of a mode."""
        return median(self.seconds[mode])

    def gain(self, over: str) -> float:
        """By how much planned overlap is faster than another mode: the ratio of medians."""
        return self.median(over) / self.median(PLANNED)

    def spread(self, over: str) -> tuple[float, float]:
        """The quartiles of that ratio, taken turn by turn."""
        ratios = [other / own for other, own in zip(self.seconds[over], self.seconds[PLANNED], strict=True)]
        if len(ratios) == 1:
            return ratios[0], ratios[0]
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return low, high

    @property
    def parts(self) -> str:
        """Into what the planner had steps split, `unsplit` if into nothing."""
        return "/".join(sorted({step.form for step in self.steps.get(PLANNED, ())})) or "unsplit"

    @property
    def hidden(self) -> float | None:
        """The share of the communication that planned overlap hid; None if it split no step."""
        shares = [step.hidden / step.communication for step in self.steps.get(PLANNED, ()) if step.communication]
        return median(shares) if shares else None

    @property
    def efficiency(self) -> float | None:
        """The bound by the forward's time with planned overlap, the bound being of ops that ran alone; None if unknown.

        Ops that run alone were split in two; each part more repeats what an op takes whatever its size.
        """
        bounds = [step.bound for step in self.steps.get(SYNCHRONOUS, ()) if step.bound is not None]
        durations = [step.duration for step in self.steps.get(PLANNED, ())]
        return median(bounds) / median(durations) if bounds and durations else None

    @property
    def joint(self) -> float | None:
        """The share of the computation that nano-batches leave whole; None if no step was split so."""
        shares = [step.joint for step in self.steps.get(NANO, ())]
        return median(shares) if shares else None

    def order_efficiency(self, mode: str = PLANNED) -> float | None:
        """The same where the bound is of the overlapped step's own ops: what a better issue order could still bring."""
        shares = [step.bound / step.duration for step in self.steps.get(mode, ()) if step.bound is not None]
        return median(shares) if shares else None
