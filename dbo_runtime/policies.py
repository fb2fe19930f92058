"""Issue orders: pure functions from the programs of all micro-batches to the order in which the host issues their ops.

A program consists of segments: ops on lanes that compute, then communication up to the next op that computes. While
this runs, a policy can overlap it with another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dbo_runtime.errors import ConfigError
from dbo_runtime.program import COMPUTING, Program
from dbo_runtime.schedule import Issue

LATEST_FIRST = "latest_first"

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
    queues = [list(_split_segments(mb, program)) for mb, program in enumerate(programs)]
    order: list[Issue] = []
    turns = max(mb * lead + len(queue) for mb, queue in enumerate(queues))
    for turn in range(turns):
        for mb, queue in enumerate(queues):
            if 0 <= turn - mb * lead < len(queue):
                order.extend(queue[turn - mb * lead])
    return tuple(order)


def alternate(programs: Sequence[Program]) -> Order:
    """Alternate at every overlap point: `staggered` without a lead."""
    return staggered(programs, lead=0)


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
