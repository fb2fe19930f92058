"""What is particular to the NPU, over the real torch_npu: HCCL's streams, core limits, and where there is no CANN."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not installed here: `make test-npu` has it", allow_module_level=True)

from dbo_runtime.devices import open_device
from dbo_runtime.devices.npu import CoreLimit, NpuDevice
from dbo_runtime.errors import DeviceError
from tests.support.devices import rigs

LANES = ("compute", "comm")


class Group:
    """A process group whose collectives run on the streams with these ids."""

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def _get_backend(self, device: Any) -> Any:
        return self

    def get_coll_stream_id(self, device: Any) -> int:
        return self.ids[0]


@pytest.fixture(autouse=True)
def _npu(record_property: Any) -> None:
    record_property("device", "npu")
    rigs.prepare("npu")


def find_id(device: NpuDevice, lane: str) -> int:
    stream_id: int = device.open_lanes([*LANES, *({lane} - {*LANES})])[-1].stream.stream_id
    return stream_id


def test_a_lane_does_not_take_a_stream_that_collectives_run_on() -> None:
    device = open_device("npu")
    pool = [device.backend.Stream().stream_id for _ in range(32)]
    for taken in pool[:3]:  # whichever comes next
        own = find_id(open_device("npu", groups=[Group(taken)]), "comm")
        assert own in pool
        assert own != taken


def test_a_lane_leaves_a_stream_that_collectives_turn_out_to_run_on() -> None:
    """Such as those of a communicator that was made later."""
    group = Group(-1)
    device = open_device("npu", groups=[group])
    group.ids = (find_id(device, "comm"),)
    assert find_id(device, "comm") not in group.ids


def test_collectives_on_the_current_stream_are_refused() -> None:
    device = open_device("npu")
    group = Group(device.backend.current_stream().stream_id)
    with pytest.raises(DeviceError, match=r"the current stream, 0, is one that collectives run on.*another stream"):
        open_device("npu", groups=[group]).open_lanes(LANES)


@pytest.mark.parametrize("limited", ["comm", "side"])
def test_a_lane_may_have_a_core_limit(limited: str) -> None:
    device = open_device("npu", core_limits={limited: CoreLimit(cube=4, vector=8)})
    limits = {lane.name: device.backend.get_stream_limit(lane.stream) for lane in device.open_lanes([*LANES, "side"])}
    assert limits.pop(limited) == {"cube_core_num": 4, "vector_core_num": 8}
    assert all(limit == device.backend.get_device_limit(0) for limit in limits.values())


def test_a_core_limit_does_not_stay_with_a_stream_that_others_draw_next() -> None:
    device = open_device("npu", core_limits={"comm": CoreLimit(cube=4, vector=8)})
    _, comm = device.open_lanes(LANES)
    device.close()
    assert device.backend.get_stream_limit(comm.stream) == device.backend.get_device_limit(0)


@pytest.mark.parametrize("limit", [CoreLimit(10_000, 8), CoreLimit(4, 10_000), CoreLimit(0, 0), CoreLimit(4, -8)])
def test_a_lane_whose_core_limit_is_refused_runs_without_and_it_is_logged_once(
    limit: CoreLimit, capfd: pytest.CaptureFixture[str]
) -> None:
    device = open_device("npu", core_limits={"comm": limit})
    for _ in range(2):
        _, comm = device.open_lanes(LANES)
        assert device.backend.get_stream_limit(comm.stream) == device.backend.get_device_limit(0)
        device.begin()
        device.finish()
        device.close()
    output = capfd.readouterr().err
    assert output.count(f"core limit rejected, the lane runs without it  lane=comm  cube={limit.cube}") == 1


def test_the_compute_lane_may_not() -> None:
    with pytest.raises(DeviceError, match=r"lane 'compute' cannot have a core limit.*Limit other lanes"):
        open_device("npu", core_limits={"compute": CoreLimit(4, 8)}).open_lanes(LANES)


def run_without_cann(code: str) -> str:
    """Return what a program prints in a process without CANN or its stand-in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "NPU_STANDIN"))}
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="a real CANN is here")
def test_torch_npu_without_cann_is_refused_with_a_remedy() -> None:
    printed = run_without_cann("""
from dbo_runtime.devices import open_device
from dbo_runtime.errors import DeviceError
for attempt in range(2):
    try:
        open_device("npu")
    except DeviceError as error:
        print(error)
""")
    assert printed.count("torch_npu cannot be imported (") == 2
    assert printed.count("install CANN and source its set_env.sh") == 2


@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="a real CANN is here")
def test_torch_npu_without_cann_makes_auto_take_something_else() -> None:
    printed = run_without_cann("from dbo_runtime.devices import open_device; print(open_device('auto').name)")
    assert "cpu" in printed.splitlines()
    assert "device chosen  device=cpu  reason=no npu: torch_npu cannot be imported" in printed


@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="a real CANN is here")
def test_a_torch_that_fails_on_torch_npu_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself torch loads torch_npu, and fails to be imported where that fails."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    printed = run_without_cann("""
from dbo_runtime.devices import open_device
from dbo_runtime.errors import DeviceError
try:
    open_device("npu")
except DeviceError as error:
    print(error)
""")
    assert "device 'npu' needs torch, which cannot be imported (Failed to load the backend extension" in printed
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in printed
