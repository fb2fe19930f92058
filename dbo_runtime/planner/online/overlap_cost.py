"""How much later a schedule ends because its lanes slow each other down.

While two lanes run, every op takes longer. If both lanes are slower by the same factor f, it is as if time itself
passed more slowly while they overlap. The order of events stays the same, and the end is later by (f - 1) times the
overlap.

The overlap is the sum of all ops minus the duration of the step, as long as at least one lane is always busy and ops
take what they cost. Where all lanes wait for the host or a handover, or messages lack credit, this is too little, and
the end is predicted too early: by up to 0.5 % for r1-decode-910c with 5 us of both, or with buffers for 200 tokens.

If the factors differ, or there are three lanes, the end is later by a share of the overlap that depends on the critical
path. This share is simulated for a few steps, and interpolated between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.online.durations import Vector

SMALLEST_DISTANCE = 1e-5  # squared, in shares of a step's work; closer steps count as equally close
RESOLUTION = 2.0**-23  # unit of shares and their weights, so that products of both add up exactly, in any order
ROUNDING = 1e-9  # share of a step's work; less overlap counts as none
SHORTEST_WORK = 1e-12  # seconds of a step, at least, so that ops that cost nothing have shares


class OverlapCost:
    """The share of the overlap of lanes by which orders end later, for one cost table.

    Args:
        shares: shares of simulated steps [steps, orders], or one for all steps [1, orders].
        work: seconds of each kind of op in these steps [steps, kinds].

    Attributes:
        shares: given shares, rounded.
    """

    def __init__(self, shares: Vector, work: Vector) -> None:
        self.shares = _round(shares)
        self._points = _normalise(work, np.add.reduce(work, axis=1, keepdims=True))
        self._columns = np.append(self.shares, np.ones((len(shares), 1)), axis=1)
        self._kinds = np.ones(work.shape[1])

    def estimate(self, work: Vector) -> Vector:
        """Return the shares [..., orders] for steps whose kinds of op take these seconds [..., kinds].

        They are [orders] where they are the same for all steps.
        They are interpolated by inverse distance to the power of four (Shepard 1968). The distance is between the
        shares of the work that each kind of op has. All sums are of multiples of `RESOLUTION` or its square.
        """
        if len(self.shares) == 1:
            same: Vector = self.shares[0]
            return same
        differences = _normalise(work, np.add.reduce(work, axis=-1, keepdims=True))[..., None, :] - self._points
        distances = np.maximum((differences * differences) @ self._kinds, SMALLEST_DISTANCE)
        ratios = np.minimum.reduce(distances, axis=-1, keepdims=True) / distances
        sums = _round(ratios * ratios) @ self._columns
        estimated: Vector = sums[..., :-1] / sums[..., -1:]
        return estimated


def find_common_factor(program: Program, table: CostTable) -> float | None:
    """Return the one factor by which both lanes of a program slow each other down; None if there are several."""
    lanes = program.lanes
    if table.host.computes or len(lanes) > 2:
        return None
    factors = {
        table.contention.get(f"{lane}/{other}", table.contention.get(lane, 1.0))
        for lane in lanes
        for other in lanes
        if lane != other
    }
    return factors.pop() if len(factors) == 1 else None if factors else 1.0


def compute_share(end: Vector, alone: Vector, work: Vector) -> Vector:
    """Return the share of the overlap by which schedules *end* later than *alone*, without contention; all [steps].

    *work* are the seconds of all ops one after another. The overlap is *work* minus *alone*.
    """
    overlap = work - alone
    shares: Vector = np.divide(end - alone, overlap, out=np.zeros_like(end), where=overlap > ROUNDING * work)
    return shares


def _normalise(work: Vector, total: Vector) -> Vector:
    """Return the shares of each step's *total* work, rounded so that squares of differences add up exactly, too."""
    return _round(work / np.maximum(total, SHORTEST_WORK))


def _round(shares: Vector) -> Vector:
    rounded: Vector = np.rint(shares * (1.0 / RESOLUTION)) * RESOLUTION
    return rounded


def stack_shares(columns: Sequence[Vector]) -> Vector:
    """Return the shares of all orders as one array [steps, orders]; each column is [steps] or [1]."""
    return np.stack(np.broadcast_arrays(*columns), axis=1)
