"""One op of a program, and the lanes it may be on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo_runtime.ir.values import Value

COMPUTE = "compute"
COMM = "comm"
SIDE = "side"
COMPUTING = (COMPUTE, SIDE)  # lanes without communication


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

    @property
    def label(self) -> str:
        """The op's name within its program, such as `L3.attention`."""
        return self.name if self.layer is None else f"L{self.layer}.{self.name}"
