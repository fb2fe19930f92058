"""A latch in torch's terms: holds streams of the device until it is opened."""

from __future__ import annotations

from typing import Any

import torch

from tests.standin.cann.cann import Latch


class StreamGate:
    """Can be opened once. Open it before the test ends, or the streams stay held."""

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int64, device="npu")
        self._opener = torch.npu.Stream()
        self._latch = Latch(self._word.data_ptr())
        torch.npu.synchronize()

    def hold(self, stream: Any) -> None:
        """Let what is launched on the stream from now on wait for `open`."""
        self._latch.hold(stream.npu_stream)

    def open(self, stream: Any = None) -> None:
        """Let held streams go on; as a task of *stream*, if given."""
        self._latch.release((stream or self._opener).npu_stream)
