"""The examples run as their README says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.observe.trace_folders import check_traces

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(
    name: str, *arguments: str, timeout: float = 300, before: Sequence[str] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run an example, with words *before* the command that changes what it may do."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    words = [*before, sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=timeout)


def assert_table_is_shown(printed: str) -> None:
    """Check that a demo has compared answers and times, and drawn lanes.

    That it gains is not checked: machines are shared, so speed is measured by `make bench-two-hosts`.
    """
    assert "identical token by token: 32 of 32 answers" in printed
    assert int(re.findall(r"with (\d+) split steps", printed)[0]) > 2
    for mode in ("unsplit", "split, no overlap", "dual-batch overlap"):
        assert re.search(rf"^  {mode} +[\d.]+ s +[\d.]+x$", printed, re.MULTILINE)
    assert re.search(r"compute \|[01.]+\|", printed)
    assert re.search(r"comm \|[01.]+\|", printed)
    assert float(re.findall(r"([\d.]+)% of the communication was hidden", printed)[0]) > 5


def forbid_hosts() -> list[str]:
    """Return the words before a command that keep root from making network namespaces, as in most containers."""
    return ["setpriv", "--bounding-set=-sys_admin,-net_admin"] if os.geteuid() == 0 and shutil.which("setpriv") else []


@pytest.mark.vllm
@pytest.mark.slow
def test_the_demo_emulates_a_link_where_there_can_be_no_hosts() -> None:
    link = "auto" if forbid_hosts() else "emulated"
    done = run_example("offline_dualbatch_overlap_npu.py", "--max-tokens", "6", "--link", link, before=forbid_hosts())
    assert done.returncode == 0, done.stderr[-4000:]
    assert "emulated: ranks of one host wait in each reduce" in done.stdout
    assert_table_is_shown(done.stdout)


@pytest.mark.root
def test_hosts_that_are_asked_for_and_cannot_be_made_are_an_error() -> None:
    if not forbid_hosts():
        pytest.skip("setpriv takes rights from root")
    done = run_example("offline_dualbatch_overlap_npu.py", "--link", "namespaces", before=forbid_hosts())
    assert done.returncode == 1
    assert re.fullmatch(r"error: `ip netns add \S+` failed: .+\n", done.stderr)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("nothing_left_behind")
def test_the_demo_makes_two_hosts() -> None:
    done = run_example("offline_dualbatch_overlap_npu.py", "--max-tokens", "6", "--link", "namespaces")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "between two hosts, network namespaces" in done.stdout
    assert_table_is_shown(done.stdout)


def may_run_in_namespaces(user: list[str], program: str) -> bool:
    words = [*user, "unshare", "-Urn", program, "-c", ""]
    return shutil.which("setpriv") is not None and not subprocess.run(words, capture_output=True).returncode


@pytest.mark.root
def test_a_user_without_rights_makes_hosts_in_namespaces_of_their_own() -> None:
    """The program runs again as root of them; what it makes vanishes with it."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from network_hosts import *; become_root_of_namespaces();"
        "check_requirements(); hosts = TwoHosts('200mbit'); first, second = hosts.__enter__();"
        "subprocess.run(first.command('ip', '-br', 'addr'), check=True); hosts.__exit__(None, None, None)"
    )
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    pythons = (sys.executable, "/usr/bin/python3")  # the first may be in a folder of root's
    allowed = [word for word in pythons if may_run_in_namespaces(user, word)]
    if not allowed:
        pytest.skip("this kernel lets no user make namespaces, or users have no Python")
    # A program in a file, because it runs itself again by its name.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder, "make_hosts.py")
        file.write_text(program.replace("; ", "\n").replace(";", "\n"))
        done = subprocess.run([*user, allowed[0], str(file), str(EXAMPLES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "10.77.0.1/24" in done.stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_the_demo_on_one_host_says_that_nothing_can_be_gained() -> None:
    done = run_example("offline_dualbatch_overlap_npu.py", "--max-tokens", "6", "--link", "none")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "identical token by token: 32 of 32 answers" in done.stdout
    assert int(re.findall(r"steps split: (\d+)", done.stdout)[0]) > 5
    assert "Splitting was forced" in done.stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_the_demo_sees_pictures_with_overlap_as_without() -> None:
    done = run_example("offline_dualbatch_overlap_npu.py", "--pictures")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "identical token by token: 12 of 12 answers" in done.stdout
    assert int(re.findall(r"^steps split: (\d+)", done.stdout, re.MULTILINE)[0]) > 5
    assert int(re.findall(r"^encoder forwards split: (\d+)", done.stdout, re.MULTILINE)[0]) > 0
    assert re.search(r"^\[picture\]what\? +(small|big) \w+ on \w+$", done.stdout, re.MULTILINE)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_prefill_node_that_splits_and_a_decode_node_answer_as_one_server() -> None:
    pytest.importorskip("nixl")
    done = run_example("disaggregated.py", "--requests", "24", timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "killed the prefill node after 12 answers" in done.stdout
    assert "identical token by token: 24 of 24 answers" in done.stdout
    (split,) = re.findall(r"split steps of the prefill node: (\d+)", done.stdout)
    (read, again) = re.findall(r"decode node read: (\d+); requests sent again: (\d+)", done.stdout)[0]
    assert min(int(split), int(read), int(again)) > 0


def test_pictures_have_prompts_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("12+57=\n")
    done = run_example("offline_dualbatch_overlap_npu.py", "--pictures", "--prompts", str(tmp_path / "prompts"))
    assert done.returncode == 2
    assert "--pictures has prompts of its own" in done.stderr


def test_the_demo_explains_all_its_options() -> None:
    done = run_example("offline_dualbatch_overlap_npu.py", "--help")
    assert done.returncode == 0
    for option in ("--device", "--model", "--tp", "--prompts", "--max-tokens", "--mode", "--micro-batches", "--dtype"):
        assert option in done.stdout


def test_the_demo_on_npu_says_what_is_missing() -> None:
    done = run_example("offline_dualbatch_overlap_npu.py", "--device", "npu")
    assert done.returncode == 2
    assert "vllm-ascend" in done.stderr


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root and iproute2")
    before = list_namespaces()
    yield
    assert list_namespaces() == before


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("nothing_left_behind")
def test_two_hosts_give_the_same_tokens_and_their_traces_show_lanes_that_overlap(tmp_path: Path) -> None:
    words = ("--repeat", "1", "--prefills", "2x150", "--hidden", "128", "--layers", "2")
    done = run_example("two_hosts.py", *words, DBO_TRACE=str(tmp_path / "traces"), DBO_TRACE_STEPS="4")
    assert done.returncode == 0, done.stderr[-4000:]
    row = next(line for line in done.stdout.splitlines() if line.startswith("2x150"))
    assert row.endswith("yes")
    assert re.search(r"\d+% of the communication was hidden behind computation", done.stdout)
    hidden = check_traces(tmp_path / "traces", ranks=2, steps=4)
    assert min(hidden) == 0  # split, no overlap
    assert max(hidden) > 0.2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("nothing_left_behind")
def test_two_hosts_with_half_of_the_experts_each_compute_during_dispatch() -> None:
    words = ["--parallel", "data-expert", "--rate", "1gbit", "--repeat", "1", "--prefills", "2x150"]
    done = run_example("two_hosts.py", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "DP=2 with expert parallel" in done.stdout
    assert re.search(r"^prefill +unsplit .* dual-batch overlap .* same tokens$", done.stdout, re.MULTILINE)
    assert re.search(r"^2x150( +[\d.]+ s){3}( +[\d.]+x){2} +yes$", done.stdout, re.MULTILINE)
    assert done.stdout.count("'split': 4") == 2, "each rank tells of its steps"
    assert re.search(r"compute \|[01.]+\|\n +comm \|[01.]+\|", done.stdout)
    shares = re.findall(r"([\d.]+)% of dispatch ran behind another micro-batch's experts", done.stdout)
    assert [float(share) > 0 for share in shares] == [True]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("nothing_left_behind")
def test_the_sweep_calibrates_and_judges_at_every_rate() -> None:
    words = ["--rates", "1gbit", "none", "--tokens", "8", "300", "--repeat", "1", "--budget", "4", "--layers", "2"]
    done = run_example("sweep_rates.py", *words)
    assert done.returncode in (0, 1), done.stderr[-4000:]  # it takes times, which a test does not judge
    assert done.stdout.count("calibrated in") == 2
    rows = re.findall(r"^ +(\d+)( +[\d.]+ ms){3}(?: +[\d.]+x){2}  (?:unsplit|split) ", done.stdout, re.MULTILINE)
    assert [tokens for tokens, _ in rows] == ["8", "300"] * 2
    assert re.search(r"^worst off/auto: [\d.]+x at (8|300) tokens, (1gbit|none)", done.stdout, re.MULTILINE)
    assert re.search(r"^predicted against measured step time: median error [\d.]+%", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("words", "bits"), [("200mbit", 2e8), ("2.5Gbit", 2.5e9), ("800kbit", 8e5), ("9bit", 9)])
def test_rates_are_read_as_tc_reads_them(words: str, bits: float) -> None:
    assert float(ask_for_rate(words)) == bits


@pytest.mark.parametrize("words", ["fast", "0mbit", "10mb", "-1mbit"])
def test_what_is_no_rate_is_refused(words: str) -> None:
    assert "is no rate of a link; write it like 200mbit" in ask_for_rate(words)


def ask_for_rate(words: str) -> str:
    script = f"from network_hosts import *\ntry: print(read_rate({words!r}))\nexcept NetworkError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", script], cwd=EXAMPLES, capture_output=True, text=True, check=True)
    return done.stdout


def list_namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_two_hosts_without_root_says_so() -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs a way to give up root")
    words = ["setpriv", "--reuid", "65534", "--clear-groups"] if os.geteuid() == 0 else []
    script = "from network_hosts import *\ntry: check_requirements()\nexcept NetworkError as e: print(e)"
    done = subprocess.run(
        [*words, "/usr/bin/env", "python3", "-c", script], cwd=EXAMPLES, capture_output=True, text=True
    )
    assert "need root" in done.stdout, done.stderr


def test_a_widened_model_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    training = import_module("train_tiny_deepseek")
    torch.manual_seed(0)
    model = training.build_model()
    wide = type(model)(training.build_config(training.SAVED))
    wide.load_state_dict(training.widen(model.state_dict()))
    tokens = torch.arange(3, 67).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(wide(tokens).logits, model(tokens).logits)


def read_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (weight.shape, weight.dtype) for name, weight in load_file(folder / "model.safetensors").items()}


@pytest.mark.slow
def test_the_training_script_makes_a_model_that_loads(tmp_path: Path) -> None:
    done = run_example("train_tiny_deepseek.py", "--steps", "2", "--per-kind", "4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    kept = EXAMPLES / "tiny-deepseek"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in tmp_path.iterdir()}
    assert (tmp_path / "config.json").read_bytes() == (kept / "config.json").read_bytes()
    assert read_shapes(tmp_path) == read_shapes(kept)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_the_training_script_makes_a_drafter_like_the_one_that_is_here(drafter: str, tmp_path: Path) -> None:
    options = ("--steps", "2", "--per-kind", "4", "--out", str(tmp_path))
    done = run_example("train_tiny_drafters.py", drafter, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    kept = EXAMPLES / f"tiny-deepseek-{drafter}"
    assert (tmp_path / "config.json").read_bytes() == (kept / "config.json").read_bytes()
    assert read_shapes(tmp_path) == read_shapes(kept)
