"""What parts of the kit count, compare and set up, without a device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dbo_runtime.config import RuntimeConfig  # noqa: E402 - parts need torch
from dbo_runtime.vllm_plugin.platforms.registry import get_platform  # noqa: E402
from tools.gpu_kit import plugin  # noqa: E402
from tools.gpu_kit.machine import describe_end, digest_sources, find_machine  # noqa: E402
from tools.gpu_kit.parts import frees  # noqa: E402
from tools.gpu_kit.parts.checkpoints import SMALL, get_checkpoint, make_weights  # noqa: E402
from tools.gpu_kit.parts.core import Core  # noqa: E402
from tools.gpu_kit.parts.decoder import SMALL as SMALL_DECODERS  # noqa: E402
from tools.gpu_kit.parts.decoder import Decoder  # noqa: E402
from tools.gpu_kit.parts.engine import read_options  # noqa: E402
from tools.gpu_kit.parts.findings import Findings  # noqa: E402
from tools.gpu_kit.parts.kernels import ERRORS, compare_kernels  # noqa: E402
from tools.gpu_kit.parts.link import describe_times  # noqa: E402
from tools.gpu_kit.parts.nodes import find_port, make_variables, wait_for  # noqa: E402
from tools.gpu_kit.parts.smoke import is_wrong  # noqa: E402
from tools.gpu_kit.parts.suite import count_outcomes, is_of  # noqa: E402
from tools.gpu_kit.parts.trace import check  # noqa: E402
from tools.gpu_kit.parts.two_ranks import tell_division  # noqa: E402
from tools.gpu_kit.plugin import Link  # noqa: E402


def test_findings_are_written_one_by_one_and_failures_too(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    findings = Findings(path)
    findings.attempt("one", lambda: 1)
    findings.attempt("two", lambda: 1 / 0)
    content = json.loads(path.read_text())
    assert content["results"] == {"one": 1, "two": "FAILED: ZeroDivisionError: division by zero"}
    assert content["failed"] == "two: ZeroDivisionError: division by zero"


def test_a_full_disk_fails_a_part_and_does_not_end_it(tmp_path: Path) -> None:
    (tmp_path / ".result.json").symlink_to("/dev/full")
    findings = Findings(tmp_path / "result.json")
    findings.note("one", 1)
    assert findings.failed == ["cannot write result.json: No space left on device"]
    findings.note("two", 2)
    assert json.loads((tmp_path / "result.json").read_text())["results"] == {"one": 1, "two": 2}


def test_what_another_process_has_written_is_taken_over_with_its_failure(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    other, findings = Findings(path), Findings(path)
    other.note("sum", 3)
    findings.take_over("rank 1 ended with 1")
    assert findings.found == {"sum": 3}
    assert findings.failed == ["rank 1 ended with 1"]
    other.fail("the sum is wrong")
    findings = Findings(path)
    findings.take_over("rank 0 ended with 1")
    assert findings.failed == ["the sum is wrong"]
    path.unlink()
    findings = Findings(path)
    findings.take_over("no end after 45 s")
    assert findings.failed == ["no end after 45 s, and no process of the part has written a result"]


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.slow
def test_ranks_end_together() -> None:
    assert wait_for([start(""), start("import time; time.sleep(0.5)")], 30) is None
    begin = time.monotonic()
    assert wait_for([start("import time; time.sleep(300)"), start("raise SystemExit(3)")], 60) == "rank 1 ended with 3"
    assert wait_for([start("import time; time.sleep(300)")], 0.5) == "no end after 0 s"
    assert wait_for([start("raise SystemExit(2)")], 30) == "rank 0 ended with 2"
    assert time.monotonic() - begin < 60


def test_each_rank_is_a_host_of_its_own_to_nccl_and_all_stay_on_loopback() -> None:
    one, other = make_variables(0), make_variables(1)
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]
    assert {one[name] for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")} == {"lo"}
    assert find_port() > 0


class CountingLink(Link):
    """A link that counts the rows that it sends."""

    rows = 0

    def _get_host(self, part: Any) -> Any:
        self.rows += part.shape[0]
        return super()._get_host(part)


@pytest.mark.parametrize(("share", "rows"), [(0.5, 2), (1.0, 4), (2.5, 10)])
def test_a_link_sends_rows_as_often_as_its_share_says_and_leaves_values(share: float, rows: int) -> None:
    link, x = CountingLink(share), torch.arange(12.0).view(4, 3)
    assert link.send(x) is x
    assert torch.equal(x, torch.arange(12.0).view(4, 3))
    assert link.rows == rows


def test_a_link_keeps_values_of_another_type() -> None:
    link = Link(1.0)
    link.send(torch.ones(8, 4, dtype=torch.bfloat16))
    x = torch.randn(4, 4)
    assert torch.equal(link.send(x.clone()), x)


def test_a_link_is_held_while_what_would_reduce_runs_without_its_reduce() -> None:
    link = Link(1.0)
    with link.hold():
        assert link.is_held
        with link.hold():
            assert link.is_held
        assert link.is_held
    assert not link.is_held


def test_the_plugin_does_nothing_unless_a_variable_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(plugin, "call_proven", lambda: called.append("proven"))
    monkeypatch.setattr(plugin, "put_link", lambda link: called.append(f"link {link.share}"))
    for name in ("VLLM_ASCEND_ENABLE_DBO", "DBO_ENABLE", plugin.PROVEN, plugin.LINK):
        monkeypatch.delenv(name, raising=False)
    plugin.register()
    monkeypatch.setenv(plugin.PROVEN, "1")
    plugin.register()
    assert called == []
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_DBO", "1")
    monkeypatch.setenv(plugin.LINK, "0.5")
    plugin.register()
    assert called == ["proven", "link 0.5"]


def test_the_kit_splits_what_is_still_to_be_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "replace", monkeypatch.setattr)
    plugin.call_proven()
    platform, served = get_platform("cuda"), SimpleNamespace()
    assert platform.check_support(RuntimeConfig(enabled=True)) is None
    assert list(platform.list_unproven(served)) == []  # type: ignore[arg-type]
    assert platform.check_encoder("Qwen3_VisionTransformer") is None


def test_a_name_that_vllm_no_longer_has_is_an_error() -> None:
    owner = SimpleNamespace(known=1)
    plugin.replace(owner, "known", 2)
    assert owner.known == 2
    with pytest.raises(AttributeError):
        plugin.replace(owner, "gone", 2)


REPORT = """<testsuites><testsuite>
<testcase name="test_a[cuda]"/><testcase name="test_b[cpu-1]"/><testcase name="test_c"><skipped/></testcase>
<testcase name="test_d[1-cuda]"><failure/></testcase><testcase name="test_e[npu]"><error/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_that_are_not_of_another_device(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert count_outcomes(report, "cuda") == ({"passed": 1, "failed": 1, "skipped": 1}, ["test_d[1-cuda]"])
    assert count_outcomes(report, "npu") == ({"passed": 0, "failed": 1, "skipped": 1}, ["test_e[npu]"])
    assert is_of("test_of_cpu_words", "cuda")


def test_options_are_words_of_json_or_text() -> None:
    words = ["enforce_eager=false", "attention_backend=TRITON_MLA", "max_num_seqs=8"]
    assert read_options(words) == {"enforce_eager": False, "attention_backend": "TRITON_MLA", "max_num_seqs": 8}


def test_medians_and_gains_are_of_all_times() -> None:
    times = {"unsplit": [2.0, 9.0, 2.2], "split, no overlap": [3.0] * 3, "dual-batch overlap": [1.0, 1.1, 5.0]}
    found = describe_times(times)
    assert found["ms"] == {"unsplit": 2200.0, "split, no overlap": 3000.0, "dual-batch overlap": 1100.0}
    assert found["gain"] == 2.0


def test_a_profile_without_communication_fails() -> None:
    step = {"busy": {"compute": 1.0, "comm": 0.5}}
    assert check({"0": {"rank 0": step}})
    with pytest.raises(AssertionError, match="no lane communicates in 1 steps"):
        check({"0": {"rank 0": {"busy": {"compute": 1.0}}}})


def test_a_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setenv("KIT_WORK", str(tmp_path))
    folder = get_checkpoint("llama", "cpu")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert get_checkpoint("llama", "cpu") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == SMALL["cpu"].layers
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_weights_of_a_llama_have_its_sizes() -> None:
    weights = dict(make_weights(SMALL["cpu"]))
    size = SMALL["cpu"]
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (
        size.kv_heads * size.hidden // size.heads,
        size.hidden,
    )
    assert len(weights) == 3 + 9 * size.layers


def test_a_decoder_computes_in_every_order_what_the_loop_computes() -> None:
    core = Core("cpu")
    assert all(core.compare().values())
    decoder = Decoder("cpu", SMALL_DECODERS["cpu"])
    assert decoder.reduces == 2 * 2 * decoder.size.layers


def test_shares_of_communication_are_sized_to_computation() -> None:
    core = Core("cpu")
    core._sized = (
        1.0,
        1.0 / (core.decoder.reduces * core.decoder.all_elements),
    )  # sending all takes as long as computing
    for share in (0.25, 2.0):
        found = core.measure_share(share)
        assert core.decoder.elements == int(share * core.decoder.all_elements)
        assert found["us an instruction"] > 0


def test_kernels_that_need_a_gpu_say_so_elsewhere() -> None:
    kernels = compare_kernels("cpu")
    assert ERRORS.keys() == {"cuda", "cpu"}
    assert "needs a GPU" in kernels["fused experts"]() or "need a GPU" in kernels["fused experts"]()
    assert kernels.keys() == compare_kernels("cuda").keys()


def test_a_kernel_whose_result_is_no_number_is_wrong() -> None:
    assert is_wrong(float("nan"), "cuda")
    assert is_wrong(0.5, "cuda")
    assert not is_wrong(0.001, "cuda")
    assert not is_wrong("not here: any", "cuda")


def test_times_of_ranks_that_nothing_divides_are_refused() -> None:
    assert "which sees 66" in tell_division(66, 1)
    with pytest.raises(RuntimeError, match="the ranks take turns on the GPU"):
        tell_division(132, 0)


def test_the_sanitizer_looks_for_frees_and_not_for_calls_that_fail() -> None:
    pairs = dict(zip(frees.OPTIONS[::2], frees.OPTIONS[1::2], strict=True))
    assert pairs["--track-stream-ordered-races"] == "all"
    assert pairs["--report-api-errors"] == "no"
    assert pairs["--error-exitcode"] == str(frees.EXPECTED["fault"])


def test_memory_that_the_sanitizer_cannot_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frees.check_allocator("cpu")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with pytest.raises(AssertionError, match="hides from the sanitizer"):
        frees.check_allocator("cuda")


def test_a_machine_is_named_with_what_its_results_depend_on(tmp_path: Path) -> None:
    machine = find_machine("cpu")
    assert (machine["device"], machine["chip"], machine["problem"]) == ("cpu", "CPU", None)
    assert machine["torch"] == torch.__version__
    assert len(machine["source"]) == 16
    (tmp_path / "models").mkdir()
    one = digest_sources(tmp_path)
    (tmp_path / "models" / "new.py").write_text("x = 1\n")
    assert digest_sources(tmp_path) != one


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_why() -> None:
    problem = find_machine("cuda")["problem"]
    assert problem.startswith("no device can be used: ")
    assert "\n" not in problem


def test_a_device_that_does_not_answer_is_told_with_where_it_hung() -> None:
    stack = (
        'Timeout (0:01:20)!\nThread 0x1 (most recent call first):\n  File "init.py", line 3 in _cuda_init\n  File "x"\n'
    )
    assert describe_end(stack, 1) == 'it hung in File "init.py", line 3 in _cuda_init'
    assert describe_end("Traceback\nImportError: libcuda.so.1\n", 1) == "ImportError: libcuda.so.1"
    assert describe_end("", -9) == "exit status -9"
