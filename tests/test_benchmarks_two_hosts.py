"""The benchmarks over two hosts: what they derive from what they measured, what they refuse, what they leave behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dbo_runtime.observe.timeline import Span, Timeline
from examples.network_hosts import Host, NetworkError, TwoHosts
from examples.process_group import Program, start_together, wait_for_first
from tests.benchmarks import (
    bench_prefill_node,
    bench_serving,
    bench_two_hosts,
    served_hosts,
    serving_report,
    two_hosts_node,
    two_hosts_report,
)
from tests.benchmarks.measured_hosts import BenchError
from tests.benchmarks.served_workloads import LONG_PROMPTS, METRICS, OfferedLoad, Run, read_figures
from tests.benchmarks.targets import Target, find_missed
from tests.benchmarks.two_hosts_cells import MODES, NANO, OFF, PLANNED, SYNCHRONOUS, Cell, StepFigures
from tests.benchmarks.workloads import WorkloadError, read_workload

ROOT = Path(__file__).parents[1]
SLEEP = ("sleep", "300")
BENCHES = {
    "bench_two_hosts": bench_two_hosts,
    "bench_serving": bench_serving,
    "bench_prefill_node": bench_prefill_node,
}


def make_cell(overlap: Sequence[float], workload: str = "1x2000", same: bool = True) -> Cell:
    """Return a cell in which unsplit steps take 2.6 s, and those without overlap 2.3 s."""
    seconds = {OFF: [2.6], SYNCHRONOUS: [2.3], NANO: [2.1]}
    seconds = {mode: taken * len(overlap) for mode, taken in seconds.items()} | {PLANNED: list(overlap)}
    steps = {
        NANO: [StepFigures(2.1, 1.0, 0.5, 2.0, 1, 4, 0.25)],
        SYNCHRONOUS: [StepFigures(2.2, 0.8, 0.0, bound) for bound in (1.7, 1.8, 1.9)],
        PLANNED: [StepFigures(duration, 1.0, 0.75, 1.9, 3) for duration in (1.9, 2.0, 2.4)],
    }
    return Cell("tensor", "200mbit", workload, seconds, steps, same, predicted=1.25)


def test_ratios_are_of_medians_and_the_bound_is_that_of_ops_that_ran_alone() -> None:
    cell = make_cell([2.0, 1.9, 4.0])
    assert [cell.gain(OFF), cell.gain(SYNCHRONOUS)] == pytest.approx([1.3, 1.15])
    assert list(cell.spread(OFF)) == pytest.approx([(0.65 + 1.3) / 2, (1.3 + 2.6 / 1.9) / 2])
    assert cell.efficiency == pytest.approx(1.8 / 2.0)
    assert cell.order_efficiency() == pytest.approx(1.9 / 2.0)
    assert cell.hidden == 0.75
    assert cell.parts == "3"
    assert Cell.from_dict(cell.as_dict()) == cell


def test_a_cell_without_split_steps_or_bounds_says_that_they_are_unknown() -> None:
    cell = Cell("tensor", "none", "1x2000", {mode: [1.0] for mode in MODES})
    assert (cell.hidden, cell.efficiency, cell.order_efficiency()) == (None, None, None)
    assert two_hosts_report.make_row(cell)[5] == "unsplit"
    assert two_hosts_report.make_evidence(cell) == []
    assert cell.parts == "unsplit"


def test_the_report_tells_which_targets_are_missed_and_how_far() -> None:
    cells = [make_cell([2.0] * 7), make_cell([2.0] * 7, "4x500", same=False), make_cell([2.0] * 7, "16x125")]
    text = "\n".join(two_hosts_report.write_report(cells, 7, "all_gather"))
    assert "| 1x2000: over unsplit | ≥ 1.30 | 1.300 | reached |" in text
    assert "| 4x500: over split, no overlap | ≥ 1.12 | 1.150 | reached |" in text
    assert text.count("reached") == 6
    assert text.count("| 3 | 1.30x (1.30–1.30) |") == 3
    assert "| 200mbit | 4x500 | 1.15x | 1.25x | 0.75 | 0.95 | 0.95 |" in text
    assert "which nano-batches leave whole: 1x2000 25%, 4x500 25%, 16x125 25%." in text
    assert "DIFFERENT tokens**: 4x500 at 200mbit." in text
    slow = "\n".join(two_hosts_report.write_report([make_cell([2.5] * 7)], 7, "all_gather"))
    assert "All modes gave the same tokens." in slow
    assert "| 1x2000: over unsplit | ≥ 1.30 | 1.040 | missed by 20.0% |" in slow
    assert len(find_missed(two_hosts_report.find_targets([make_cell([2.5] * 7)]))) == 2


def test_a_step_tells_its_form_and_how_much_of_it_nano_batches_leave_whole() -> None:
    spans = [
        Span("compute", "L0.attention", 0, 0.0, 3.0),
        Span("compute", "L0.mlp#0", 0, 3.0, 3.5),
        Span("compute", "L0.mlp#1", 0, 3.5, 4.0),
        Span("comm", "L0.reduce#0", 0, 3.5, 4.5),
    ]
    figures = two_hosts_node.look_into(Timeline(tuple(spans)).as_dict())
    assert (figures.form, figures.joint, figures.hidden) == ("2 nano", 0.75, 0.5)
    assert two_hosts_node.look_into(Timeline(tuple(spans[:1])).as_dict()).form == "its order"
    assert StepFigures(1.0, 0.5, 0.0, None).form == "2"


def test_few_runs_are_not_judged() -> None:
    assert "judged by medians of 7" in two_hosts_report.write_report([make_cell([2.0])], 1, "all_gather")[-1]
    assert "were not measured" in two_hosts_report.write_report([make_cell([2.0] * 7, "8x9")], 7, "all_gather")[-1]


def test_what_was_not_measured_does_not_reach_its_target() -> None:
    assert (Target("x", 0.9, None).reached, Target("x", 0.9, None).verdict) == (False, "not measured")
    assert Target("x", 0.88, 0.8, at_least=False).reached
    assert Target("x", 0.88, 0.97, at_least=False).verdict == "missed by 10.2%"


@pytest.mark.parametrize(
    ("name", "prompts", "answer", "late"),
    [
        ("4x500", (500,) * 4, 1, 0),
        ("decode-8x32", (16,) * 8, 32, 0),
        ("mixed-4+1500", (32, 64, 96, 128), 8, 1500),
    ],
)
def test_workloads_go_by_names(name: str, prompts: tuple[int, ...], answer: int, late: int) -> None:
    workload = read_workload(name)
    assert (workload.prompts, workload.answer, workload.late) == (prompts, answer, late)


@pytest.mark.parametrize("name", ["big", "0x5", "4x", "mixed-4x5", "decode-4+5", "4x500 "])
def test_what_is_no_workload_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="is no workload; write"):
        read_workload(name)


def make_run(mode: str, throughput: float, first_token: float) -> Run:
    figures = dict.fromkeys(METRICS.values(), 1.0)
    figures.update(request_throughput=throughput, mean_ttft_ms=first_token)
    return Run(OfferedLoad(LONG_PROMPTS, "inf"), mode, figures, split=3, unsplit=1)


def test_servers_are_compared_by_medians() -> None:
    runs = [make_run("off", 1.0, 1000.0)] * 3 + [make_run("on", speed, 850.0) for speed in (9.0, 1.2, 1.1)]
    text = "\n".join(serving_report.write_report(runs, "200mbit", 3))
    assert "| throughput | ≥ 1.15 | 1.200 | reached |" in text
    assert "| mean TTFT | ≤ 0.88 | 0.850 | reached |" in text
    assert "| inf | on | 1.2 | 1.20x | 850 | 0.85x | 1 |" in text
    assert "| inf | on | 1 | 3 of 4 |" in text
    assert "not measured" in serving_report.write_report(runs, "50mbit", 3)[-1]


def test_requests_that_were_not_answered_are_no_result() -> None:
    found = {"completed": LONG_PROMPTS.requests, **dict.fromkeys(METRICS.values(), 2)}
    assert read_figures(found, LONG_PROMPTS) == dict.fromkeys(METRICS.values(), 2.0)
    with pytest.raises(BenchError, match="11 of 12 requests"):
        read_figures({**found, "completed": 11}, LONG_PROMPTS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench_two_hosts --rates 200mbit fast", "'fast' is no rate of a link"),
        ("bench_two_hosts --workloads huge", "'huge' is no workload"),
        ("bench_two_hosts --repeat 0", "'0' is not a whole number of at least 1"),
        ("bench_two_hosts --parallel pipeline", "invalid choice: 'pipeline'"),
        ("bench_serving --rate fast", "'fast' is no rate of a link"),
        ("bench_serving --request-rates 0", "'0' is no rate of requests"),
        ("bench_serving --workloads huge", "invalid choice: 'huge'"),
        ("bench_prefill_node --rate fast", "'fast' is no rate of a link"),
        ("bench_prefill_node --requests 0", "'0' is not a whole number of at least 1"),
    ],
)
def test_a_wrong_command_line_is_refused(words: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, *options = words.split()
    monkeypatch.setattr(sys, "argv", [bench, *options])
    with pytest.raises((BenchError, NetworkError, WorkloadError), match=re.escape(says)):
        BENCHES[bench].parse_arguments()


@pytest.mark.slow
@pytest.mark.parametrize("bench", ["bench_two_hosts", "bench_serving"])
def test_without_root_a_bench_ends_with_one_line(bench: str) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs a way to give up root")
    words = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*words, sys.executable, "-m", f"tests.benchmarks.{bench}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.match("error: .*need root", done.stderr)


@pytest.mark.slow
@pytest.mark.root
def test_without_iproute2_a_bench_ends_with_one_line(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("root is asked for first")
    words = [sys.executable, "-m", "tests.benchmarks.bench_two_hosts"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.match("error: ip and tc not found: install iproute2", done.stderr)


def test_programs_end_together() -> None:
    with start_together(Program(SLEEP, os.environ), Program(("false",), os.environ)) as (first, second):
        assert wait_for_first(first, second) is None
    assert (first.poll(), second.poll()) == (-signal.SIGTERM, 1)
    with start_together(Program(("true",), os.environ), Program(SLEEP, os.environ)) as (first, second):
        assert wait_for_first(first, second) == 0
    assert second.poll() == -signal.SIGTERM


def test_programs_end_where_another_cannot_be_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    programs = Program(SLEEP, os.environ, pipe), Program((str(tmp_path / "none"),), os.environ)
    with pytest.raises(FileNotFoundError), start_together(*programs):
        pass
    assert os.read(reader, 1) == b"", "a process still holds the pipe"
    os.close(reader)


@pytest.mark.slow
def test_what_a_program_has_started_may_clean_up_when_all_end(tmp_path: Path) -> None:
    pipe, mark = tmp_path / "pipe", tmp_path / "mark"
    os.mkfifo(pipe)
    clean = f"trap 'sleep 0.2; rm {mark}; exit' TERM; touch {mark}; echo > {pipe}; while :; do sleep 0.05; done"
    with start_together(Program(("sh", "-c", f"({clean}) & exec sleep 300"), os.environ)):
        pipe.read_text()
        assert mark.exists()
    assert not mark.exists()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    need_hosts()
    with TwoHosts(None) as pair:
        yield pair


def need_hosts() -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root and iproute2")


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.root
def test_a_port_in_use_is_told_in_one_line(hosts: tuple[Host, Host]) -> None:
    served_hosts.check_port(hosts[0])
    listen = f"import socket; s = socket.create_server(('{hosts[0].address}', {served_hosts.PORT})); print(flush=True)"
    words = hosts[0].command(sys.executable, "-c", f"{listen}; input()")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        with pytest.raises(BenchError, match=r"^port 8000 of 10\.77\.0\.1 is in use\.$"):
            served_hosts.check_port(hosts[0])
        listener.communicate(b"\n")


@pytest.mark.root
def test_a_server_that_ends_shows_its_last_lines(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    programs = [
        Program(SLEEP, os.environ, logs[0]),
        Program(("sh", "-c", "echo is broken; exit 3"), os.environ, logs[1]),
    ]
    with start_together(*programs) as nodes, pytest.raises(BenchError, match=r"ended with 3.*\nis broken"):
        served_hosts.wait_until_up(served_hosts.Server(hosts[0]), nodes, logs)
    with (
        start_together(*(Program(SLEEP, os.environ, log) for log in logs)) as nodes,
        pytest.raises(BenchError, match="not up within 0 s"),
    ):
        served_hosts.wait_until_up(served_hosts.Server(hosts[0]), nodes, logs, patience=0)


@pytest.mark.root
def test_what_runs_on_a_host_ends_with_it() -> None:
    need_hosts()
    with TwoHosts(None) as (first, _):
        # In a session of its own, as what a program leaves behind may be.
        running = subprocess.Popen(first.command("sh", "-c", "echo; exec sleep 300"), stdout=-1, start_new_session=True)
        assert running.stdout is not None
        running.stdout.readline()
    assert running.wait(10) == -signal.SIGKILL
    running.stdout.close()


INTERRUPTED = """
import sys, time
from examples.process_group import Program, start_together
from tests.benchmarks.measured_hosts import prepare, run_program

