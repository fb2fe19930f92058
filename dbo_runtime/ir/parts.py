"""Replace the ops of a program by their parts.

An op may have parts: a small program that computes the same from the same values. Steps in micro-batches run the op
itself, because it takes fewer points of the host. Steps in nano-batches run its parts, of which most are token-wise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value


def divide_ops(program: Program) -> Program:
    """Return the program with each op that has parts replaced by them."""
    if not any(op.parts is not None for op in program.ops):
        return program
    made = 1 + max(value.index for value in (*program.inputs, *(value for op in program.ops for value in op.writes)))
    ops: list[Op] = []
    for op in program.ops:
        if op.parts is None:
            ops.append(op)
            continue
        ops += _fit(op, op.parts, made)
        made += len(op.parts.ops) and 1 + max(value.index for part in op.parts.ops for value in part.writes)
    return replace(program, ops=tuple(ops))


def _fit(op: Op, parts: Program, made: int) -> Iterator[Op]:
    """Yield the parts of an op, which read and write its values; other values get numbers from *made* on."""
    known: dict[Value, Value] = dict(zip(parts.inputs, op.reads, strict=True))
    known.update(zip(parts.outputs, op.writes, strict=True))
    for part in parts.ops:
        for value in part.writes:
            known.setdefault(value, Value(made + value.index, value.name))
        yield replace(
            part,
            reads=tuple(known[value] for value in part.reads),
            writes=tuple(known[value] for value in part.writes),
            overwrites=tuple(known[value] for value in part.overwrites),
            layer=op.layer,
        )
