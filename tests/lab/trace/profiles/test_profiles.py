"""Profiles as timelines: real ones of this machine, and hand-made ones of devices that are not here."""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import open_device
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.lab.trace import recorded_file, trace_command
from dbo_runtime.lab.trace.gaps import find_gaps
from dbo_runtime.lab.trace.profiles.profile_file import Profile
from dbo_runtime.lab.trace.profiles.unranged import is_communication, is_host_copy
from dbo_runtime.lab.trace.recorded_file import read_recorded
from dbo_runtime.lab.trace.summary import summarize
from dbo_runtime.observe.timeline import Recorder, Span, Timeline
from dbo_runtime.observe.trace import save_trace
from tests.support.lab.handmade import (
    FIRST,
    OTHER_STREAM,
    THIRD_STREAM,
    Maker,
    make_split_step,
    make_ubatched_step,
)
from tests.support.quiet_log import Log

HERE = Path(__file__).parent
SPLIT, VLLM, H100 = HERE / "split.json.gz", HERE / "vllm.json.gz", HERE / "h100.json.gz"


def run_command(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    parser = argparse.ArgumentParser()
    trace_command.add_arguments(parser)
    assert trace_command.run(parser.parse_args([str(word) for word in words])) == 0
    return capsys.readouterr().out


def get_only(profile: Profile) -> Timeline:
    (step,) = profile.steps.values()
    (timeline,) = step.values()
    return timeline


def list_spans(timeline: Timeline) -> list[tuple[str, str, int, int, int]]:
    """Return lane, op, micro-batch, start and end of each span, in whole microseconds since the first event."""
    return [
        (span.lane, span.op, span.micro_batch, round(span.start * 1e6), round(span.end * 1e6))
        for span in timeline.spans
    ]


def find_annotations(path: Path, words: str) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "user_annotation" and words in event["name"]]


def test_a_real_profile_of_split_steps_has_the_times_of_its_ranges() -> None:
    profile = read_recorded(SPLIT)
    assert profile.notes == ("rank 0, 3 steps: lanes, micro-batches and times by ranges of dbo_runtime",)
    assert [name.partition(" tokens")[0] for name in profile.steps] == [
        "0: dbo: step of 120+120",
        "1: dbo: step of 2+2",
        "2: dbo: step of 2+2",
    ]
    spans = [span for step in profile.steps.values() for span in step["rank 0"].spans]
    ranges = find_annotations(SPLIT, " on comm #") + find_annotations(SPLIT, " on compute #")
    assert len(spans) == len(ranges)
    for lane in ("compute", "comm"):
        of_lane = [event["dur"] for event in ranges if f" on {lane} #" in event["name"]]
        assert sum(s.end - s.start for s in spans if s.lane == lane) == pytest.approx(sum(of_lane) / 1e6, abs=1e-6)


def test_the_hidden_share_of_a_real_profile_is_what_a_count_of_microseconds_finds() -> None:
    """The same by another way: each microsecond of the first step is looked at, on both threads."""
    timeline = read_recorded(SPLIT).steps["0: dbo: step of 120+120 tokens, schedule f7906fa146aa10e2"[:63]]["rank 0"]
    origin = min(span.start for span in timeline.spans)
    busy = {lane: bytearray(int(timeline.duration * 1e6) + 2) for lane in timeline.lanes}
    for span in timeline.spans:
        first, last = (round((time - origin) * 1e6) for time in (span.start, span.end))
        busy[span.lane][first:last] = b"\1" * (last - first)
    hidden = sum(map(min, busy["compute"], busy["comm"])) / sum(busy["comm"])
    assert summarize(timeline).hidden == pytest.approx(hidden, abs=1e-3)


def test_gaps_of_a_real_profile_have_causes() -> None:
    for step in read_recorded(SPLIT).steps.values():
        gaps = find_gaps(step["rank 0"])
        assert {gap.cause for gap in gaps} > {"wait", "start"}
        assert "unknown" not in {gap.cause for gap in gaps}
        assert all(span.issued is not None and span.issued <= span.start for span in step["rank 0"].spans)


