"""What splitting brings to a fleet of chips: throughput, and the chips that it saves, each with its range."""

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
    """A case on so many chips. Ranges are over the corners; see `corners.list_corners`.

    Attributes:
        case: the case.
        chips: of the fleet.
        ranks: over which experts are spread; a larger fleet has several such groups.
        step: of a rank; None if the weights leave no room for one.
        micro_batches: of the fastest split.
        speed_up: how many times faster than unsplit that is.
        throughput: tokens a second of a chip, unsplit.
        saved: chips that the decision saves of those that a million tokens a second need; 0 if it is not to split.
        is_split: what the runtime would decide from the published costs.
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
        """Chips that a million tokens a second need, unsplit."""
        low, point, high = self.throughput
        return Range(MILLION / high, MILLION / point, MILLION / low)


def predict_fleet(
    case: ScaleCase, chips: int, config: RuntimeConfig, step: Batch | None = None, corners: Sequence[Corner] = ()
) -> FleetRow:
    """Return what splitting brings to *case* on so many chips.

    The step is cut and ordered by the published costs, as the runtime would with these; then it is predicted with the
    costs of every corner, as if those were the true ones. So a range also says what a wrong file of costs costs.

    Args:
        case: a phase of a model on a kind of chip.
        chips: a power of two.
        config: the settings; ops stay on one compute lane unless `side` says otherwise.
        step: of a rank; by default what the case has, as far as memory allows.
        corners: the published costs first; by default `list_corners()`.
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
    work = row.step.tokens * case.ranks_per_chip  # tokens of a chip in a step
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
    """Return the fastest split of a step, whether it pays or not; None if the step cannot be cut.

    If some number of micro-batches loses, more are not tried: each pays the fixed costs.
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
