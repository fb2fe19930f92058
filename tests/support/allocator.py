"""What a caching allocator does with the values of a schedule: a model that shares nothing with lowering.

A block of memory belongs to the lane of the op that allocated it. When the last value in it is dropped, any op that is
issued to that lane from then on may be handed it, without asking whether ops on other lanes are done with it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.schedule import Schedule, Slot
from dbo_runtime.ir.values import Value
from tests.support.oracle import Graph


@dataclass
class Block:
    """Memory of a lane: the values in it, and the steps that have used it."""

    lane: str
    slots: set[Slot] = field(default_factory=set)
    uses: list[int] = field(default_factory=list)


def find_stolen_blocks(schedule: Schedule, results_alias: bool) -> list[str]:
    """Return the steps that may be handed memory that is still in use.

    With *results_alias*, an op that overwrites values returns their very memory, first for first; otherwise it returns
    new memory.
    """
    graph = Graph(schedule)
    blocks: dict[Slot, Block] = {}
    pools: dict[str, list[Block]] = defaultdict(list)
    stolen = []
    for number, step in enumerate(schedule.instructions):
        mb, lane = step.issue.micro_batch, step.op.lane
        for slot in step.frees:
            block = blocks[slot]
            block.slots.discard(slot)
            if not block.slots:
                pools[block.lane].append(block)
        for block in pools[lane]:
            stolen += [f"{step.label} over step {use}" for use in block.uses if not graph.is_before(use, number)]
        for value in step.op.writes:
            origin = _find_origin(step.op, value) if results_alias else None
            block = blocks.get(Slot(mb, origin), Block("the caller's")) if origin is not None else Block(lane)
            blocks[Slot(mb, value)] = block
            block.slots.add(Slot(mb, value))
        for value in (*step.op.reads, *step.op.writes):
            if Slot(mb, value) in blocks:
                blocks[Slot(mb, value)].uses.append(number)
    return stolen


def _find_origin(op: Op, result: Value) -> Value | None:
    """Return the overwritten value whose memory a result is, if it is one's."""
    return next((origin for origin, value in zip(op.overwrites, op.writes, strict=False) if value is result), None)
