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
"""Stream priority of each lane, 0 for lanes not listed. Lower numbers come first.

A matrix product fills all multiprocessors, so blocks of a collective issued later would wait until it ends. Blocks of
a stream of higher priority are placed first, as soon as any block ends.
"""


class CudaDevice(StreamDevice):
    """The current CUDA device.

    A NCCL collective called on a lane is in the lane's order like any kernel: it runs on the current stream, or on an
    internal stream that NCCL synchronizes with the current one before and after.

    Args:
        priorities: stream priority by lane; see `PRIORITIES`.

    Raises:
        DeviceError: there is no CUDA device. The message says why.
    """

    def __init__(self, priorities: Mapping[str, int] = PRIORITIES) -> None:
        if not torch.cuda.is_available():
            reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            raise DeviceError(f"{reason}; install a CUDA build of torch and its driver, or use device 'cpu'.")
        super().__init__("cuda", torch.cuda, Marks(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end))
        self._priorities = priorities

    def make_stream(self, lane: str) -> Any:
        """Return the next stream from the pool of the lane's priority."""
        return self.backend.Stream(priority=self._priorities.get(lane, 0))
