"""Run the ops of micro-batches one after the other, in any issue order, and watch the effects of each op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dbo_runtime.engine.executor import Enter, describe_op, no_context
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import Op, unpack
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue, list_first_contexts
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.sanitizer.effects import Held, OpCall, describe_change
from dbo_runtime.lab.sanitizer.memory import copy_tensors, find_change, list_tensors

Kept = dict[Value, Any]


class Fault(NamedTuple):
    """An undeclared effect of an op."""

    op: Op
    what: str


@dataclass
class WatchedRun:
    """A run, with the faults found in it.

    Attributes:
        programs: one per micro-batch.
        kept: copies of the values that each micro-batch's ops wrote [micro-batches]; later ops may overwrite the
            originals.
        faults: the faults, in the order in which they were found.
    """

    programs: Sequence[Program]
    kept: list[Kept] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    _values: list[dict[Value, Any]] = field(default_factory=list)
    _done: list[int] = field(default_factory=list)

    def run(self, inputs: Sequence[Sequence[Any]], order: Iterable[Issue], enter: Enter) -> None:
        """Run the ops in *order*. *enter* makes a context current, by its number (see `Schedule.list_contexts`)."""
        first_contexts = list_first_contexts(self.programs)
        self._values = [dict(zip(p.inputs, given, strict=True)) for p, given in zip(self.programs, inputs, strict=True)]
        self.kept = [{} for _ in self.programs]
        self._done = [0] * len(self.programs)
        for micro_batch, position in order:
            op = self.programs[micro_batch].ops[position]
            enter(first_contexts[micro_batch] + op.context)
            self._run_op(micro_batch, op)
            self._done[micro_batch] = position + 1

    def _run_op(self, micro_batch: int, op: Op) -> None:
        values = self._values[micro_batch]
        reads = [values[value] for value in op.reads]
        call, given = OpCall(op, reads), copy_tensors(reads) if op.communicator is not None else []
        results = _call(op, micro_batch, reads)
        self.faults += [Fault(op, describe_change(value)) for value, change in call.find_changes() if change]
        shared = call.find_shared(results, self._list_held(micro_batch, op))
        if shared is not None:
            self.faults.append(Fault(op, shared))
        if op.communicator is not None and not _are_among(results, given):
            self.faults.append(Fault(op, _describe_computing(op)))
        values.update(zip(op.writes, results, strict=True))
        copies = (item.clone() if isinstance(item, torch.Tensor) else item for item in results)
        self.kept[micro_batch].update(zip(op.writes, copies, strict=True))

    def _list_held(self, own: int, running: Op) -> Iterator[Held]:
        """Yield the values that later ops or the caller will read, except those that the running op reads."""
        for micro_batch, program in enumerate(self.programs):
            later = program.ops[self._done[micro_batch] :]
            needed = {*program.outputs, *(value for op in later for value in op.reads)}
            for value in needed & self._values[micro_batch].keys():
                if micro_batch != own or value not in running.reads:
                    yield Held(f"{value} of micro-batch {micro_batch}", self._values[micro_batch][value])


def run_watched(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    order: Iterable[Issue] | None = None,
    enter: Enter = no_context,
) -> WatchedRun:
    """Run micro-batches op by op on one rank, in *order*; by default one micro-batch after the other.

    Raises:
        ProgramError: an op's function fails. The message names op and line; the cause is the function's error.
    """
    run = WatchedRun(programs)
    run.run(inputs, sequential(programs) if order is None else order, enter)
    return run


def run_ops(program: Program, inputs: Sequence[Any]) -> Kept:
    """Run a program op after op; return copies of all values that its ops wrote."""
    return run_watched([program], [inputs]).kept[0]


def _call(op: Op, micro_batch: int, reads: Sequence[Any]) -> Sequence[Any]:
    """Return the values that an op writes.

    An error of the op's function is most often a mistake in the declaration: an extra value, or one of another shape.
    """
    try:
        return unpack(op.fn(*reads), len(op.writes))
    except Exception as error:
        given = ", ".join(f"{value} {_describe_value(read)}" for value, read in zip(op.reads, reads, strict=True))
        lines = f"{type(error).__name__}: {error}", f"while running {describe_op(op, micro_batch)}", f"with {given}"
        raise ProgramError("\n  ".join(lines)) from error


def _describe_value(value: Any) -> str:
    return str([*value.shape]) if isinstance(value, torch.Tensor) else f"({type(value).__name__})"


def _are_among(results: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return whether each returned tensor equals one of the given tensors."""
    return all(
        any(item.shape == other.shape and not find_change(item, [other]) for other in given)
        for item in list_tensors(list(results))
    )


def _describe_computing(op: Op) -> str:
    return (
        f"it computes on communicator {op.communicator!r}: on one rank a collective returns what it is given. Declare "
        "what computes with p.compute"
    )
