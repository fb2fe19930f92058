"""Who gets timelines of served steps: RPC, traces and samples. No engine needed."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.devices import Device, open_device
from dbo_runtime.devices.virtual import VirtualDevice, VirtualLane
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.trace_file import read_trace
from dbo_runtime.observe.counts import HELP
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.observe.trace import prepare_folder
from dbo_runtime.vllm_plugin.telemetry import traces
from dbo_runtime.vllm_plugin.telemetry.sampling import PERIOD_STEPS, READ_STEP, SAMPLED_STEP, Recording
from dbo_runtime.vllm_plugin.telemetry.traces import TraceFolder, measure_recording
from tests.support.observe.trace_format import check_format
from tests.support.vllm.forwards import Model, make_forward, run

ALONE = SimpleNamespace(world_size=1, rank_in_group=0)


class Lines:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.told.append((event, values))

    error = info


class Samples:
    """Metrics that keep samples."""

    def __init__(self) -> None:
        self.found: list[Timeline] = []

    def add_sample(self, timeline: Timeline) -> None:
        self.found.append(timeline)

    def count_step(self, plan: Any) -> None: ...

    def count_planning(self, seconds: float) -> None: ...


def open_folder(path: Path, log: Any, steps: int = 2, group: Any = ALONE, device: Device | None = None) -> TraceFolder:
    return TraceFolder(str(path), steps, group, device or open_device("virtual"), log)


def test_the_first_split_steps_become_traces_and_what_that_cost_is_told_once(tmp_path: Path) -> None:
    log = Lines()
    forward = make_forward(Model(), recording=Recording(open_folder(tmp_path, log)))
    for _ in range(4):
        run(forward)
    assert sorted(os.listdir(tmp_path)) == ["step-000001.json", "step-000002.json"]
    check_format(json.loads((tmp_path / "step-000001.json").read_text()))
    ((name, timeline),) = read_trace(tmp_path / "step-000001.json").items()
    assert name == "rank 0"
    assert len(timeline.spans) == 4
    assert timeline.bound == 3.0  # two micro-batches of two ops that cost 1 s each
    assert timeline.planning is not None
    assert timeline.planning > 0
    ((event, values),) = log.told
    assert event == "traces are written"
    assert values["steps"] == 2
    assert "us an op" in values["recording"]


def test_traces_that_cannot_be_written_any_more_are_told_of_once_and_do_not_end_the_server(tmp_path: Path) -> None:
    log = Lines()
    forward = make_forward(Model(), recording=Recording(open_folder(tmp_path / "gone", log, steps=3)))
    run(forward)
    run(forward)
    ((event, values),) = log.told
    assert event == "a trace is lost; further ones are tried, and counted at the end"
    assert f"gone/step-000001.json' (errno {errno.ENOENT}, No such file" in values["reason"]
    (tmp_path / "gone").mkdir()
    run(forward)
    event, values = log.told[-1]
    assert event == "traces are written"
    assert (values["steps"], values["lost"]) == (1, 2)


@pytest.mark.parametrize(("boot", "shift"), [("same", 0.0), ("other", 7.0)])
def test_ranks_that_share_no_clock_are_put_on_one_by_the_time_of_day(
    boot: str, shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank's clock is 7 s behind the first one's, which only counts where they do not share one."""

    def answer(group: Any, own: Any) -> list[Any]:
        (_, offset), data = own
        return [(("same", offset), data), ((boot, offset + 7.0), data)]

    monkeypatch.setattr(traces, "gather", answer)
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    forward = make_forward(Model(), recording=Recording(open_folder(tmp_path, Lines(), group=group)))
    run(forward)
    first, second = read_trace(tmp_path / "step-000001.json").values()
    starts = [(a.start, b.start) for a, b in zip(first.spans, second.spans, strict=True)]
    assert [b - a for a, b in starts] == pytest.approx([shift] * len(starts))
    issued = [b.issued - a.issued for a, b in zip(first.spans, second.spans, strict=True)]  # type: ignore[operator]
    assert issued == pytest.approx([shift] * len(starts))


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    second = SimpleNamespace(world_size=1, rank_in_group=1)
    forward = make_forward(Model(), recording=Recording(open_folder(tmp_path, Lines(), group=second)))
    run(forward)
    assert not list(tmp_path.iterdir())


def test_one_step_of_many_is_a_sample_and_is_read_when_no_device_is_still_at_it() -> None:
    samples = Samples()
    forward = make_forward(Model(), recording=Recording(metrics=samples))  # type: ignore[arg-type]
    counts = []
    for _ in range(PERIOD_STEPS + READ_STEP):
        run(forward)
        counts.append(len(samples.found))
    assert counts[READ_STEP - 2] == 0
    assert counts[READ_STEP - 1] == counts[PERIOD_STEPS + READ_STEP - 2] == 1
    assert counts[-1] == 2
    assert READ_STEP > SAMPLED_STEP
    assert all(len(timeline.spans) == 4 for timeline in samples.found)


def test_whatever_else_is_recorded_a_request_gets_its_timeline(tmp_path: Path) -> None:
    forward = make_forward(Model(), recording=Recording(open_folder(tmp_path, Lines(), steps=1), Samples()))
    forward.observer.recording.request()
    for _ in range(SAMPLED_STEP):
        run(forward)
    first = forward.observer.recording.timeline
    assert first is not None
    (traced,) = read_trace(tmp_path / "step-000001.json").values()
    assert [span.op for span in traced.spans] == [span.op for span in first.spans]
    forward.observer.recording.request()
    assert forward.observer.recording.timeline is None


class SlowClock(VirtualLane):
    """A lane whose clock takes half a millisecond to read."""

    def measure(self, task: Any, values: Any, note: Any) -> None:
        time.sleep(5e-4)
        super().measure(task, values, note)


def test_what_recording_costs_is_measured_on_the_device_itself() -> None:
    device = VirtualDevice()
    device.open_lanes = lambda names: [SlowClock(name, device) for name in names]  # type: ignore[method-assign]
    assert measure_recording(device) > 2.5e-4  # sleeping takes no less, and issuing nothing is left out of it


def test_metrics_say_how_many_steps_are_samples() -> None:
    assert f"one in {PERIOD_STEPS}" in HELP["sampled_steps"]


def test_the_folder_is_made_and_one_that_cannot_be_is_refused(tmp_path: Path) -> None:
    prepare_folder(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"DBO_TRACE=.*file.*cannot be made a folder \(File exists\)"):
        prepare_folder(str(tmp_path / "file"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="name a folder that you may write to"):
        prepare_folder(str(tmp_path))
