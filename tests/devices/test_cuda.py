"""What of the CUDA device needs no GPU: torch's module for CUDA is replaced, as far as lanes use it."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.devices import open_device
from dbo_runtime.errors import DeviceError


class Backend:
    """Returns streams with the priority that was asked for."""

    def __init__(self) -> None:
        self._ids = count()
        self.current = self.Stream()

    def Stream(self, priority: int = 0) -> Any:
        return SimpleNamespace(stream_id=next(self._ids), priority=priority)

    def current_stream(self) -> Any:
        return self.current


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"compute": 0, "comm": -1, "side": 0}), ({"priorities": {}}, {"compute": 0, "comm": 0, "side": 0})],
    ids=["usual", "all the same"],
)
def test_kernels_of_collectives_come_before_those_that_compute(
    options: dict[str, Any], expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device: Any = open_device("cuda", **options)
    device.backend = Backend()
    lanes = device.open_lanes(list(expected))
    assert {lane.name: lane.stream.priority for lane in lanes} == expected


def test_without_a_gpu_it_says_what_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match=r"built without CUDA|finds no CUDA device"):
        open_device("cuda")
