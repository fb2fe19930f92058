"""The ways to place a program's ops on compute lanes. The planner chooses among them."""

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
        can_use_side: whether there are ops for `side`, and costs that say how much compute lanes slow each other down.
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
        """Return whether a step may run ops concurrently on `side`, even as one micro-batch."""
        return self.programs[self.list_allowed(config)[-1]] is not self.programs[0]


def list_placements(program: Program) -> tuple[Program, ...]:
    """Return *program* in each placement that is worth a prediction; only *program* itself if it has no `side` ops.

    1. All ops that compute are on `compute`.
    2. One placement for each kind of `side` op, if there are several: only that kind is on `side`.
    3. If further ops may move to `side`, one placement has them there, too. Then each lane computes for a micro-batch
       of its own: one lane the attention of one micro-batch, the other the experts of another. CloudMatrix-Infer
       decodes in this way (arXiv:2506.12708).
    4. All ops that the adapter declares on `side` are on `side`.
    """
    kinds = dict.fromkeys(op.name for op in program.ops if op.lane == SIDE)
    if not kinds:
        return (program,)
    alone = [program.fold_side(kind) for kind in kinds] if len(kinds) > 1 else []
    moved = [program.move_aside()] if any(op.may_move_to_side for op in program.ops) else []
    return (program.fold_side(), *alone, *moved, program)


def is_moved(program: Program) -> bool:
    """Return whether ops have been moved to `side`.

    If so, the common policies do not tell how fast an order a search finds: they let both micro-batches be in the same
    half of a layer.
    """
    return any(op.may_move_to_side and op.lane == SIDE for op in program.ops)