def main():
    with prepare() as setting:
        commands = [host.command("sleep", "300") for host in setting.hosts]
        with start_together(*(Program(command, setting.environment(0)) for command in commands)) as programs:
            for program, host in zip(programs, setting.hosts):
                print(program.pid, setting.directory, host.namespace, flush=True)
            time.sleep(300)

sys.exit(run_program(main))
"""
TERMINATED = """
import os, sys
from examples.process_group import Program, start_together
from tests.benchmarks.measured_hosts import run_program

def main():
    with start_together(Program(("sleep", "300"), os.environ)) as (program,):
        print(program.pid, flush=True)
        program.wait()

sys.exit(run_program(main))
"""


@pytest.mark.slow
@pytest.mark.root
def test_an_interrupted_bench_leaves_nothing_behind() -> None:
    need_hosts()
    pytest.importorskip("vllm")
    started = stop(INTERRUPTED, signal.SIGINT, programs=2)
    namespaces = list_namespaces()
    assert not [namespace for *_, namespace in started if namespace in namespaces]
    assert not [pid for pid, *_ in started if Path(f"/proc/{pid}").exists()]
    assert not Path(started[0][1]).exists()


def test_a_bench_that_is_told_to_end_ends_its_programs() -> None:
    ((pid,),) = stop(TERMINATED, signal.SIGTERM, programs=1)
    assert not Path(f"/proc/{pid}").exists()


def stop(script: str, kind: signal.Signals, programs: int) -> list[list[str]]:
    """Send a signal to a bench when it has written a line for each of its programs; return the words of those lines.

    The bench writes them, and not its programs: those may be faster than what notes that they were started.
    """
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        assert bench.stderr is not None
        started = [bench.stdout.readline().split() for _ in range(programs)]
        bench.send_signal(kind)
        says = bench.stderr.read()
    assert (bench.returncode, says) == (130, "interrupted: hosts, programs and temporary files are removed.\n")
    return started


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.root
def test_the_bench_measures_prefills_decodes_and_mixtures_of_both() -> None:
    need_hosts()
    before = list_namespaces()
    words = "--rates 1gbit none --repeat 1 --budget 5 --parallel tensor --workloads 2x150 decode-2x3 mixed-2+200"
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_two_hosts", *words.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(r"^\| (1gbit|no limit) \| (\S+) \| .*x \(.*\) \|$", done.stdout, re.MULTILINE)
    assert [name for _, name in rows] == ["2x150", "decode-2x3", "mixed-2+200"] * 2
    assert "All modes gave the same tokens." in done.stdout
    assert list_namespaces() == before
