"""The result of a calibration, and how well its costs fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUDGET_SECONDS = 45.0  # approximate seconds of a calibration, unless asked for others
GOOD_FIT = 0.05  # median relative error of steps; larger ones exceed most gains


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a calibration.

    Attributes:
        seconds: duration of the calibration.
        digest: digest of the costs.
        op_errors: median relative errors of the costs, by op.
        step_errors: median relative errors of predicted steps, by mode (`unsplit` and `split`).
        split_error: relative error of split steps; see `CostTable`.
        contention: factor by which a lane is slower while another runs, by lane.
        largest: tokens of the largest measured step; times of larger steps are extrapolated.
        left_out: number of batch sizes that no time was left for.
        stage: name of the pipeline stage that these costs are for, such as `pp0`.
    """

    seconds: float
    digest: str
    op_errors: Mapping[str, float]
    step_errors: Mapping[str, float]
    split_error: float
    contention: Mapping[str, float]
    largest: int
    left_out: int
    stage: str | None = None

    def __str__(self) -> str:
        """Format as a table."""
        stage = f"{self.stage}: " if self.stage else ""
        rows = [f"{stage}calibrated in {self.seconds:.0f} s; costs {self.digest}", self._judge_fit()]
        rows += [f"  {name:<20}{error:>7.1%}" for name, error in self.op_errors.items()]
        rows += [f"  {mode + ' step':<20}{error:>7.1%}" for mode, error in self.step_errors.items()]
        longer = (
            f"relative to unsplit steps, split ones take {self.split_error:.1%} longer than predicted (upper quartile)"
        )
        factors = ", ".join(f"{lane} {factor:.2f}" for lane, factor in self.contention.items())
        rest = f"; {self.left_out} sizes of batches were left out for lack of time" if self.left_out else ""
        slower = f"slower while another lane runs, by a factor of: {factors}"
        return "\n".join([*rows, longer, slower, f"measured up to {self.largest} tokens a step{rest}"])

    def _judge_fit(self) -> str:
        """Return how far the costs are from what was measured, in words."""
        worst = max(self.step_errors.values(), default=0.0)
        advice = "" if worst <= GOOD_FIT else ": too much to trust small gains; calibrate with nothing else running"
        return (
            f"half of the measured steps are within {worst:.1%} of what the costs predict{advice}; "
            "median errors of the fit against the measured points:"
        )
