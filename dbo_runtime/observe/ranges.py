"""Names of ops and steps in profilers. They are fixed, because people search for them and `dbo trace` parses them.

An op of micro-batch 1 that is instruction 14 of its schedule, and waited for instructions 9 and 12, is called

    dbo: layer 3 attention mb 1 on compute #14 after #9 #12

The layer is left out for an op outside all layers, and `after` for an op that waits for no other lane. A step is called
`dbo: step of 512+488 tokens, schedule 1a2b3c4d`, with the tokens of each micro-batch. A replayed graph shows no ops,
only `dbo: replay`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from dbo_runtime.batch import BatchSlice
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule

PREFIX = "dbo: "
OpenRange = Callable[[str], AbstractContextManager[object]]
"""Opens a range of this name on the calling thread, in all profilers that are on."""

_OP = re.compile(
    rf"{PREFIX}(?:layer (?P<layer>\d{{1,9}}) )?(?P<op>\w+) mb (?P<micro_batch>\d{{1,9}}) on (?P<lane>\w+)"
    r" #(?P<number>\d{1,9})(?: after(?P<awaited>(?: #\d{1,9})+))?"
)
_STEP = re.compile(rf"{PREFIX}step of (?P<sizes>\d+(?:\+\d+)*) tokens, schedule (?P<digest>\S+)")


class Plan(Protocol):
    """The properties of a plan that a step's name contains."""

    @property
    def slices(self) -> Sequence[BatchSlice]:
        """One slice per micro-batch."""

    @property
    def digest(self) -> str:
        """Digest of the schedule."""


class RangedOp(NamedTuple):
    """The parsed name of an op's range.

    Attributes:
        label: the op's label, such as `L3.attention`.
        number: number of the op's instruction in the schedule; ops are issued in this order.
        waits: numbers of the instructions that the op's lane waits for first.
    """

    label: str
    micro_batch: int
    lane: str
    number: int
    waits: tuple[int, ...]


def name_ops(schedule: Schedule) -> list[str]:
    """Return the range name of each instruction, in issue order."""
    numbers = {instruction.issue: number for number, instruction in enumerate(schedule.instructions)}
    return [_name_op(instruction, numbers) for instruction in schedule.instructions]


def name_step(sizes: Sequence[int], digest: str) -> str:
    """Return the name of a step's range. *sizes* are the token counts of the micro-batches."""
    return f"{PREFIX}step of {'+'.join(map(str, sizes))} tokens, schedule {digest}"


def open_step(open_range: OpenRange | None, plan: Plan) -> AbstractContextManager[object]:
    """Open a step's range. Do nothing without profilers."""
    if open_range is None:
        return nullcontext()
    return open_range(name_step([piece.size for piece in plan.slices], plan.digest))


def read_op(name: str) -> RangedOp | None:
    """Parse the name of an op's range. Return None if it is no such name."""
    found = _OP.fullmatch(name)
    if found is None:
        return None
    layer, awaited = found["layer"], found["awaited"] or ""
    return RangedOp(
        found["op"] if layer is None else f"L{int(layer)}.{found['op']}",
        int(found["micro_batch"]),
        found["lane"],
        int(found["number"]),
        tuple(int(number) for number in awaited.replace("#", "").split()),
    )


def is_step(name: str) -> bool:
    """Return whether this is the name of a step's range."""
    return _STEP.fullmatch(name) is not None


def _name_op(instruction: Instruction, numbers: dict[Issue, int]) -> str:
    op = instruction.op
    where = "" if op.layer is None else f"layer {op.layer} "
    awaited = "".join(f" #{numbers[issue]}" for issue in instruction.waits)
    after = f" after{awaited}" if awaited else ""
    return (
        f"{PREFIX}{where}{op.name} mb {instruction.issue.micro_batch} on {op.lane} #{numbers[instruction.issue]}{after}"
    )
