"""Random programs, issue orders and batches, for hypothesis.

The programs are recorded with the real `ProgramBuilder`. Ops compute on one-element lists and change in place what they
say they overwrite, so a missing order between two of them shows in the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE, Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue, Schedule
from dbo_runtime.ir.values import Value

LANES = (COMPUTE, COMM, "aux")


class Case(NamedTuple):
    """Programs, one per micro-batch, and an order in which their ops may be issued."""

    programs: tuple[Program, ...]
    order: tuple[Issue, ...]

    def lower(self) -> Schedule:
        return lower(self.programs, self.order)

    def __repr__(self) -> str:
        """Show the ops in the order of issue: what hypothesis prints of a case that fails."""
        ops = [(mb, self.programs[mb].ops[position]) for mb, position in self.order]
        rows = [f"{op.label}/{mb} on {op.lane}: {describe_op(op)}" for mb, op in ops]
        outputs = [f"micro-batch {mb} returns {_join(p.outputs)}" for mb, p in enumerate(self.programs) if p.outputs]
        return "\n".join(["", *rows, *outputs])


@dataclass(frozen=True)
class Mix:
    """An op's function: writes a number made of all that it reads, in place where it overwrites."""

    salt: int
    outputs: int
    overwritten: tuple[int, ...]

    def __call__(self, *cells: list[int]) -> Any:
        mixed = hash((self.salt, *(cell[0] for cell in cells)))
        for number in self.overwritten:
            cells[number][0] = mixed + number
        results = [cells[number] for number in self.overwritten] + [[mixed - n] for n in range(self.outputs)]
        return results[0] if self.outputs == 1 else tuple(results[: self.outputs])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One to seven ops on three lanes; each communicator stays on one lane."""
    p = ProgramBuilder()
    readable = [p.input("first"), p.input("second")]
    for number in range(draw(st.integers(1, 7))):
        reads = draw(st.lists(st.sampled_from(readable), max_size=3, unique=True)) if readable else []
        overwritten = draw(st.sampled_from([(), (), tuple(range(len(reads[:1]))), tuple(range(len(reads)))]))
        overwrites = tuple(reads[n] for n in overwritten)
        outputs = draw(st.sampled_from([1, 1, 1, 2, 0]))
        lane = draw(st.sampled_from(LANES))
        written = p.op(
            f"op{number}",
            Mix(number, outputs, overwritten),
            *reads,
            lane=lane,
            outputs=outputs,
            ordered=draw(st.booleans()),
            exclusive=draw(st.sampled_from([None, None, "a2a"])),
            communicator=draw(st.sampled_from([None, f"group_{lane}"])),
            overwrites=overwrites,
        )
        readable = [value for value in readable if value not in overwrites]
        readable += [written] if isinstance(written, Value) else written
    outputs_of_program = draw(st.lists(st.sampled_from(readable), max_size=2, unique=True)) if readable else []
    return p.build(*outputs_of_program)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to four micro-batches that run up to three different programs, issued in any order that is legal."""
    kinds = draw(st.lists(programs(), min_size=1, max_size=3))
    chosen = tuple(draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 4))))
    return Case(chosen, draw(orders(chosen)))


@st.composite
def orders(draw: st.DrawFn, chosen: Sequence[Program]) -> tuple[Issue, ...]:
    """Any interleaving that keeps program order and, of ordered ops, the order of the micro-batches."""
    position = [0] * len(chosen)
    order: list[Issue] = []
    while ready := [mb for mb in range(len(chosen)) if _may_issue(chosen, position, mb)]:
        mb = draw(st.sampled_from(ready))
        order.append(Issue(mb, position[mb]))
        position[mb] += 1
    return tuple(order)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to eight requests, short and long, with backends that can or cannot take a cut inside."""
    query_lens = tuple(draw(st.lists(st.integers(1, 3) | st.integers(4, 300), min_size=1, max_size=8)))
    decode_len = draw(st.integers(1, 4))
    prefill_tokens = sum(length for length in query_lens if length > decode_len)
    return Batch(query_lens, prefill_tokens, draw(st.booleans()), decode_len)


def describe_op(op: Op) -> str:
    """Return what an op declares, but for its name and lane."""
    words = [f"{_join(op.reads)} -> {_join(op.writes)}"]
    words += [f"overwrites {_join(op.overwrites)}"] if op.overwrites else []
    words += ["ordered"] if op.ordered else []
    return ", ".join([*words, *(word for word in (op.exclusive, op.communicator) if word)])


def make_inputs(case: Case) -> list[tuple[list[int], ...]]:
    """Return fresh cells for the inputs of each micro-batch."""
    return [tuple([100 * mb + n] for n in range(len(program.inputs))) for mb, program in enumerate(case.programs)]


def _join(values: Sequence[Value]) -> str:
    return " ".join(map(str, values))


def _may_issue(chosen: Sequence[Program], position: list[int], mb: int) -> bool:
    if position[mb] == len(chosen[mb].ops):
        return False
    op = chosen[mb].ops[position[mb]]
    return not op.ordered or not any(
        other.ordered and other.label == op.label
        for earlier, program in enumerate(chosen[:mb])
        for other in program.ops[position[earlier] :]
    )
