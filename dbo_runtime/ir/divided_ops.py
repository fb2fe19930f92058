"""Replace the divided ops of a program by the ops that they are divided into.

A divided op has a small program that computes the same from the same values. Steps in micro-batches run the op itself,
because that takes fewer points of the host. Steps in nano-batches run its program, most of whose ops are token-wise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value


def divide_ops(program: Program) -> Program:
    """Return the program with the ops of each divided op in place of it."""
    known = (*program.inputs, *(value for op in program.ops for value in op.writes))
    numbers = count(1 + max((value.index for value in known), default=0))
    ops = (own for op in program.ops for own in ((op,) if op.divided is None else _fit(op, op.divided, numbers)))
    return replace(program, ops=tuple(ops))


def _fit(op: Op, divided: Program, numbers: Iterator[int]) -> Iterator[Op]:
    """Yield the ops that *op* is divided into, with its values as inputs and outputs; others get new *numbers*."""
    values: dict[Value, Value] = dict(zip(divided.inputs, op.reads, strict=True))
    values.update(zip(divided.outputs, op.writes, strict=True))
    for own in divided.ops:
        for value in own.writes:
            if value not in values:
                values[value] = Value(next(numbers), value.name)
        yield replace(
            own,
            reads=tuple(values[value] for value in own.reads),
            writes=tuple(values[value] for value in own.writes),
            overwrites=tuple(values[value] for value in own.overwrites),
            layer=op.layer,
        )
