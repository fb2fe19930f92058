"""CUDA streams as lanes."""

from __future__ import annotations

import torch

from dbo_runtime.devices.ranges import Marks
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.errors import DeviceError


class CudaDevice(StreamDevice):
    """The current CUDA device.

    A collective of NCCL that is called on a lane is in the lane's order like any kernel: it runs on the current stream,
    or on an internal stream of NCCL that is synchronized with it before and after.

    Raises:
        DeviceError: if there is no CUDA device, with the reason.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
            raise DeviceError(f"{reason}; install a CUDA build of torch and its driver, or use device 'cpu'.")
        super().__init__(
            "cuda", torch.cuda, torch.cuda.CUDAGraph, Marks(torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end)
        )
