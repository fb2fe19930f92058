"""What every device promises to its callers."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import Any

import pytest

from dbo_runtime.devices import Device, Lane, open_device
from dbo_runtime.errors import DeviceError
from tests.support.devices.rigs import NAMES, find_present, open_rig, prepare
from tests.support.latch import GRACE

LANES = ("compute", "comm", "aux")


@pytest.fixture
def lanes(device: Device) -> list[Lane]:
    return device.open_lanes(LANES)


@pytest.fixture
def latch(rig: Any) -> Any:
    if not rig.has_latch:
        pytest.skip(f"nothing can be held on device {rig.device.name!r}")
    return rig.make_latch()


def join(device: Device, lanes: list[Lane]) -> None:
    """Let the first lane wait for the others, as every schedule does at its end."""
    for lane in lanes[1:]:
        event = device.make_event()
        lane.record(event)
        lanes[0].wait(event)


def finish(device: Device, lanes: list[Lane]) -> None:
    """Join, end the run, and wait until all of it is done."""
    join(device, lanes)
    device.finish()
    device.synchronize()


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(DeviceError, match=r"no device 'tpu'; known are auto .*, npu, cuda, cpu, virtual"):
        open_device("tpu")


def test_auto_has_no_options() -> None:
    with pytest.raises(DeviceError, match=r"auto \(without options\)"):
        open_device("auto", groups=[])


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("npu", "install CANN and source its set_env.sh"), ("cuda", "install a CUDA build of torch and its driver")],
)
def test_a_device_that_is_missing_is_refused_with_a_remedy(name: str, remedy: str) -> None:
    if name in find_present():
        pytest.skip("it is here")
    with pytest.raises(DeviceError, match=remedy):
        open_device(name)


def test_auto_takes_what_is_there_and_says_once_why(capfd: pytest.CaptureFixture[str]) -> None:
    expected = next(name for name in ("npu", "cuda", "cpu") if name in find_present())
    prepare(expected)
    device = open_device("auto")
    output = capfd.readouterr().err
    assert device.name == expected
    assert output.count(f"device chosen  device={expected}  reason=") == 1
    assert all(f"no {name}: " in output for name in ("npu", "cuda") if name not in find_present() and expected == "cpu")


def test_a_device_that_needs_torch_says_so_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "dbo_runtime.devices.npu", "dbo_runtime.devices.torch_streams"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DeviceError, match=r"device 'npu' needs torch, which cannot be imported .*: install or repair"):
        open_device("npu")


@pytest.mark.parametrize("name", NAMES)
def test_the_device_is_there(name: str) -> None:
    """Or this says, once, why not."""
    open_rig(name).close()


def test_a_device_knows_its_name(device: Device) -> None:
    assert open_device(device.name).name == device.name


def test_lanes_are_made_once(device: Device) -> None:
    compute, comm = device.open_lanes(["compute", "comm"])
    again = device.open_lanes(LANES)
    assert again[0] is compute
    assert again[1] is comm
    assert [lane.name for lane in again] == list(LANES)


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_lane_runs_tasks_in_the_order_launched(rig: Any, lanes: list[Lane], position: int) -> None:
    pad = rig.make_pad()
    rig.device.begin()
    for number in range(100):
        lanes[position].launch(rig.note(number), pad)
    finish(rig.device, lanes)
    assert rig.read(pad) == list(range(100))


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (1, 1)])
def test_what_follows_a_wait_runs_after_all_that_preceded_the_record(
    rig: Any, lanes: list[Lane], first: int, second: int
) -> None:
    event = rig.device.make_event()
    pad = rig.make_pad()
    rig.device.begin()
    for number in range(50):
        lanes[first].launch(rig.note(number), pad)
    lanes[first].record(event)
    lanes[second].wait(event)
    lanes[second].launch(rig.note(50), pad)
    finish(rig.device, lanes)
    assert rig.read(pad) == list(range(51))


def test_a_wait_really_waits(rig: Any, lanes: list[Lane], latch: Any) -> None:
    """The second lane has all the time it would need to overtake; it must not."""
    event = rig.device.make_event()
    pad = rig.make_pad()
    rig.device.begin()
    lanes[1].launch(latch.hold, pad)
    lanes[1].launch(rig.note(1), pad)
    lanes[1].record(event)
    lanes[2].wait(event)
    lanes[2].launch(rig.note(2), pad)
    time.sleep(GRACE)
    assert rig.read(pad) == []
    latch.release()
    finish(rig.device, lanes)
    assert rig.read(pad) == [1, 2]


def test_without_the_wait_the_same_tasks_overtake(rig: Any, lanes: list[Lane], latch: Any) -> None:
    event = rig.device.make_event()
    pad = rig.make_pad()
    rig.device.begin()
    lanes[1].launch(latch.hold, pad)
    lanes[1].launch(rig.note(1), pad)
    lanes[2].launch(rig.note(2), pad)
    lanes[2].record(event)
    lanes[0].wait(event)
    lanes[0].launch(latch.let_go, pad)  # runs only because nothing waits for lane 1
    finish(rig.device, lanes)
    assert rig.read(pad) == [2, 1]


def test_an_event_does_not_stand_for_what_was_launched_after_it(rig: Any, lanes: list[Lane], latch: Any) -> None:
    event = rig.device.make_event()
    pad = rig.make_pad()
    rig.device.begin()
    lanes[1].launch(rig.note(1), pad)
    lanes[1].record(event)
    lanes[1].launch(latch.hold, pad)
    lanes[1].launch(rig.note(3), pad)
    lanes[0].wait(event)
    lanes[0].launch(rig.note(2), pad)
    lanes[0].launch(latch.let_go, pad)
    finish(rig.device, lanes)
    assert rig.read(pad) == [1, 2, 3]


def test_two_lanes_run_side_by_side_and_their_intervals_say_so(rig: Any, lanes: list[Lane], latch: Any) -> None:
    """Each of two tasks ends only after the other has begun."""
    other = rig.make_latch()
    pad = rig.make_pad()
    spans: dict[int, tuple[Any, Any]] = {}

    def meet_first(pad: Any) -> None:
        latch.let_go(pad)
        other.hold(pad)

    def meet_second(pad: Any) -> None:
        other.let_go(pad)
        latch.hold(pad)

    rig.device.begin()
    lanes[1].measure(meet_first, pad, lambda _, start, end: spans.update({1: (start, end)}))
    lanes[2].measure(meet_second, pad, lambda _, start, end: spans.update({2: (start, end)}))
    finish(rig.device, lanes)
    (first_start, first_end), (second_start, second_end) = (map(float, spans[number]) for number in (1, 2))
    assert max(first_start, second_start) <= min(first_end, second_end)


def test_intervals_of_a_lane_follow_each_other_and_are_of_the_hosts_clock(rig: Any, lanes: list[Lane]) -> None:
    spans: list[tuple[float, Any, Any]] = []
    pad = rig.make_pad()
    before = time.perf_counter()
    rig.device.begin()
    for number in range(3):
        lanes[1].measure(rig.note(number), pad, lambda issued, start, end: spans.append((issued, start, end)))
    finish(rig.device, lanes)
    times = [float(moment) for _, *span in spans for moment in span]
    assert times == sorted(times)
    assert all(issued <= float(start) + GRACE for issued, start, _ in spans)
    now = time.perf_counter() + GRACE  # the host learns of the first moment a little after it has come
    assert rig.device.name == "virtual" or before <= times[0] <= times[-1] <= now
    assert rig.read(pad) == [0, 1, 2]


def test_a_timer_takes_the_time_of_what_is_launched_before_it_is_stopped(rig: Any, lanes: list[Lane]) -> None:
    timer = rig.device.start_timer()
    assert timer.read() is None
    pad = rig.make_pad()
    before = time.perf_counter()
    rig.device.begin()
    lanes[0].launch(rig.note(1), pad)
    finish(rig.device, lanes)
    timer.stop()
    rig.device.synchronize()
    seconds = timer.read()
    assert seconds is not None
    assert seconds > 0
    assert rig.device.name == "virtual" or seconds <= time.perf_counter() - before + GRACE


def test_a_timer_of_what_runs_behind_the_host_reads_nothing_before_that_has_run(rig: Any, latch: Any) -> None:
    if rig.device.name == "cpu":
        pytest.skip("the compute lane of the CPU is the host itself")
    timer = rig.device.start_timer()
    latch.hold([])
    timer.stop()
    assert timer.read() is None
    latch.release()
    rig.device.synchronize()
    assert timer.read() > 0


def test_what_was_launched_is_done_when_the_device_is_synchronized(rig: Any, lanes: list[Lane]) -> None:
    pad = rig.make_pad()
    rig.device.begin()
    lanes[2].launch(rig.note(1), pad)
    rig.device.synchronize()
    assert rig.read(pad) == [1]
    rig.device.abort()


def test_events_serve_many_runs(rig: Any, lanes: list[Lane]) -> None:
    there, back = rig.device.make_event(), rig.device.make_event()
    for run in range(50):
        pad = rig.make_pad()
        rig.device.begin()
        lanes[0].launch(rig.note(run), pad)
        lanes[0].record(there)
        lanes[1].wait(there)
        lanes[1].launch(rig.note(run + 1), pad)
        lanes[1].record(back)
        lanes[0].wait(back)
        lanes[0].launch(rig.note(run + 2), pad)
        rig.device.finish()
        rig.device.synchronize()
        assert rig.read(pad) == [run, run + 1, run + 2]


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_wait_for_what_was_never_recorded_is_refused(device: Device, lanes: list[Lane], position: int) -> None:
    device.begin()
    with pytest.raises(DeviceError, match=rf"lane '{LANES[position]}' waits for an event that was not recorded"):
        lanes[position].wait(device.make_event())
    device.abort()


@pytest.mark.parametrize("position", range(len(LANES)))
def test_a_wait_for_what_was_recorded_in_an_earlier_run_is_refused(
    device: Device, lanes: list[Lane], position: int
) -> None:
    event = device.make_event()
    device.begin()
    lanes[1].record(event)
    lanes[position].wait(event)
    device.finish()
    device.begin()
    with pytest.raises(DeviceError, match="was not recorded in this run"):
        lanes[position].wait(event)
    device.abort()


def test_a_run_that_was_aborted_leaves_the_device_fit_for_the_next(rig: Any, lanes: list[Lane]) -> None:
    pad, later = rig.make_pad(), rig.make_pad()
    rig.device.begin()
    lanes[1].launch(rig.note(1), pad)
    rig.device.abort()
    rig.device.begin()
    lanes[1].launch(rig.note(2), later)
    finish(rig.device, lanes)
    assert rig.read(later) == [2]


def test_an_aborted_run_has_ended(rig: Any, lanes: list[Lane], latch: Any) -> None:
    pad = rig.make_pad()
    rig.device.begin()
    lanes[1].launch(latch.hold, pad)
    lanes[1].launch(rig.note(1), pad)
    time.sleep(GRACE)  # for the lane to have come to the latch
    timer = threading.Timer(GRACE, latch.release)
    timer.start()
    before = time.perf_counter()
    rig.device.abort()
    assert time.perf_counter() - before > GRACE / 2  # it waited for what was held
    assert rig.read(pad) in ([1], [])  # what had been launched has run, or never will
    at_once = rig.read(pad)
    time.sleep(GRACE)
    assert rig.read(pad) == at_once
    timer.join()


def test_a_closed_device_can_be_opened_again(rig: Any, lanes: list[Lane]) -> None:
    rig.device.close()
    lanes = rig.device.open_lanes(LANES)
    pad = rig.make_pad()
    rig.device.begin()
    lanes[1].launch(rig.note(1), pad)
    finish(rig.device, lanes)
    assert rig.read(pad) == [1]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (1, 1)])
def test_ops_that_are_called_on_lanes_run_in_the_order_of_their_events(
    rig: Any, lanes: list[Lane], first: int, second: int
) -> None:
    calls = [lanes[position].get_direct_calls() for position in (first, second)]
    if None in calls:
        pytest.skip(f"tasks are launched on device {rig.device.name!r}")
    event = rig.device.make_event()
    pad = rig.make_pad()
    for run in range(3):
        rig.device.begin()
        (switch, record, _), (other_switch, _, wait) = (lanes[n].get_direct_calls() for n in (first, second))
        if switch is not None:
            switch()
        for number in range(50):
            rig.note(100 * run + number)(pad)
        record(event)
        wait(event)
        if other_switch is not None:
            other_switch()
        rig.note(100 * run + 50)(pad)
        finish(rig.device, lanes)
    assert rig.read(pad) == [100 * run + number for run in range(3) for number in range(51)]


def test_an_event_recorded_by_a_call_may_be_waited_for_by_any_lane(device: Device, lanes: list[Lane]) -> None:
    device.begin()
    for lane in lanes:
        calls, event = lane.get_direct_calls(), device.make_event()
        if calls is not None:
            calls.record(event)
            for other in lanes:
                other.wait(event)
    join(device, lanes)
    device.finish()


def test_after_a_run_that_switched_lanes_the_first_one_is_current(stream_rig: Any) -> None:
    device = stream_rig.device
    lanes, before = device.open_lanes(LANES), device.backend.current_stream()
    for end in (device.finish, device.abort):
        device.begin()
        lanes[2].get_direct_calls().switch()
        assert device.backend.current_stream() == lanes[2].stream
        end()
        assert device.backend.current_stream() == before


def test_a_device_keeps_no_task_and_no_values_after_a_run(device: Device, lanes: list[Lane]) -> None:
    class Task:
        def __call__(self, values: Any) -> None:
            pass

    class Values(list[Any]):
        """A list that can be referred to weakly."""

    kept: list[weakref.ref[Any]] = []
    device.begin()
    for lane in lanes:
        task, values = Task(), Values()
        kept += [weakref.ref(task), weakref.ref(values)]
        lane.launch(task, values)
        del task, values
    join(device, lanes)
    device.finish()
    assert [reference() for reference in kept] == [None] * 6
