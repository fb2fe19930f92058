"""CUDA streams as lanes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from dbo_runtime.devices.ranges import Marks
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.errors import DeviceError
from dbo_runtime.ir.op import COMM

PRIORITIES: Mapping[str, int] = MappingProxyType({COMM: -1})
"""Priority of a lane's stream, 0 if it is not here; lower numbers come first.

A matrix product fills all multiprocessors, so the blocks of a collective that was issued later would wait for its end.
The blocks of a stream of higher priority are placed first, wherever some end.
"""


class CudaDevice(StreamDevice):
    """The current CUDA device.

    A collective of NCCL that is called on a lane is in the lane's order like any kernel: it runs on the current stream,
    or on an internal stream of NCCL that is synchronized with it before and after.

    Args:
        priorities: stream priorities by lane; see `PRIORITIES`.

    Raises:
        DeviceError: if there is no CUDA device, with the reason.
    """

    def __init__(self, priorities: Mapping[str, int] = PRIORITIES) -> None:
        if not torch.cuda.is_available():
            reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            raise DeviceError(f"{reason}; install a CUDA build of torch and its driver, or use device 'cpu'.")
        super().__init__("cuda", torch.cuda, Marks(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end))
        self._priorities = priorities

    def make_stream(self, lane: str) -> Any:
        """Return the next stream of the pool of the lane's priority."""
        return self.backend.Stream(priority=self._priorities.get(lane, 0))
