"""What an adapter declares: named ops, each with a lane and the values it reads and writes.

A program is recorded by running the adapter's function once, on `Value`s instead of tensors. All else (waits,
records, the points where values are freed) is derived from the reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import COMM, COMPUTE, COMPUTING, SIDE, Op, check_declaration, check_divided
from dbo_runtime.ir.values import Input, Value, locate_caller


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one micro-batch, in program order.

    Attributes:
        inputs: values that the caller passes in by name.
        ops: the ops in program order.
        outputs: values returned to the caller.
        named: names of the last outputs, which `ProgramBuilder.output` declared.
        nano_batches: number of nano-batches that its token-wise ops are cut into; 0 if they are not cut.
    """

    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    named: tuple[str, ...] = ()
    nano_batches: int = 0

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes used, `compute` first: a schedule starts and ends on it."""
        return tuple(dict.fromkeys([COMPUTE, *(op.lane for op in self.ops)]))

    def order_inputs(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the given inputs in the order of `inputs`.

        Raises:
            ProgramError: *given* lacks an input, or has an input that the program does not take.
        """
        names = [value.name for value in self.inputs]  # parts for nano-batches have the same name
        if given.keys() != {*names}:
            takes = ", ".join(dict.fromkeys(names))
            raise ProgramError(f"the program takes the inputs {takes}, but is given {', '.join(given)}.")
        return tuple(given[name] for name in names)

    def cut_inputs(
        self, given: Mapping[str, Any], tokens: slice, requests: slice, nano_batches: Sequence[slice] = ()
    ) -> tuple[Any, ...]:
        """Return one micro-batch's inputs in the order of `inputs`, each cut as declared.

        *nano_batches* are the tokens of each nano-batch, if the program's ops are cut into them.

        Raises:
            ProgramError: *given* lacks an input, or has an input that the program does not take.
        """
        ordered = self.order_inputs(given)
        return tuple(
            value.cut(one, tokens if value.nano_batch is None else nano_batches[value.nano_batch], requests)
            for value, one in zip(self.inputs, ordered, strict=True)
        )

    def fold_side(self, kept: str = "") -> Program:
        """Return the program with `side` ops moved to `compute`, except ops named *kept*."""
        if SIDE not in self.lanes:
            return self
        folded = (replace(op, lane=COMPUTE) if op.lane == SIDE and op.name != kept else op for op in self.ops)
        return replace(self, ops=tuple(folded))

    def move_aside(self) -> Program:
        """Return the program with every op on `side` that is declared there or may move there."""
        return replace(self, ops=tuple(replace(op, lane=SIDE) if op.may_move_to_side else op for op in self.ops))

    def get_owning_lanes(self) -> dict[Value, frozenset[str]]:
        """Return each value's owning lanes: those whose allocator may own its memory.

        A caching allocator reuses freed memory for the next allocation on the stream that first allocated it. An op
        that overwrites a value may return the same memory, so the lanes that own the overwritten value also own the
        op's results. Inputs belong to the caller, who allocated them on `compute`.
        """
        owning: dict[Value, frozenset[str]] = {value: frozenset((COMPUTE,)) for value in self.inputs}
        for op in self.ops:
            lanes = frozenset((op.lane,)).union(*(owning[value] for value in op.overwrites))
            owning.update(dict.fromkeys(op.writes, lanes))
        return owning


