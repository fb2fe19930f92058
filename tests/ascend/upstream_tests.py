"""Run vllm-ascend's own unit tests with dual-batch overlap switched on and off, and tell which results differ.

    make test-upstream

takes them from vllm-ascend's source package. They replace torch_npu by mocks of their own, so no stand-in is loaded:
what this shows is that the hooks of this package leave vllm-ascend's classes as its tests expect them. Both runs load
vLLM's general plugins; only `VLLM_ASCEND_ENABLE_DBO` differs. It takes about an hour, writes the counts to
docs/ascend.md and ends with 1 if a test fails with overlap only.

    python -m tests.ascend.upstream_tests tests/ut/core

runs those of one folder and writes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from dbo_runtime.config import ENABLE
from tests.standin.cann import cann
from tests.standin.cann.build import build
from tests.support.page import ROOT, make_table, tell_section
from tools.set_up import ASCEND, ASCEND_BUILD

PLUGIN = "dbo_load_plugins"
LOAD_PLUGINS = f"""
import os
import sys

def pytest_collection(session):  # after their conftest.py, which puts its mocks where torch_npu would be
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    installed = "dbo_runtime.vllm_plugin.install.worker_hooks" in sys.modules
    assert installed == (os.environ["{ENABLE}"] == "1"), "overlap is not what this run is about"
"""
BAD = ("failure", "error")
ALL = "tests/ut"
PASSED, SKIPPED, IN_BOTH = "passed", "skipped", "failed without overlap, too"
ONLY_WITHOUT, ONLY_WITH = "failed without overlap only", "failed with overlap only"
REPEATS = 2  # of files with a test that fails with overlap only, both ways: one that fails now and then is not ours


def fetch_tests(folder: Path) -> Path:
    """Return a folder in which `tests/ut` are vllm-ascend's unit tests, from its source package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-binary", "vllm-ascend", "--dest", str(folder), ASCEND]
    subprocess.run(command, check=True, env={**os.environ, **ASCEND_BUILD})
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    (tests,) = folder.glob("*/tests/ut")
    # Away from the package, which would be imported in place of the one that is installed.
    root = folder / "root"
    root.mkdir()
    tests.parent.rename(root / "tests")
    return root


def run_tests(root: Path, is_enabled: bool, paths: Iterable[str]) -> dict[str, str]:
    """Return the outcome of each test under these *paths* of *root*: passed, failure, error or skipped."""
    (root / f"{PLUGIN}.py").write_text(LOAD_PLUGINS, encoding="utf-8")
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, "-n", "2"]
    command += ["--dist", "loadfile", "--continue-on-collection-errors", f"--junit-xml={report}", *paths]
    environment = {**os.environ, "PYTHONPATH": str(root), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment[ENABLE] = str(int(is_enabled))
    subprocess.run(command, cwd=root, env=environment, check=False, stdout=sys.stderr)
    return read_report(report)


def read_report(report: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit report, by file and name."""
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {*BAD, "skipped"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = min(kinds, default="passed")
    return outcomes


def compare(off: Mapping[str, str], on: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the tests by what became of them with overlap switched off, and on.

    A test that a run did not reach failed in it: its file could not be imported, or its process ended.
    """
    groups: dict[str, list[str]] = {what: [] for what in (PASSED, SKIPPED, IN_BOTH, ONLY_WITHOUT, ONLY_WITH)}
    for name in sorted(off.keys() | on.keys()):
        failed = tuple(outcomes.get(name, "error") in BAD for outcomes in (off, on))
        kinds = {(True, True): IN_BOTH, (True, False): ONLY_WITHOUT, (False, True): ONLY_WITH}
        groups[kinds.get(failed, SKIPPED if on.get(name) == "skipped" else PASSED)].append(name)
    return groups


def find_files(names: Iterable[str], root: Path) -> list[str]:
    """Return the files under *root* that have these tests."""
    modules = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.rglob("test_*.py")}
    files = {
        str(path.relative_to(root))
        for module, path in modules.items()
        for name in names
        if f"{name.replace('::', '.').lstrip('.')}.".startswith(f"{module}.")
    }
    return sorted(files)


def main(paths: Sequence[str]) -> int:
    """Run them, print what differs, and write the page if all were run."""
    with TemporaryDirectory() as folder:
        root = fetch_tests(Path(folder))
        off, on = (run_tests(root, is_enabled, paths or [ALL]) for is_enabled in (False, True))
        for _ in range(REPEATS):
            files = find_files(compare(off, on)[ONLY_WITH], root)
            if files:
                again = run_tests(root, False, files)
                off |= {name: outcome for name, outcome in again.items() if off.get(name) not in BAD}
                on |= run_tests(root, True, files)
    groups = compare(off, on)
    for name in groups[ONLY_WITH]:
        sys.stderr.write(f"{ONLY_WITH}: {name}\n")
    folders = Counter(name.lstrip(":").split(".")[2].partition("::")[0] for name in groups[IN_BOTH])
    lines = [
        *make_table(["vllm-ascend's own unit tests", "tests"], [[what, len(names)] for what, names in groups.items()]),
        "",
        f"{IN_BOTH}, by folder: {', '.join(f'{name} {count}' for name, count in folders.most_common())}.",
    ]
    build()
    cann.load()  # for this process, which tells torch's version
    tell_section(not paths, "upstream", "make test-upstream", lines, ROOT / "docs" / "ascend.md")
    return 1 if groups[ONLY_WITH] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
