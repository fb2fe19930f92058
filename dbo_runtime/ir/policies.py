"""Issue orders: pure functions from the programs of all micro-batches to the order in which the host issues their ops.

A program consists of segments: ops on lanes that compute, then communication up to the next op that computes. While
this runs, a policy can overlap it with another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.op import COMPUTING, Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue

LATEST_FIRST = "latest_first"
LAYERED = "layered"

Order = tuple[Issue, ...]
Policy = Callable[[Sequence[Program]], Order]


def sequential(programs: Sequence[Program]) -> Order:
    """Issue one micro-batch after the other, without overlap: the reference for the others."""
    return tuple(Issue(mb, position) for mb, program in enumerate(programs) for position in range(len(program.ops)))


def staggered(programs: Sequence[Program], lead: int) -> Order:
    """Alternate at every overlap point, each micro-batch *lead* segments ahead of the next.

    A lead of 0 is the ping-pong of DeepSeek-V3's prefill (arXiv:2412.19437, section 3.4.1); a lead of one or more
    helps where phases differ in length, and may be slower where they do not.
    """
    return _take_turns([_split_segments(mb, program) for mb, program in enumerate(programs)], lead)


def alternate(programs: Sequence[Program]) -> Order:
    """Alternate at every overlap point: `staggered` without a lead."""
    return staggered(programs, lead=0)


def layered(programs: Sequence[Program]) -> Order:
    """Alternate at every overlap point, and before an `ordered` op of another layer than the last one since the turn.

    So no micro-batch attends in a layer before all have attended in the one before it, also where layers do not
    communicate; of micro-batches that run the same program, whose layers count up. Where `alternate` does that by
    itself, this is the same.
    """
    return _take_turns([_split_layers(mb, program) for mb, program in enumerate(programs)], lead=0)


def keep_layers(policy: tuple[str, int]) -> tuple[str, int]:
    """Return the policy that takes the place of that of the settings where layers have to be kept in turn.

    Others than `optimal` and `alternate` are what the user asks for.
    """
    return (LAYERED, 0) if policy[0] in ("optimal", "alternate") else policy


def keeps_layers(ops: Iterable[Op]) -> bool:
    """Return whether no `ordered` op comes before one of an earlier layer, of whatever micro-batch, if issued so."""
    layers = [op.layer for op in ops if op.ordered and op.layer is not None]
    return all(earlier <= later for earlier, later in pairwise(layers))


def _take_turns(queues: Sequence[Sequence[Sequence[Issue]]], lead: int) -> Order:
    """Issue a segment of each micro-batch in turn [micro-batches][segments], each *lead* segments ahead of the next."""
    order: list[Issue] = []
    turns = max(mb * lead + len(queue) for mb, queue in enumerate(queues))
    for turn in range(turns):
        for mb, queue in enumerate(queues):
            if 0 <= turn - mb * lead < len(queue):
                order.extend(queue[turn - mb * lead])
    return tuple(order)


def latest_first(programs: Sequence[Program]) -> Order:
    """Issue the ops of the last micro-batch first, as far as `ordered` ops allow: no order to serve by.

    What needs an order and does not declare it is wrong in this one: a micro-batch whose attention is not `ordered`
    runs before the one whose keys it needs.
    """
    positions = [0] * len(programs)
    order: list[Issue] = []
    while ready := [mb for mb in range(len(programs)) if _is_ready(programs, positions, mb)]:
        order.append(Issue(ready[-1], positions[ready[-1]]))
        positions[ready[-1]] += 1
    return tuple(order)


def get_policy(name: str, lead: int) -> Policy:
    """Return the policy of a setting such as ("staggered", 1).

    `optimal` is `alternate` here: a search needs costs and is the planner's.

    Raises:
        ConfigError: if there is no policy of this name.
    """
    policies: dict[str, Policy] = {
        "optimal": alternate,
        "sequential": sequential,
        "alternate": alternate,
        "staggered": partial(staggered, lead=lead),
        LATEST_FIRST: latest_first,
        LAYERED: layered,
    }
    if name not in policies:
        raise ConfigError(f"there is no policy {name!r}; known are {', '.join(policies)}.")
    return policies[name]


def _is_ready(programs: Sequence[Program], positions: Sequence[int], micro_batch: int) -> bool:
    """Return whether a micro-batch has a next op, and all earlier ones have run theirs of its name if it is ordered."""
    ops = programs[micro_batch].ops[positions[micro_batch] :]
    return bool(ops) and not (
        ops[0].ordered
        and any(
            other.ordered and other.label == ops[0].label
            for program, position in zip(programs[:micro_batch], positions, strict=False)
            for other in program.ops[position:]
        )
    )


def _split_segments(micro_batch: int, program: Program) -> list[list[Issue]]:
    segments: list[list[Issue]] = [[]]
    for position, op in enumerate(program.ops):
        if position and op.lane in COMPUTING and program.ops[position - 1].lane not in COMPUTING:
            segments.append([])
        segments[-1].append(Issue(micro_batch, position))
    return segments


def _split_layers(micro_batch: int, program: Program) -> list[list[Issue]]:
    """Return the segments of a program, cut so that each has `ordered` ops of one layer only."""
    segments: list[list[Issue]] = []
    for segment in _split_segments(micro_batch, program):
        segments.append([])
        attended: int | None = None
        for issue in segment:
            op = program.ops[issue.position]
            if op.ordered and op.layer is not None:
                if attended is not None and attended != op.layer:
                    segments.append([])
                attended = op.layer
            segments[-1].append(issue)
    return segments
