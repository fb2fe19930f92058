"""NPU streams as lanes, through torch_npu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dbo_runtime.devices import Lane
from dbo_runtime.devices.ranges import Marks
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.errors import DeviceError
from dbo_runtime.observe.logs import open_log

REMEDY = "install CANN and source its set_env.sh, install the torch_npu of torch's version, or use device 'cpu'"


class CoreLimit(NamedTuple):
    """The numbers of NPU cores that a lane's kernels may use."""

    cube: int
    vector: int


class NpuDevice(StreamDevice):
    """The current NPU.

    torch_npu hands out 32 streams in rotation, also to HCCL, so a new stream may already be in use. This device
    compares ids to find out. Priorities have no effect on an NPU and are not set. HCCL runs collectives on an internal
    stream. That stream waits for the stream that is current at the call, which then waits for it. A collective called
    on a lane is therefore in the lane's order like any kernel.

    Args:
        groups: process groups whose streams must not become lanes.
        core_limits: core limit by lane; none by default. A limit applies only to kernels written in Ascend C, and the
            vendor warns that other kernels may hang under it (`torch_npu.npu.set_stream_limit`). If torch_npu rejects a
            lane's limit, the lane runs without it, and a log line says so.

    Raises:
        DeviceError: torch_npu cannot be imported or finds no NPU. The message says why.
    """

    def __init__(self, groups: Sequence[Any] = (), core_limits: Mapping[str, CoreLimit] | None = None) -> None:
        npu = import_npu()
        super().__init__("npu", npu, find_marks(npu))
        self._groups = tuple(groups)
        self._core_limits = dict(core_limits or {})

    def open_lanes(self, names: Sequence[str]) -> list[Lane]:
        """Return the lanes with their core limits; see `StreamDevice.open_lanes`.

        Raises:
            DeviceError: the first lane has a core limit, although its stream is shared, or no streams are left.
        """
        if names[0] in self._core_limits:
            raise DeviceError(
                f"lane {names[0]!r} cannot have a core limit: its stream also runs everything outside the schedule, "
                "which would be limited, too. Limit other lanes."
            )
        return super().open_lanes(names)

    def draw_stream(self, lane: str) -> Any:
        """Return a stream that neither another lane nor HCCL uses, with the lane's core limit."""
        stream = super().draw_stream(lane)
        if lane in self._core_limits:
            self._limit(lane, stream)
        return stream

    def return_stream(self, stream: Any) -> None:
        """Remove the core limit: the backend will hand out the stream again."""
        if self._core_limits:
            self.backend.reset_stream_limit(stream)

    def _limit(self, lane: str, stream: Any) -> None:
        limit = self._core_limits[lane]
        try:
            self.backend.set_stream_limit(stream, *limit)
        except (AttributeError, RuntimeError, ArithmeticError, TypeError, ValueError) as error:
            with suppress(AttributeError, RuntimeError):  # in case only the second of the two was rejected
                self.backend.reset_stream_limit(stream)
            del self._core_limits[lane]
            reason = str(error).partition("\n")[0]
            open_log().warning(
                "core limit rejected, the lane runs without it", lane=lane, **limit._asdict(), reason=reason
            )

    def list_reserved(self) -> set[int]:
        """Return the ids of HCCL's streams."""
        device = torch.device("npu", self.backend.current_device())
        return {group._get_backend(device).get_coll_stream_id(device) for group in self._groups}


def find_marks(npu: ModuleType) -> Marks | None:
    """Return MSTX ranges on the host and the current stream; None if this torch_npu has none."""
    mstx: Any = getattr(npu, "mstx", None)
    if not hasattr(mstx, "range_start"):
        return None
    return Marks(lambda name: mstx.range_start(name, npu.current_stream()), mstx.range_end)


def import_npu() -> ModuleType:
    """Return `torch.npu`.

    Raises:
        DeviceError: torch_npu cannot be imported or finds no NPU. The message says why.
    """
    try:
        import torch_npu  # noqa: F401 - the import registers torch.npu
    except (ImportError, OSError, RuntimeError) as error:  # the error for a missing CANN depends on the release
        raise DeviceError(f"torch_npu cannot be imported ({error}); {REMEDY}.") from error
    npu: ModuleType = getattr(torch, "npu")  # noqa: B009 - unknown to type checkers: torch_npu registers it
    if not npu.is_available():
        raise DeviceError(f"torch_npu finds no NPU; {REMEDY}.")
    return npu