def test_a_real_profile_of_a_gpu_has_the_times_of_the_copies_that_communicated() -> None:
    """Each of the 32 reduces was a copy to the host and one back, on a stream of their own."""
    profile = read_recorded(H100)
    assert profile.notes == (
        "rank 0, 1 steps: lanes and micro-batches by ranges of dbo_runtime, times by the kernels launched in them",
    )
    timeline = get_only(profile)
    assert Counter(span.lane for span in timeline.spans) == {"compute": 66, "comm": 32}
    events = json.loads(gzip.decompress(H100.read_bytes()))["traceEvents"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    (stream, count), *_ = Counter(event["args"]["stream"] for event in copies).most_common()
    assert count == 2 * 32
    of_stream = sorted((each["ts"], each["dur"]) for each in copies if each["args"]["stream"] == stream)
    lasting = [back + taken - there for (there, _), (back, taken) in zip(of_stream[::2], of_stream[1::2], strict=True)]
    spans = sorted((span for span in timeline.spans if span.lane == "comm"), key=lambda span: span.start)
    assert [(span.end - span.start) * 1e6 for span in spans] == pytest.approx(lasting, abs=0.01)
    communicated, hidden = timeline.measure_hidden()
    assert hidden / communicated == pytest.approx(0.584, abs=0.001)
    assert {gap.cause for gap in find_gaps(timeline)} == {"wait", "host", "start", "fill", "drain", "nothing left"}


def test_a_real_profile_of_vllm_alone_hides_nothing() -> None:
    profile = read_recorded(VLLM)
    assert profile.notes == (
        "rank 0, 3 steps: no ranges of dbo_runtime and no kernels: one thread, communication by names of ops",
    )
    assert [*profile.steps] == [
        "0: execute_context_4(240)_generation_0(0)",
        "1: execute_context_0(0)_generation_4(4)",
        "2: execute_context_0(0)_generation_4(4)",
    ]
    for step in profile.steps.values():
        timeline = step["rank 0"]
        assert timeline.lanes == ("compute", "comm")
        assert summarize(timeline).hidden == pytest.approx(0, abs=0.02)
    reduced = [span for step in profile.steps.values() for span in step["rank 0"].spans if span.lane == "comm"]
    called = find_annotations(VLLM, "gloo:")
    assert len(called) == 3 * 8  # an all-reduce of the embedding and two of each layer, and the logits' gather
    assert sum(event["dur"] for event in called) / 1e6 <= sum(span.end - span.start for span in reduced)


def test_times_on_a_device_are_those_of_the_kernels_that_were_launched_in_a_range(tmp_path: Path) -> None:
    profile = read_recorded(make_split_step().save(tmp_path / "gpu.json"))
    assert profile.notes == (
        "rank 0, 1 steps: lanes and micro-batches by ranges of dbo_runtime, times by the kernels launched in them",
    )
    timeline = get_only(profile)
    assert list_spans(timeline) == [
        ("compute", "L3.mlp", 0, 100, 160),
        ("compute", "L3.mlp", 1, 160, 220),
        ("comm", "L3.mlp_reduce", 0, 165, 225),
        ("comm", "L3.mlp_reduce", 1, 230, 260),
    ]
    assert [round((span.issued or 0) * 1e6) for span in timeline.spans] == [10, 50, 30, 70]
    assert [span.waits for span in timeline.spans] == [(), (), (("L3.mlp", 0),), (("L3.mlp", 1),)]
    assert summarize(timeline).hidden == pytest.approx(55 / 90)


def test_kernels_outside_of_ranges_and_of_other_threads_are_of_no_op(tmp_path: Path) -> None:
    maker = make_split_step()
    maker.launch("sample", 95, 300, 400)
    maker.launch("gemm", 15, 300, 400, thread=FIRST)
    assert get_only(read_recorded(maker.save(tmp_path / "gpu.json"))).duration == pytest.approx(160e-6)


def test_micro_batches_of_vllms_own_dbo_are_its_threads(tmp_path: Path) -> None:
    timeline = get_only(read_recorded(make_ubatched_step().save(tmp_path / "dbo.json.gz")))
    assert list_spans(timeline) == [
        ("compute", "embedding", 0, 20, 30),
        ("compute", "gemm", 0, 50, 100),
        ("compute", "gemm (2)", 1, 100, 170),
        ("comm", "void deep_ep::intranode::dispatch<8>(int)", 0, 105, 165),
        ("comm", "void deep_ep::intranode::combine<8>(int)", 1, 175, 215),
    ]
    assert summarize(timeline).hidden == pytest.approx(60 / 100)
    assert timeline.spans[-1].waits == (("gemm (2)", 1),)


def test_streams_become_lanes_by_what_they_run(tmp_path: Path) -> None:
    maker = Maker(rank=None)
    maker.launch("gemm", 0, 0, 50)
    maker.launch("shared_experts", 0, 10, 30, THIRD_STREAM)
    maker.launch("cross_device_reduce_2stage", 0, 50, 60)  # vLLM's, on the stream that computes
    maker.launch("ncclDevKernel_AllGather", 0, 20, 40, OTHER_STREAM)
    profile = read_recorded(maker.save(tmp_path / "gpu.json"))
    timeline = get_only(profile)
    assert [*profile.steps] == ["0: all of it"]
    assert [span[:2] for span in list_spans(timeline)] == [
        ("compute", "gemm"),
        ("side", "shared_experts"),
        ("comm", "ncclDevKernel_AllGather"),
        ("comm_2", "cross_device_reduce_2stage"),
    ]
    assert summarize(timeline).hidden == pytest.approx(20 / 30)


def test_split_and_unsplit_steps_of_one_profile_are_both_read(tmp_path: Path) -> None:
    maker = make_split_step()
    maker.annotate("execute_context_2(16)_generation_0(0)", -5, 105)
    maker.annotate("execute_context_0(0)_generation_2(2)", 500, 600)
    maker.launch("gemm", 510, 600, 700)
    profile = read_recorded(maker.save(tmp_path / "gpu.json"))
    assert [name.partition(" ")[2][:12] for name in profile.steps] == ["dbo: step of", "execute_cont"]
    assert len(profile.notes) == 2


def test_the_narrowest_steps_that_a_profile_names_are_taken(tmp_path: Path) -> None:
    maker = Maker()
    maker.annotate("ProfilerStep#3", 0, 100)
    maker.annotate("execute_context_1(4)_generation_0(0)", 5, 95)
    maker.annotate("gpu_model_runner: forward", 20, 60)
    maker.launch("sample", 70, 75, 80)
    maker.launch("gemm", 30, 40, 50)
    profile = read_recorded(maker.save(tmp_path / "gpu.json"))
    assert [*profile.steps] == ["0: gpu_model_runner: forward"]
    assert [span.op for span in get_only(profile).spans] == ["gemm"]


def test_a_profile_of_torch_npu_has_its_kernels_by_arrows(tmp_path: Path) -> None:
    """As torch_npu's own writer does: a list, times as text, an arrow from each op to its kernel."""
    host = {"ph": "X", "pid": 1, "tid": 11, "cat": "cpu_op"}
    chip = {"ph": "X", "pid": 2, "tid": 31, "args": {}}
    arrow = {"name": "torch_to_npu", "cat": "async_npu", "id": 5, "bp": "e"}
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "Python"}},
        {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "Ascend Hardware"}},
        {**host, "name": "dbo: step of 8 tokens, schedule ab", "ts": "1000.000", "dur": 50.0, "args": {}},
        {**host, "name": "dbo: final_norm mb 0 on compute #0", "ts": "1010.000", "dur": 10.0, "args": {}},
        {**host, "name": "aten::rms_norm", "ts": "1012.500", "dur": 5.0, "args": {}},
        {**arrow, "ph": "s", "pid": 1, "tid": 11, "ts": "1012.500"},
        {**arrow, "ph": "f", "pid": 2, "tid": 31, "ts": "1100.125"},
        {**chip, "name": "RmsNorm", "ts": "1100.125", "dur": "20.000"},
        {**chip, "name": "EVENT_WAIT", "ts": "1090.000", "dur": "10.000"},
    ]
    (tmp_path / "trace_view.json").write_text(json.dumps(events))
    timeline = get_only(read_recorded(tmp_path / "trace_view.json"))
    assert list_spans(timeline) == [("compute", "final_norm", 0, 100, 120)]


