"""Cut the token-wise ops of a program into nano-batches, which overlap within one step.

A nano-batch is a part of the tokens of single ops (NanoFlow, arXiv:2408.12757). Token-wise ops run once for each
nano-batch. All other ops, such as attention, are *joint*: they run once, for all tokens. So attention keeps the
metadata of the step, and no builder has to make others. Between two joint ops, one nano-batch computes while another
communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import Op, unpack
from dbo_runtime.ir.policies import Policy, alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Input, Value

SIZES = "nano_batch_sizes"
"""Name of a further input: the number of tokens of each nano-batch [nano-batches]."""


class Rows(NamedTuple):
    """Functions that put the rows of tokens together, and take them apart.

    Attributes:
        join: makes one value of the parts of all nano-batches [tokens of each, ...] -> [tokens, ...].
        cut: makes the parts of one value, given their sizes [tokens, ...] -> [tokens of each, ...]. They may be views.
    """

    join: Callable[[Sequence[Any]], Any]
    cut: Callable[[Any, Sequence[int]], Sequence[Any]]


def _refuse(*_: Any) -> Any:
    raise ProgramError("this program was cut to be predicted: it has no functions that join and cut values.")


NO_ROWS = Rows(_refuse, _refuse)
"""For programs that are predicted, and not run."""


@dataclass(frozen=True, slots=True)
class NanoProgram:
    """A program whose token-wise ops are cut into nano-batches.

    Attributes:
        program: the ops of all nano-batches. Its outputs are those of nano-batch 0, then of nano-batch 1, and so on.
        parts: parts in each nano-batch, by value of the original program; only of values that are cut.
        wholes: undivided values, by value of the original program; only of those that some op gets undivided.
    """

    program: Program
    parts: dict[Value, tuple[Value, ...]]
    wholes: dict[Value, Value]


def cut_program(program: Program, count: int, rows: Rows, policy: Policy = alternate) -> NanoProgram:
    """Return the program with its token-wise ops cut into *count* nano-batches.

    Ops between two joint ops form a region. The *policy* orders the nano-batches of a region, as it orders
    micro-batches. A joint op ends a region only if it reads a value of it.

    Raises:
        ProgramError: if no op is token-wise, or a token-wise op reads an input that is not cut by tokens in a way that
            nano-batches cannot share.
    """
    if not any(op.token_wise for op in program.ops):
        raise ProgramError("no op of the program is token-wise, so there is nothing to cut into nano-batches.")
    return _Cutter(program, count, rows, policy).cut()


def group_outputs(outputs: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """Return the outputs of a cut program by nano-batch [nano-batches][outputs of the original program]."""
    each = len(outputs) // count
    return [tuple(outputs[first : first + each]) for first in range(0, len(outputs), each)]


class _Cutter:
    """Makes the ops of a `NanoProgram`, in program order, region by region."""

    def __init__(self, program: Program, count: int, rows: Rows, policy: Policy) -> None:
        self._program = program
        self._count = count
        self._rows = rows
        self._policy = policy
        self._producers = {value: op for op in program.ops for value in op.writes}
        self._cut_values = _list_cut_values(program)
        self._parts: dict[Value, tuple[Value, ...]] = {}
        self._wholes: dict[Value, Value] = {}
        self._inputs: list[Input] = []
        self._ops: list[Op] = []
        self._region: list[Op] = []
        self._made = 0

    def cut(self) -> NanoProgram:
        sizes = self._make_input(Input(0, SIZES, None))
        for value in self._program.inputs:
            self._cut_input(value)
        for op in self._program.ops:
            if op.token_wise:
                self._region.append(op)
                continue
            written = {value for other in self._region for value in other.writes}
            if not written.isdisjoint(op.reads) or op.overwrites:
                self._end_region()
            self._add_joint(op, sizes)
        self._end_region()
        outputs = [self._parts[value][number] for number in range(self._count) for value in self._program.outputs]
        program = Program(tuple(self._inputs), tuple(self._ops), tuple(outputs), (), self._count)
        return NanoProgram(program, self._parts, self._wholes)

    def _cut_input(self, value: Input) -> None:
        """Declare an input: its parts, if token-wise ops read it, and all of it, if joint ops do."""
        readers = [op for op in self._program.ops if value in op.reads]
        if value not in self._cut_values or value.token_dim is None:
            self._check_shared(value, [op for op in readers if op.token_wise])
            self._wholes[value] = self._make_input(value)
            return
        numbers = range(self._count)
        self._parts[value] = tuple(self._make_input(replace(value, nano_batch=number)) for number in numbers)
        joint = [op for op in readers if not op.token_wise]
        # The parts are views of the whole, so a value that is overwritten is not given both ways, but joined.
        writer = next((op for op in readers if value in op.overwrites), None)
        if writer is None and joint:
            self._wholes[value] = self._make_input(value)
        elif writer is not None and joint and value.token_dim != 0:
            raise ProgramError(
                f"op {joint[0].label!r} takes all of the input {value.name!r}, which {writer.label!r} "
                f"({writer.declared_at}) overwrites in parts, but parts are joined along the first dimension only. "
                f"Overwrite a copy. ({joint[0].declared_at})"
            )

    def _check_shared(self, value: Input, readers: Sequence[Op]) -> None:
        """Raise ProgramError if nano-batches cannot share an input that token-wise ops read."""
        for op in readers:
            if value.request_dim is not None:
                raise ProgramError(
                    f"op {op.label!r} is declared token-wise, but reads the input {value.name!r}, which is cut by "
                    f"requests. Declare the op without token_wise. ({op.declared_at})"
                )
            if value in op.overwrites:
                raise ProgramError(
                    f"op {op.label!r} is declared token-wise, but overwrites the input {value.name!r}, which all "
                    f"nano-batches share. Declare the op without token_wise. ({op.declared_at})"
                )

    def _end_region(self) -> None:
        if not self._region:
            return
        for value in (value for op in self._region for value in op.writes):
            self._parts[value] = self._make_parts(value)
        pieces = [Program((), tuple(self._region), ())] * self._count
        for number, position in self._policy(pieces):
            self._add_part(self._region[position], number)
        self._region = []

    def _add_part(self, op: Op, number: int) -> None:
        """Add a token-wise op of one nano-batch."""
        self._ops.append(
            replace(
                op,
                reads=tuple(self._get_part(value, number) for value in op.reads),
                writes=tuple(self._parts[value][number] for value in op.writes),
                overwrites=tuple(self._get_part(value, number) for value in op.overwrites),
                nano_batch=number,
            )
        )

    def _get_part(self, value: Value, number: int) -> Value:
        parts = self._parts.get(value)
        return self._wholes[value] if parts is None else parts[number]

    def _add_joint(self, op: Op, sizes: Value) -> None:
        """Add an op that takes all tokens: parts that it reads are joined, and results that are read cut are cut."""
        joins = tuple(value not in self._wholes for value in op.reads)
        cuts = tuple(value in self._cut_values for value in op.writes)
        reads: list[Value] = []
        for value, is_joined in zip(op.reads, joins, strict=True):
            reads += self._parts[value] if is_joined else (self._wholes[value],)
        if any(cuts):
            reads.append(sizes)
        writes: list[Value] = []
        for value, is_cut in zip(op.writes, cuts, strict=True):
            if is_cut:
                self._parts[value] = self._make_parts(value)
                writes += self._parts[value]
            else:
                self._wholes[value] = self._make_value(value.name)
                writes.append(self._wholes[value])
        overwrites = tuple(self._wholes[value] for value in op.overwrites if value in self._wholes)
        call = JointCall(op, self._count, joins, cuts, self._rows, self._producers)
        self._ops.append(replace(op, fn=call, reads=tuple(reads), writes=tuple(writes), overwrites=overwrites))

    def _make_parts(self, value: Value) -> tuple[Value, ...]:
        return tuple(self._make_value(f"{value.name}#{number}") for number in range(self._count))

    def _make_value(self, name: str) -> Value:
        self._made += 1
        return Value(self._made - 1, name)

    def _make_input(self, value: Input) -> Input:
        self._made += 1
        made = replace(value, index=self._made - 1)
        self._inputs.append(made)
        return made


class JointCall:
    """Calls the function of a joint op on all tokens.

    Args:
        op: the op, as it was declared.
        count: number of nano-batches.
        joins: whether a value is given in parts, for each value that the op reads.
        cuts: whether a value is returned in parts, for each value that the op writes.
        rows: joins and cuts values.
        producers: the op that wrote each value; only for error messages.
    """

    __slots__ = ("_count", "_cuts", "_joins", "_op", "_producers", "_rows")

    def __init__(
        self,
        op: Op,
        count: int,
        joins: Sequence[bool],
        cuts: Sequence[bool],
        rows: Rows,
        producers: dict[Value, Op],
    ) -> None:
        self._op = op
        self._count = count
        self._joins = joins
        self._cuts = cuts
        self._rows = rows
        self._producers = producers

    def __call__(self, *given: Any) -> Any:
        """Return all results, or the one result itself."""
        values = iter(given)
        arguments = [
            self._join(number, [next(values) for _ in range(self._count)]) if is_joined else next(values)
            for number, is_joined in enumerate(self._joins)
        ]
        result = self._op.fn(*arguments)
        if not any(self._cuts):
            return result
        results = [*self._take_apart(unpack(result, len(self._cuts)), next(values))]
        return results if len(results) > 1 else results[0]

    def _join(self, number: int, parts: list[Any]) -> Any:
        try:
            return self._rows.join(parts)
        except Exception as error:
            op, value = self._op, self._op.reads[number]
            writer = self._producers.get(value)
            if writer is None:  # an input
                raise
            raise ProgramError(
                f"op {op.label!r} takes all tokens, but {value} is not rows of tokens that can be joined: "
                f"{error!r:.200}. Declare {op.label!r} token-wise ({op.declared_at}), or {writer.label!r} without "
                f"token_wise ({writer.declared_at})."
            ) from error

    def _take_apart(self, results: Sequence[Any], sizes: Sequence[int]) -> Iterator[Any]:
        for value, result, is_cut in zip(self._op.writes, results, self._cuts, strict=True):
            if not is_cut:
                yield result
                continue
            try:
                parts = self._rows.cut(result, sizes)
            except Exception as error:
                op = self._op
                raise ProgramError(
                    f"{value}, a result of op {op.label!r}, is not rows of tokens that can be cut into nano-batches of "
                    f"{list(sizes)}: {error!r:.200}. Declare the token-wise ops that read it without token_wise, or "
                    f"this op token-wise. ({op.declared_at})"
                ) from error
            yield from parts


def _list_cut_values(program: Program) -> set[Value]:
    """Return the values that are needed in parts: token-wise ops read them, or they are outputs."""
    cut = {value for op in program.ops if op.token_wise for value in op.reads}
    return cut.union(program.outputs, (value for op in program.ops if op.token_wise for value in op.writes))
