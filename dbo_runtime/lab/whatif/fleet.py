"""The gain of splitting for a fleet of chips: throughput, and the chips it saves, each with its range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.corners import Corner, list_corners, move_to
from dbo_runtime.lab.whatif.estimate import open_planner
from dbo_runtime.lab.whatif.ranges import Range, span
from dbo_runtime.lab.whatif.scale_cases import ScaleCase
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice

CHIPS = (16, 32, 64, 256, 1024)
MILLION = 1e6  # tokens a second
NOTHING, UNCHANGED = Range(0.0, 0.0, 0.0), Range(1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A case on a number of chips. Ranges are over the corners; see `corners.list_corners`.

    Attributes:
        case: the case.
        chips: number of chips in the fleet.
        ranks: number of ranks that experts are spread over; a larger fleet has several such groups.
        step: the step of a rank; None if the weights leave no room for one.
        micro_batches: number of micro-batches in the fastest split.
        speed_up: speed-up of the fastest split over the unsplit step.
        throughput: tokens per second of a chip, unsplit.
        saved: chips that the decision saves, of those needed for a million tokens per second; 0 if it is not to split.
        is_split: whether the runtime would split, based on the published costs.
    """

    case: ScaleCase
    chips: int
    ranks: int
    step: Batch | None = None
    micro_batches: int = 1
    speed_up: Range = UNCHANGED
    throughput: Range = NOTHING
    saved: Range = NOTHING
    is_split: bool = False

    @property
    def needed(self) -> Range:
        """Number of chips needed for a million tokens per second, unsplit."""
        low, point, high = self.throughput
        return Range(MILLION / high, MILLION / point, MILLION / low)


def predict_fleet(
    case: ScaleCase, chips: int, config: RuntimeConfig, step: Batch | None = None, corners: Sequence[Corner] = ()
) -> FleetRow:
    """Return the gain of splitting for *case* on this number of chips.

    The step is cut and ordered by the published costs, as the runtime would do. It is then predicted with the costs of
    every corner, as if those were the true ones. So a range also shows the price of a wrong cost file.

    Args:
        case: the phase of a model on a kind of chip.
        chips: number of chips, a power of two.
        config: settings; ops stay on one compute lane unless `side` says otherwise.
        step: the step of a rank; by default the case's, as far as memory allows.
        corners: corners, published costs first; by default `list_corners()`.
    """
    row = FleetRow(case, chips, case.count_ranks(chips), step or case.fill_step(chips))
    if row.step is None:
        return row
    table = case.spread(chips)
    choice = choose_split(table, row.step, config)
    (features,) = measure_slices(row.step, slice_batch(row.step, ()))
    slices = measure_slices(row.step, choice.slices) if choice else []
    program = build_program(table.program)
    times = []
    for corner in corners or list_corners():
        predictor = Predictor(program, move_to(table, corner))
        unsplit = predictor.predict_unsplit(features)
        times.append((unsplit, predictor.predict_split(choice.order, slices) if choice else unsplit))
    is_split = choice is not None and choice.prediction.pays(config.margin)
    work = row.step.tokens * case.ranks_per_chip  # tokens per chip and step
    saved = [MILLION / work * (unsplit - split) if is_split else 0.0 for unsplit, split in times]
    return replace(
        row,
        micro_batches=len(choice.slices) if choice else 1,
        speed_up=_span([unsplit / split for unsplit, split in times]),
        throughput=_span([work / unsplit for unsplit, _ in times]),
        saved=_span(saved),
        is_split=is_split,
    )


def choose_split(table: CostTable, step: Batch, config: RuntimeConfig) -> SplitChoice | None:
    """Return the fastest split of a step, even if it is slower than unsplit; None if the step cannot be cut.

    Once a number of micro-batches is slower, larger numbers are not tried, because each adds fixed costs.
    """
    planner = open_planner(table, [step])
    best: SplitChoice | None = None
    for parts in planner.list_counts(config):
        choice = planner.choose(step, replace(config, mode="always", micro_batches=parts))
        if isinstance(choice, SplitChoice) and (best is None or choice.prediction.split < best.prediction.split):
            best = choice
        if not isinstance(choice, SplitChoice) or choice.prediction.gain <= 0:
            break
    return best


def _span(values: Sequence[float]) -> Range:
    return span(values[0], values[1:])