@pytest.mark.parametrize(
    ("name", "communicates"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)", True),
        ("void deep_ep::internode_ll::dispatch<true, false, 7168>(...)", True),
        ("gloo:all_reduce", True),
        ("c10d::allreduce_", True),
        ("_C::shm_allreduce", True),
        ("hcom_allReduce__123_0", True),
        ("MoeDistributeCombineV2", True),
        ("Memcpy PtoP (Device -> Device)", True),
        ("aten::mm", False),
        ("void at::native::reduce_kernel<512, 1, ...>(...)", False),
        ("aten::broadcast_tensors", False),
        ("fused_moe_kernel", False),
        ("Memcpy DtoD (Device -> Device)", False),
    ],
)
def test_what_communicates_is_told_by_its_name(name: str, communicates: bool) -> None:
    assert is_communication(name) is communicates
    assert not is_host_copy(name)


def test_the_command_prints_a_row_for_each_step_and_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    note, head, *rows, medians = run_command(capsys, SPLIT).splitlines()
    assert note.startswith("rank 0, 3 steps: ")
    assert head.split()[:4] == ["step", "rank", "ms", "hidden"]
    assert [row.split(":")[0] for row in rows] == ["0", "1", "2"]
    assert medians.split()[0] == "median"


def test_one_step_of_a_profile_is_printed_in_full_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_command(capsys, SPLIT, "--step", "1")
    assert "E_overlap" in printed
    assert "comm |" in printed
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"a figure shows one step, but .* has 3"):
        run_command(capsys, SPLIT, "--figure", tmp_path / "step.png")
    run_command(capsys, SPLIT, "--step", "1", "--figure", tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="has no step '9'"):
        run_command(capsys, SPLIT, "--step", "9")


