"""Micro-batches whose op times are known: recorded, drawn at random, and the best that any issue order makes of them.

The best is found by trying all orders, each judged by lowering it and a pass over the schedule. So it shares nothing
with `dbo_runtime.planner`, and can tell whether that is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue
from tests.support.forward_pass import pass_forward

LANES = {"A": COMPUTE, "C": COMM}

Layer = Sequence[tuple[str, float]]
"""The lanes (A: compute, C: communication, as in `docs/theory.md`) and microseconds of a layer's ops."""


def do_nothing(*_: Any) -> Any:
    """An op's function."""


class Shop(NamedTuple):
    """Programs, one per micro-batch, and the time of each of their ops [micro-batches][ops]."""

    programs: tuple[Program, ...]
    times: tuple[tuple[float, ...], ...]

    def __repr__(self) -> str:
        """Show the ops with their times: what hypothesis prints of a case that fails."""
        rows = []
        for mb, (program, times) in enumerate(zip(self.programs, self.times, strict=True)):
            for op, time in zip(program.ops, times, strict=True):
                reads = " ".join(map(str, op.reads))
                words = [f"{op.label}/{mb} on {op.lane} {time:g}: {reads} -> {op.writes[0]}"]
                words += [f"overwrites {' '.join(map(str, op.overwrites))}"] if op.overwrites else []
                rows.append(", ".join([*words, *["ordered"] * op.ordered, *filter(None, [op.exclusive])]))
        return "\n".join(["", *rows])


def record_chain(layer: Layer, layers: int) -> Program:
    """Return a program in which each op reads what the one before it wrote."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            for number, (kind, _) in enumerate(layer):
                x = p.op(f"op{number}", do_nothing, x, lane=LANES[kind])
    return p.build(x)


def share_chain(layer: Layer, layers: int, micro_batches: int) -> Shop:
    """Return micro-batches that share the time of *layers* layers evenly."""
    times = tuple(time / micro_batches for _ in range(layers) for _, time in layer)
    return Shop((record_chain(layer, layers),) * micro_batches, (times,) * micro_batches)


def find_least_end(shop: Shop) -> float:
    """Return when the last op ends in the best of all issue orders: the judge of what a search finds."""
    return min(simulate_orders(shop.programs, shop.times))


def simulate_orders(programs: Sequence[Program], times: Sequence[Sequence[float]]) -> Iterator[float]:
    """Yield the end of each order that keeps program order, but for those that lowering refuses."""
    for order in interleave([len(program.ops) for program in programs]):
        try:
            yield simulate_order(programs, times, order)
        except ScheduleError:  # ordered ops out of order
            continue


def simulate_order(programs: Sequence[Program], times: Sequence[Sequence[float]], order: Iterable[Issue]) -> float:
    """Return when the last op ends in this order."""

    def get_time(instruction: Instruction) -> float:
        return times[instruction.issue.micro_batch][instruction.issue.position]

    return max(span.end for span in pass_forward(lower(programs, order), get_time).spans)


def interleave(lengths: Sequence[int], done: tuple[int, ...] = ()) -> Iterator[tuple[Issue, ...]]:
    """Yield every order of sequences of these lengths that keeps the order of each."""
    done = done or (0,) * len(lengths)
    if done == tuple(lengths):
        yield ()
    for number, position in enumerate(done):
        if position < lengths[number]:
            reached = (*done[:number], position + 1, *done[number + 1 :])
            yield from ((Issue(number, position), *rest) for rest in interleave(lengths, reached))


@st.composite
def small_programs(draw: st.DrawFn, lanes: Sequence[str], max_ops: int) -> Program:
    """Ops that read up to two values each, some of them ordered, exclusive or in place."""
    p = ProgramBuilder()
    readable = [p.input("x")]
    for number in range(draw(st.integers(1, max_ops))):
        reads = draw(st.lists(st.sampled_from(readable), max_size=2, unique=True)) if readable else []
        overwrites = tuple(reads[: draw(st.sampled_from([0, 0, 0, 1]))])
        written = p.op(
            f"op{number}",
            do_nothing,
            *reads,
            lane=draw(st.sampled_from(lanes)),
            ordered=draw(st.sampled_from([False, False, False, True])),
            exclusive=draw(st.sampled_from([None, None, None, "a2a"])),
            overwrites=overwrites,
        )
        readable = [value for value in readable if value not in overwrites] + [written]
    return p.build()


@st.composite
def shops(draw: st.DrawFn, micro_batches: int = 2, max_ops: int = 5) -> Shop:
    """Micro-batches of equal or different programs, on two lanes or three. Times are integers: sums are exact."""
    lanes = draw(st.sampled_from([(COMPUTE, COMM), (COMPUTE, COMM), (COMPUTE, COMM, "aux")]))
    kinds = draw(st.lists(small_programs(lanes, max_ops), min_size=1, max_size=micro_batches))
    chosen = tuple(draw(st.sampled_from(kinds)) for _ in range(micro_batches))
    durations = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0])
    times = tuple(tuple(draw(durations) for _ in program.ops) for program in chosen)
    return Shop(chosen, times)


@st.composite
def chain_shops(draw: st.DrawFn, micro_batches: int = 2, max_ops: int = 5) -> Shop:
    """Micro-batches that are chains on two lanes: the job shop of `docs/theory.md`."""
    layers = [
        draw(st.lists(st.tuples(st.sampled_from("AC"), st.integers(0, 13)), min_size=1, max_size=max_ops))
        for _ in range(micro_batches)
    ]
    return Shop(
        tuple(record_chain(layer, 1) for layer in layers),
        tuple(tuple(float(time) for _, time in layer) for layer in layers),
    )
