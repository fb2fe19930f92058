"""One op of a program, and the lanes it may be on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.values import Value

if TYPE_CHECKING:
    from dbo_runtime.ir.program import Program

COMPUTE = "compute"
COMM = "comm"
SIDE = "side"
COMPUTING = (COMPUTE, SIDE)  # lanes without communication

MAX_OUTPUTS = 1_000  # results of one op


@dataclass(frozen=True, slots=True)
class Op:
    """One op of a micro-batch's program.

    Attributes:
        name: the op's name, unique within its layer.
        lane: name of the lane the op runs on.
        fn: the op's function: takes the values read, returns the values written (a tuple if there are several).
        reads, writes: the values, in the order of fn's arguments and results.
        layer: index of the op's layer, or None outside any layer.
        ordered: whether micro-batch i must run it before micro-batch i+1 does, because it touches shared state such as
            the KV cache.
        exclusive: name of a shared buffer; ops with the same buffer never run at the same time.
        communicator: name of the communicator the op uses; one communicator stays on one lane.
        overwrites: the values read whose memory the op changes or returns as its own result.
        host_sync: whether the op blocks the host, so that it cannot be captured into a graph.
        declared_at: `file:line` of the declaration.
        may_move_to_side: whether the op may run on `side` instead, while another micro-batch computes on `compute`.
        token_wise: whether the results for a token depend on nothing else, so that the op may be cut into nano-batches.
        nano_batch: number of the nano-batch that the op computes; None if it computes all tokens of its micro-batch.
        divided: program that computes the same in several ops, for steps in nano-batches; None if there is none.
    """

    name: str
    lane: str
    fn: Callable[..., Any]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    layer: int | None = None
    ordered: bool = False
    exclusive: str | None = None
    communicator: str | None = None
    overwrites: tuple[Value, ...] = ()
    host_sync: bool = False
    declared_at: str = ""
    may_move_to_side: bool = False
    token_wise: bool = False
    nano_batch: int | None = None
    divided: Program | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        """The op's name within its program, such as `L3.attention`, or `L3.mlp#1` in nano-batch 1."""
        label = self.name if self.layer is None else f"L{self.layer}.{self.name}"
        return label if self.nano_batch is None else f"{label}#{self.nano_batch}"

    @property
    def context(self) -> int:
        """Number of the op's context within its micro-batch: 0 for all tokens, then one for each nano-batch."""
        return 0 if self.nano_batch is None else 1 + self.nano_batch


def unpack(result: Any, count: int) -> Sequence[Any]:
    """Return the *count* values of an op's result.

    One value is the result itself. With no values, the result is ignored. Several values have to be a tuple or a list:
    the rows of a tensor are not several values.

    Raises:
        ProgramError: if the op returned another number of values.
    """
    if count < 2:
        return (result,) * count
    if not isinstance(result, (tuple, list)):
        raise ProgramError(f"it returned one {type(result).__name__}, but is declared to write {count} values.")
    if len(result) != count:
        raise ProgramError(f"it returned {len(result)} values, but is declared to write {count}.")
    return result


def check_declaration(
    name: object, outputs: object, exclusive: object, communicator: object, overwrites: object, where: str
) -> None:
    """Raise ProgramError if an argument of an op's declaration has the wrong type."""
    if type(outputs) is not int or not 0 <= outputs <= MAX_OUTPUTS:
        raise ProgramError(f"op {name!r} has outputs={outputs!r}; it must be from 0 to {MAX_OUTPUTS}. ({where})")
    for what, word in (("exclusive", exclusive), ("communicator", communicator)):
        if not (word is None or isinstance(word, str)):
            raise ProgramError(f"op {name!r} has {what}={word!r}; it must be a name or None. ({where})")
    if not isinstance(overwrites, tuple) or not all(isinstance(value, Value) for value in overwrites):
        raise ProgramError(f"op {name!r} has overwrites={overwrites!r}; it must be a tuple of values. ({where})")


def check_divided(op: Op) -> None:
    """Raise ProgramError if the program that an op is divided into has other inputs or outputs than the op."""
    own = op.divided
    if own is not None and (len(own.inputs), len(own.outputs)) != (len(op.reads), len(op.writes)):
        raise ProgramError(
            f"op {op.label!r} reads {len(op.reads)} values and writes {len(op.writes)}, but is divided into ops that "
            f"read {len(own.inputs)} and write {len(own.outputs)}; give both the same, in the same order. "
            f"({op.declared_at})"
        )