class ProgramBuilder:
    """Records a program. An adapter receives one as `p`.

    Args:
        has_side: whether ops may be on the `side` lane. If not, ops declared with `side` are on `compute`. An adapter
            that decomposes an op only for the `side` lane checks this first.

    Examples:
        >>> p = ProgramBuilder()
        >>> x = p.input("x")
        >>> partial = p.compute("attention", lambda x: x * 2, x)
        >>> reduced = p.comm("attn_reduce", lambda x: x + 1, partial)
        >>> [op.name for op in p.build(reduced).ops]
        ['attention', 'attn_reduce']
    """

    def __init__(self, has_side: bool = False) -> None:
        self.has_side = has_side
        self._inputs: list[Input] = []
        self._outputs: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._layer: int | None = None
        self._labels: dict[str, str] = {}
        self._overwritten: dict[Value, Op] = {}

    def input(self, name: str, token_dim: int | None = 0, request_dim: int | None = None) -> Value:
        """Declare an input that the caller passes by *name*, and the dimension to cut it along.

        It is cut by tokens along *token_dim*. If that is None, it is cut by requests along *request_dim*. If both are
        None, each micro-batch gets all of it.

        Raises:
            ProgramError: an op is already declared, or an input of this name is.
        """
        if not isinstance(name, str):
            raise ProgramError(f"the name of an input is {name!r}; it must be text. ({locate_caller()})")
        if self._ops:
            raise ProgramError(
                f"input {name!r} comes after the first op; declare all inputs first. ({locate_caller()})"
            )
        if any(name == value.name for value in self._inputs):
            raise ProgramError(f"input {name!r} was declared already; rename one of them. ({locate_caller()})")
        value = Input(len(self._values), name, token_dim, request_dim)
        self._values.append(value)
        self._inputs.append(value)
        return value

    def output(self, name: str, value: Value) -> None:
        """Declare a named result of the program. Named results follow the results passed to `build`."""
        if not isinstance(name, str):
            raise ProgramError(f"the name of an output is {name!r}; it must be text. ({locate_caller()})")
        if name in self._outputs:
            raise ProgramError(f"output {name!r} was declared already, as {self._outputs[name]}. ({locate_caller()})")
        self._outputs[name] = value

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Declare the ops of layer *index* inside this context."""
        if self._layer is not None:
            raise ProgramError(
                f"layer {index} opens inside layer {self._layer}; layers do not nest. ({locate_caller()})"
            )
        if not isinstance(index, int):
            raise ProgramError(f"a layer is {index!r}; it must be a whole number. ({locate_caller()})")
        self._layer = index
        try:
            yield
        finally:
            self._layer = None

    def compute(self, name: str, fn: Callable[..., Any], *reads: Value, **declaration: Any) -> Any:
        """Declare an op on the compute lane; arguments as in `op`."""
        return self.op(name, fn, *reads, lane=COMPUTE, **declaration)

    def comm(self, name: str, fn: Callable[..., Any], *reads: Value, **declaration: Any) -> Any:
        """Declare an op on the comm lane, and so an overlap point; arguments as in `op`."""
        declaration.setdefault("communicator", COMM)
        return self.op(name, fn, *reads, lane=COMM, **declaration)

    def side(self, name: str, fn: Callable[..., Any], *reads: Value, **declaration: Any) -> Any:
        """Declare an op on a second compute lane, concurrent with other ops of its micro-batch; arguments as in `op`.

        It is no overlap point. The op runs on `compute` if there is no second lane, or no predicted gain from it.
        """
        return self.op(name, fn, *reads, lane=SIDE if self.has_side else COMPUTE, **declaration)

    def may_move_to_side(self, name: str, fn: Callable[..., Any], *reads: Value, **declaration: Any) -> Any:
        """Declare an op on the compute lane that may run on `side` instead; arguments as in `op`.

        All such ops of a program move together, so that two micro-batches compute at the same time: one runs these ops,
        the other runs the rest of a layer. They must therefore not read the forward context, and must share no scratch
        memory with the ops that stay.
        """
        return self.op(name, fn, *reads, lane=COMPUTE, may_move_to_side=self.has_side, **declaration)

    def op(
        self,
        name: str,
        fn: Callable[..., Any],
        *reads: Value,
        lane: str,
        outputs: int = 1,
        ordered: bool = False,
        exclusive: str | None = None,
        communicator: str | None = None,
        overwrites: tuple[Value, ...] = (),
        host_sync: bool = False,
        may_move_to_side: bool = False,
        token_wise: bool = False,
        divided: Program | None = None,
    ) -> Any:
        """Declare an op on any lane and return its Value (a tuple of Values unless *outputs* is 1).

        An op is *token_wise* if row i of its results depends on row i of what it reads, and on nothing that other ops
        write. It then gives the same rows for a part of the tokens. Norms, projections, MLPs, experts and their
        communication are token-wise; attention is not. Only such ops are cut into nano-batches (`ir.nano_batches`).

        An op's results may share memory with a value it reads only if *overwrites* names this value, as for a fused
        add-norm or an in-place reduce. Results of one op never share memory with each other.

        *divided* computes the same from the same values in several ops, most of them token-wise. Its inputs stand for
        the values read, its outputs for the results. Steps in nano-batches run it instead (`ir.divided_ops`).

        Raises:
            ProgramError: the declaration is wrong. The message names its `file:line`.
        """
        where = locate_caller()
        check_declaration(name, outputs, exclusive, communicator, overwrites, where)
        writes = tuple(self._make_value(name) for _ in range(outputs))
        op = Op(
            name,
            lane,
            fn,
            reads,
            writes,
            self._layer,
            ordered,
            exclusive,
            communicator,
            overwrites,
            host_sync,
            where,
            may_move_to_side,
            token_wise,
            divided=divided,
        )
        self._check(op)
        check_divided(op)
        self._labels[op.label] = where
        self._overwritten.update(dict.fromkeys(overwrites, op))
        self._ops.append(op)
        return writes[0] if outputs == 1 else writes

    def build(self, *outputs: Value) -> Program:
        """Finish and return the program. Its outputs are these, then the named ones from `output`."""
        where = locate_caller()
        if not self._ops:
            raise ProgramError(f"the program has no ops; declare at least one with p.compute(...). ({where})")
        outputs = (*outputs, *self._outputs.values())
        for value in outputs:
            self._check_read("the program's result", value, where)
        return Program(tuple(self._inputs), tuple(self._ops), outputs, tuple(self._outputs))

    def _make_value(self, name: str) -> Value:
        value = Value(len(self._values), name)
        self._values.append(value)
        return value

    def _check(self, op: Op) -> None:
        where = op.declared_at
        for what, word in (("op name", op.name), ("lane", op.lane)):
            if not (isinstance(word, str) and word.isidentifier()):
                raise ProgramError(f"{what} {word!r} must be a plain word (letters, digits, _). ({where})")
        if not callable(op.fn):
            raise ProgramError(f"op {op.label!r} needs a function to call, not {op.fn!r}. ({where})")
        if op.may_move_to_side and op.lane not in COMPUTING:
            raise ProgramError(f"op {op.label!r} may move to side, so it must compute, but is on {op.lane}. ({where})")
        if op.token_wise and op.ordered:
            raise ProgramError(
                f"op {op.label!r} is ordered, because it reads what another micro-batch wrote; then it is not "
                f"token-wise. Declare one of the two. ({where})"
            )
        if op.label in self._labels:
            earlier = self._labels[op.label]
            raise ProgramError(f"op {op.label!r} was declared already at {earlier}; rename one of them. ({where})")
        for value in op.reads:
            self._check_read(f"op {op.label!r}", value, where)
        for value in op.overwrites:
            if value not in op.reads:
                raise ProgramError(f"op {op.label!r} overwrites {value}, which it does not read. ({where})")

    def _check_read(self, reader: str, value: Any, where: str) -> None:
        if not isinstance(value, Value):
            raise ProgramError(
                f"{reader} reads {value!r}, which is no value of the program. Bind constants and modules to the "
                f"function, for example by functools.partial. ({where})"
            )
        if value.index >= len(self._values) or self._values[value.index] is not value:
            raise ProgramError(f"{reader} reads {value}, which belongs to another program. ({where})")
        if value in self._overwritten:
            writer = self._overwritten[value]
            raise ProgramError(
                f"{reader} reads {value} after op {writer.label!r} ({writer.declared_at}) overwrote it; "
                f"read the result of {writer.label!r} instead. ({where})"
            )
