"""The tutorial's package does what docs/write-an-adapter.md says: it is installed, found, tried, and served with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.observe.trace_folders import check_traces

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "toy_adapter"
PAGE = (ROOT / "docs" / "write-an-adapter.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a folder of its own, as pip does for anybody; the environment stays as it is."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "toy_adapter"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)  # pip builds inside the source
    words = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--target", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    return folder


def run(site: Path, *words: str, timeout: float = 300, **settings: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        **settings,
    }
    return subprocess.run(
        [sys.executable, *words], env=variables, capture_output=True, text=True, timeout=timeout, cwd=site
    )


def test_it_is_as_long_as_the_page_says() -> None:
    stated = re.search(r"in (\d+) lines", PAGE)
    assert stated is not None
    assert len((PACKAGE / "granite_adapter.py").read_text(encoding="utf-8").splitlines()) == int(stated[1])


def test_the_page_quotes_the_package() -> None:
    source = (PACKAGE / "granite_adapter.py").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"```python\ndef record_layer.*?\n```", PAGE, re.DOTALL)
    for line in quoted.splitlines()[2:-2]:
        assert line.strip() in source, line


def test_doctor_finds_it(site: Path) -> None:
    found = json.loads(run(site, "-m", "dbo_runtime", "doctor", str(PACKAGE), "--json").stdout)
    (model,) = (finding for finding in found["findings"] if finding["name"] == "model")
    assert model["state"] == "ok"
    assert "split by granite_adapter.GraniteAdapter" in model["found"]


@pytest.mark.vllm
def test_its_own_test_passes(site: Path) -> None:
    done = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PACKAGE / "test_granite_adapter.py"))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 passed" in done.stdout


@pytest.mark.vllm
def test_the_command_tries_it_and_shows_its_schedule(site: Path) -> None:
    words = re.search(r"^dbo adapter examples/toy_adapter (--simulate .*)$", PAGE, re.MULTILINE)
    assert words is not None
    done = run(site, "-m", "dbo_runtime", "adapter", str(PACKAGE), "--render", *words[1].split())
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("equal to the model's own forward: 26 ops, unsplit and cut at ")
    quoted = re.search(r"^```\n(equal to the model's own forward.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert quoted is not None
    assert done.stdout.startswith(quoted[1])
    table = re.search(r"^```\n(   #  compute .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert table is not None
    assert table[1] in done.stdout
    drawing = re.search(r"^```\n(simulated: .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert drawing is not None
    assert drawing[1] in done.stdout


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("attention", "'attention' is not OP=MS, such as attention=3.5."),
        ("attention=-1", "'attention=-1' must have a time of 0 or more ms."),
        ("attn=3", "no op is named 'attn'; there are attention, attn_add, "),
    ],
)
def test_durations_that_mean_nothing_are_one_clear_line(site: Path, words: str, said: str) -> None:
    done = run(site, "-m", "dbo_runtime", "adapter", str(PACKAGE), "--simulate", words)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.vllm
def test_steps_are_split_with_it_and_traced(site: Path, tmp_path: Path) -> None:
    on = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_TRACE": str(tmp_path / "traces")}
    done = run(site, str(PACKAGE / "generate.py"), VLLM_CPU_OMP_THREADS_BIND="0|1", DBO_TRACE_STEPS="2", **on)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "adapter=granite_adapter.GraniteAdapter" in done.stderr + done.stdout
    check_traces(tmp_path / "traces", ranks=2, steps=2)