def test_figures_for_programs_are_by_step_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(run_command(capsys, VLLM, "--json"))
    assert {*figures["0: execute_context_4(240)_generation_0(0)"]} == {"rank 0"}


def test_a_folder_may_have_profiles_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_split_step().save(tmp_path / "a.pt.trace.json.gz")
    make_ubatched_step().save(tmp_path / "b.json")
    save_trace({"rank 0": Timeline((Span("compute", "a", 0, 0, 1),))}, tmp_path / "step-0.json")
    printed = run_command(capsys, tmp_path).splitlines()
    assert [line.split()[0] for line in printed] == [
        "rank", "rank", "step", "a.pt.trace.json.gz", "b.json", "step-0.json", "median",
    ]  # fmt: skip


def test_a_profile_without_steps_does_not_hide_those_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Maker(rank=None)
    server.annotate("llm_engine step: get_output", 0, 10)
    path = server.save(tmp_path / "async_llm.json")
    with pytest.raises(ConfigError, match=r"async_llm\.json has no step that ran an op"):
        run_command(capsys, path)
    make_split_step().save(tmp_path / "rank-0.json")
    printed = run_command(capsys, tmp_path).splitlines()
    assert printed[0] == "process 100: no step that ran an op"
    assert [line.split()[0] for line in printed[1:]] == ["rank", "step", "rank-0.json", "median"]


