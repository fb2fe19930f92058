"""Issue orders: pure functions that take all micro-batches' programs and return the order to issue their ops in.

A program consists of segments. A segment is a run of computing ops, then communication up to the next computing op.
A policy can overlap this communication with another micro-batch.
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
    """Issue one micro-batch after the other, without overlap: the reference for other policies."""
    return tuple(Issue(mb, position) for mb, program in enumerate(programs) for position in range(len(program.ops)))


def staggered(programs: Sequence[Program], lead: int) -> Order:
    """Alternate at every overlap point, each micro-batch *lead* segments ahead of the next.

    A lead of 0 is the ping-pong of DeepSeek-V3's prefill (arXiv:2412.19437, section 3.4.1). A lead of one or more helps
    where phases differ in length, and may be slower where they do not.
    """
    return _take_turns([_split_segments(mb, program) for mb, program in enumerate(programs)], lead)


def alternate(programs: Sequence[Program]) -> Order:
    """Alternate at every overlap point: `staggered` without a lead."""
    return staggered(programs, lead=0)


def layered(programs: Sequence[Program]) -> Order:
    """Alternate at every overlap point, and also before the first `ordered` op of another layer in a turn.

    No micro-batch then attends in a layer before all have attended in the previous layer, even where layers do not
    communicate. This holds for micro-batches that run the same program with ascending layers. Where `alternate` keeps
    this order by itself, both policies are the same.
    """
    return _take_turns([_split_layers(mb, program) for mb, program in enumerate(programs)], lead=0)


def keep_layers(policy: tuple[str, int]) -> tuple[str, int]:
    """Return the policy to use instead of the settings' one where layers must be taken in turn.

    Only `optimal` and `alternate` are replaced; the user asked for any other policy.
    """
    return (LAYERED, 0) if policy[0] in ("optimal", "alternate") else policy


def keeps_layers(ops: Iterable[Op]) -> bool:
    """Return whether this order issues no `ordered` op before one of an earlier layer, in any micro-batch."""
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
    """Issue the last micro-batch's ops first, as far as `ordered` ops allow. For checks only, never for serving.

    This order exposes an op that needs an order but does not declare it. A micro-batch whose attention is not `ordered`
    runs before the micro-batch whose keys it needs, and so computes a wrong result.
    """
    positions = [0] * len(programs)
    order: list[Issue] = []
    while ready := [mb for mb in range(len(programs)) if _is_ready(programs, positions, mb)]:
        order.append(Issue(ready[-1], positions[ready[-1]]))
        positions[ready[-1]] += 1
    return tuple(order)


def get_policy(name: str, lead: int) -> Policy:
    """Return the policy for a setting such as ("staggered", 1).

    `optimal` is `alternate` here: a search needs costs, so the planner does it.

    Raises:
        ConfigError: no policy has this name.
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
    """Return whether a micro-batch's next op may run: it exists and, if `ordered`, all earlier micro-batches ran it."""
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
    """Return a program's segments, cut so that each has `ordered` ops of one layer only."""
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
