"""NPU streams as lanes, over torch_npu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dbo_runtime.devices import Lane
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log

REMEDY = "install CANN and source its set_env.sh, install the torch_npu of torch's version, or use device 'cpu'"


class CoreLimit(NamedTuple):
    """How many cores of an NPU a lane's kernels may use."""

    cube: int
    vector: int


class NpuDevice(StreamDevice):
    """The current NPU.

    torch_npu hands out 32 streams in turn, to HCCL, too, so a new stream may be one that is in use: ids are compared.
    Priorities have no effect there, so none are asked for. HCCL runs collectives on a stream of its own, which waits
    for the stream that is current where they are called, and that stream for it; so a collective that is called on a
    lane takes part in the lane's order like any kernel.

    Args:
        groups: process groups whose collectives run beside the lanes.
        core_limits: by lane. Off by default: the limit holds for kernels written in Ascend C only, and the vendor warns
            that others may hang under it (`torch_npu.npu.set_stream_limit`). A lane whose limit is refused runs without
            it, and the log says so.

    Raises:
        DeviceError: if torch_npu cannot be imported, or finds no NPU, with the reason.
    """

    def __init__(self, groups: Sequence[Any] = (), core_limits: Mapping[str, CoreLimit] | None = None) -> None:
        npu = import_npu()
        super().__init__("npu", npu, npu.NPUGraph)
        self._groups = tuple(groups)
        self._core_limits = dict(core_limits or {})

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes; see `StreamDevice.open_lanes`. Core limits are set where they are wanted.

        Raises:
            DeviceError: if the first lane has a core limit, whose stream is not ours; or if no streams are left.
        """
        if names[0] in self._core_limits:
            raise DeviceError(
                f"lane {names[0]!r} cannot have a core limit: its stream is the one that all else runs on, and would "
                "keep the limit. Limit other lanes."
            )
        return super().open_lanes(names)

    def draw_stream(self, lane: str) -> Any:
        """Return a stream that neither another lane nor HCCL has, with the lane's core limit."""
        stream = super().draw_stream(lane)
        if lane in self._core_limits:
            self._limit(lane, stream)
        return stream

    def return_stream(self, stream: Any) -> None:
        """Take the core limit away, which would go on to whoever draws the stream next."""
        if self._core_limits:
            self.backend.reset_stream_limit(stream)

    def _limit(self, lane: str, stream: Any) -> None:
        limit = self._core_limits[lane]
        try:
            self.backend.set_stream_limit(stream, *limit)
        except (AttributeError, RuntimeError, ArithmeticError, TypeError, ValueError) as error:  # or no limits
            with suppress(AttributeError, RuntimeError):  # where only the second of the two was refused
                self.backend.reset_stream_limit(stream)
            del self._core_limits[lane]
            reason = str(error).partition("\n")[0]
            open_log().warning("core limit refused, the lane runs without", lane=lane, **limit._asdict(), reason=reason)

    def find_taken(self) -> set[int]:
        """Return the ids of HCCL's streams."""
        device = torch.device("npu", self.backend.current_device())
        return {group._get_backend(device).get_coll_stream_id(device) for group in self._groups}


def import_npu() -> ModuleType:
    """Return `torch.npu`.

    Raises:
        DeviceError: if torch_npu cannot be imported, or finds no NPU, with the reason.
    """
    try:
        import torch_npu  # noqa: F401 - it puts torch.npu in place
    except (ImportError, OSError, RuntimeError) as error:  # what a missing CANN raises depends on the release
        raise DeviceError(f"torch_npu cannot be imported ({error}); {REMEDY}.") from error
    npu: ModuleType = getattr(torch, "npu")  # noqa: B009 - unknown to type checkers: torch_npu puts it there
    if not npu.is_available():
        raise DeviceError(f"torch_npu finds no NPU; {REMEDY}.")
    return npu
