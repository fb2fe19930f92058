"""Render a schedule as text, and parse it back: for errors, golden files and readers.

One row per instruction, one column per lane. `wait` lists the ops waited for, `*` marks a record, `free` lists the
freed values:

       #  compute           comm
       0  L0.attention/0 *
       1                    L0.attn_reduce/0 *  wait L0.attention/0
       2  L0.attention/1 *                      free %2/0
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule, Slot, list_lanes
from dbo_runtime.ir.values import Value

MAX_LINES_OF_OP = 4  # limit for the parser; each op is issued once

_MARK = "   <-- here"
_HEAD = "   #"  # header of the number column
_HASHED_HEAD = "step"  # its header in digests, which must stay the same across releases


def render(schedule: Schedule, mark: int | None = None, around: int | None = None) -> str:
    """Return the table of *schedule*, with instruction *mark* marked.

    With *around*, show only that many instructions before and after the mark.
    """
    lanes = schedule.lanes
    cells = [
        f"{instruction.label} *" if instruction.records else instruction.label for instruction in schedule.instructions
    ]
    width = {
        lane: max(
            [len(lane), *(len(c) for s, c in zip(schedule.instructions, cells, strict=True) if s.op.lane == lane)]
        )
        for lane in lanes
    }
    rows = [f"{_HEAD}  " + "  ".join(lane.ljust(width[lane]) for lane in lanes).rstrip()]
    if schedule.forks:
        rows.append("fork  " + " ".join(schedule.forks))
    for number, (instruction, cell) in enumerate(zip(schedule.instructions, cells, strict=True)):
        if around is not None and mark is not None and abs(number - mark) > around:
            continue
        columns = "  ".join((cell if lane == instruction.op.lane else "").ljust(width[lane]) for lane in lanes)
        row = f"{number:>4}  {columns}  {_render_effects(schedule, instruction)}".rstrip()
        rows.append(row + (_MARK if number == mark else ""))
    if schedule.joins:
        rows.append("join  " + " ".join(name_issue(schedule.programs, issue) for issue in schedule.joins))
    return "\n".join(rows)


def parse(text: str, programs: Sequence[Program]) -> Schedule:
    """Parse a rendered table of a schedule of these programs.

    Raises:
        ScheduleError: a line cannot be read. The message names it.
    """
    programs = tuple(programs)
    issues = {f"{op.label}/{mb}": Issue(mb, n) for mb, p in enumerate(programs) for n, op in enumerate(p.ops)}
    values = [{v.index: v for op in program.ops for v in (*op.reads, *op.writes)} for program in programs]
    instructions: list[Instruction] = []
    forks: tuple[str, ...] = ()
    joins: tuple[Issue, ...] = ()
    lines = text.splitlines()
    if len(lines) > MAX_LINES_OF_OP * len(issues) + MAX_LINES_OF_OP:
        raise ScheduleError(f"the schedule has {len(lines)} lines, but its programs only {len(issues)} ops.")
    for number, line in enumerate(lines):
        try:
            first, *words = line.removesuffix(_MARK).split()
            if first == "fork":
                forks = tuple(words)
            elif first == "join":
                joins = tuple(issues[word] for word in words)
            elif first != _HEAD.strip():
                instructions.append(_parse_instruction(words, programs, issues, values))
        except (KeyError, IndexError, ValueError) as error:
            raise ScheduleError(
                f"line {number + 1} of the schedule cannot be read ({error!s:.100}): {line[:200]!r}"
            ) from None
    unknown = set(forks) - set(list_lanes(programs))
    if unknown:
        raise ScheduleError(f"the schedule forks {', '.join(sorted(unknown))}, which no program has.")
    return Schedule(programs, tuple(instructions), forks, joins)


def digest(schedule: Schedule) -> str:
    """Return a short hash of the rendered table. Ranks with equal digests issue the same collectives in one order."""
    table = render(schedule).replace(_HEAD, _HASHED_HEAD, 1)
    return hashlib.sha256(table.encode()).hexdigest()[:16]


def name_issue(programs: Sequence[Program], issue: Issue) -> str:
    """Return a name such as `L3.attention/1`, or the bare numbers if there is no such op."""
    mb, position = issue
    known = 0 <= mb < len(programs) and 0 <= position < len(programs[mb].ops)
    return f"{programs[mb].ops[position].label}/{mb}" if known else str(issue)


def _render_effects(schedule: Schedule, instruction: Instruction) -> str:
    effects = []
    if instruction.waits:
        effects.append("wait " + " ".join(name_issue(schedule.programs, issue) for issue in instruction.waits))
    if instruction.frees:
        effects.append("free " + " ".join(f"%{slot.value.index}/{slot.micro_batch}" for slot in instruction.frees))
    return "  ".join(effects)


def _parse_instruction(
    words: list[str], programs: Sequence[Program], issues: dict[str, Issue], values: list[dict[int, Value]]
) -> Instruction:
    issue = issues[words[0]]
    sections: dict[str, list[str]] = {"*": [], "wait": [], "free": []}
    section = "*"
    records = False
    for word in words[1:]:
        if word == "*":
            records = True
        elif word in sections:
            section = word
        else:
            sections[section].append(word)
    if sections["*"]:
        raise ValueError(f"unexpected {sections['*'][0]!r}")
    op = programs[issue.micro_batch].ops[issue.position]
    waits = tuple(issues[word] for word in sections["wait"])
    return Instruction(issue, op, waits, records, tuple(_parse_slot(word, values) for word in sections["free"]))


def _parse_slot(word: str, values: list[dict[int, Value]]) -> Slot:
    index, _, micro_batch = word.removeprefix("%").partition("/")
    if not micro_batch.isdecimal():  # a negative number would count from the end
        raise ValueError(f"no micro-batch {micro_batch}")
    return Slot(int(micro_batch), values[int(micro_batch)][int(index)])