def replace(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Return what gives the last event of a profile other fields."""
    return lambda profile: profile["traceEvents"][-1].update(fields)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replace(ts="x"), r"traceEvents\[15\]: ts is 'x'; it must be a finite number of microseconds"),
        (replace(ts=float("nan")), "ts is nan"),
        (replace(ts=10**400), "ts is 1"),
        (replace(dur=None), "dur is None"),
        (replace(dur=True), "dur is True"),
        (replace(name=7), "name is 7; it must be text"),
        (replace(pid=[1]), r"pid is \[1\]; it must be a whole number or text"),
        (replace(tid=1.5), "tid is 1.5"),
        (replace(ts=1e30), "s apart, more than"),
        (lambda profile: profile.update(traceEvents=7), "traceEvents is 7; it must be a list"),
        (lambda profile: profile.update(traceEvents=[]), "has no event with a duration"),
        (lambda profile: profile["traceEvents"].append(3), r"traceEvents\[16\] is 3; it must be an object"),
        (lambda profile: profile.pop("traceEvents"), "traceEvents is None"),
    ],
)
def test_what_is_no_profile_is_named_with_the_field(change: Any, why: str, tmp_path: Path) -> None:
    profile = make_split_step().make()
    change(profile)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(ConfigError, match=rf"other\.json.*is neither a trace .* nor a profile.*{why}"):
        read_recorded(path)


@pytest.mark.parametrize("spoil", [lambda packed: packed[:-9], lambda packed: packed[:40] + b"\0" + packed[41:]])
def test_a_packed_file_that_is_broken_is_named(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = make_split_step().save(tmp_path / "gpu.json.gz")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"gpu\.json\.gz"):
        read_recorded(path)


def test_no_more_is_unpacked_than_a_reader_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_file, "MAX_PROFILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 25)))  # 32 MiB in 32 KiB
    with pytest.raises(ConfigError, match="has more than 1 MiB"):
        read_recorded(path)


def test_a_profile_with_stacks_keeps_none_of_them(tmp_path: Path) -> None:
    maker = make_split_step()
    for number in range(1000):
        maker.add("python_function", "x" * 100, number, number + 1)
    profile = read_recorded(maker.save(tmp_path / "gpu.json.gz"))
    assert get_only(profile) == get_only(read_recorded(make_split_step().save(tmp_path / "without.json")))


def test_a_profile_says_of_a_step_what_our_own_recorder_says(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    device, recorder = open_device("cpu"), Recorder()
    p = ProgramBuilder()
    with p.layer(0):
        x = p.comm(
            "reduce", lambda x: time.sleep(0.004) or x, p.compute("mlp", lambda x: time.sleep(0.002) or x, p.input("x"))
        )
    program = p.build(p.compute("end", lambda x: x, x))
    runtime = MicroBatchRuntime(program, device, RuntimeConfig(mode="always"), Log())  # type: ignore[arg-type]
    plan = runtime.plan(Batch((4, 4), 8))
    assert isinstance(plan, ExecutionPlan)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads) as profiler:
        runtime.run(plan, [(0,), (0,)], instrument=recorder)
    profiler.export_chrome_trace(str(tmp_path / "step.json.gz"))
    device.close()
    recorded = {(span.op, span.micro_batch): span for span in recorder.timeline().spans}
    shown = {(span.op, span.micro_batch): span for span in get_only(read_recorded(tmp_path / "step.json.gz")).spans}
    assert shown.keys() == recorded.keys()
    for name, span in shown.items():
        assert (span.lane, span.waits) == (recorded[name].lane, recorded[name].waits)
        # The range is inside of what is timed.
        assert span.end - span.start <= recorded[name].end - recorded[name].start + 50e-6
    for name in (("L0.reduce", 0), ("L0.reduce", 1)):
        assert shown[name].end - shown[name].start >= 0.004
