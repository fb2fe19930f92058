"""On which compute lane a program's ops may be: the choices of a planner."""

from __future__ import annotations

from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.program import Program


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
