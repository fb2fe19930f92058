"""The compute lanes on which a program's ops may be: a planner chooses among them."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CostTable


class Placements:
    """The ways to place the ops of one program on lanes.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops. If it has no contention of lanes that compute, `auto` leaves all ops on `compute`.

    Attributes:
        programs: the program by each placement, first without `side`; see `list_placements`.
        can_use_side: whether there are ops for `side`, and costs that say how lanes that compute slow each other.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        self.programs = list_placements(program)
        self.can_use_side = SIDE in program.lanes and any(SIDE in name.split("/") for name in table.contention)

    def list_allowed(self, config: RuntimeConfig) -> Sequence[int]:
        """Return the numbers of the placements that the settings allow and the costs cover."""
        every = range(len(self.programs))
        if config.side == "on":
            return every[-1:]
        return every if config.side == "auto" and self.can_use_side else every[:1]

    def allow_concurrent(self, config: RuntimeConfig) -> bool:
        """Return whether a step may run its ops concurrently on `side`, also in one micro-batch."""
        return self.programs[self.list_allowed(config)[-1]] is not self.programs[0]


def list_placements(program: Program) -> tuple[Program, ...]:
    """Return *program* with its ops placed in each way that is worth a prediction; only itself if none is for `side`.

    The first has all ops that compute on `compute`, and the last those on `side` that the adapter declares there. In
    between, each kind of these is alone on `side`; and if others may move there, they are there, too. Then both lanes
    compute for a micro-batch of their own: one has the attention of one, the other the experts of another, as
    CloudMatrix-Infer decodes (arXiv:2506.12708).
    """
    kinds = dict.fromkeys(op.name for op in program.ops if op.lane == SIDE)
    if not kinds:
        return (program,)
    alone = [program.fold_side(kind) for kind in kinds] if len(kinds) > 1 else []
    moved = [program.move_aside()] if any(op.may_move_to_side for op in program.ops) else []
    return (program.fold_side(), *alone, *moved, program)


def is_moved(program: Program) -> bool:
    """Return whether ops have been moved to `side`: then the common policies are no measure of what a search finds.

    They let both micro-batches be in the same half of a layer.
    """
    return any(op.may_move_to_side and op.lane == SIDE for op in program.ops)
