"""One operation of a program, and the lanes that it may be on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dbo_runtime.ir.values import Value

COMPUTE = "compute"
COMM = "comm"
SIDE = "side"
COMPUTING = (COMPUTE, SIDE)  # lanes on which nothing communicates


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a micro-batch's program.

    Attributes:
        name: unique within its layer.
        lane: the stream it runs on.
        fn: called with the values read; returns what is written (a tuple where there are several).
        reads, writes: values, in the order of fn's arguments and results.
        layer: index of the layer it belongs to, or None outside any layer.
        ordered: micro-batch i must run it before micro-batch i+1 does (it touches shared state, such as the KV cache).
        exclusive: name of a shared buffer; ops that name the same one never run at the same time.
        communicator: name of the communicator it uses; one communicator stays on one lane.
        overwrites: the values read whose memory it changes, or returns as its own result.
        host_sync: it blocks the host, so it cannot be captured into a graph.
        declared_at: `file:line` of the declaration.
        may_move_to_side: whether it may run on `side` instead, while another micro-batch computes on `compute`.
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
