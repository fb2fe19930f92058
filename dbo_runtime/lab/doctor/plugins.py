"""Check that vLLM loads this package, and that no variable prevents it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from dbo_runtime.config import ENABLE
from dbo_runtime.lab.doctor.finding import Finding

GROUP, PLATFORM_GROUP = "vllm.general_plugins", "vllm.platform_plugins"
NAME = "dbo_runtime"
FILTER_VARIABLE = "VLLM_PLUGINS"


def check_plugin(environ: Mapping[str, str]) -> Finding:
    """Check that vLLM would load the plugin: it is registered, and `VLLM_PLUGINS` does not exclude it.

    vLLM splits `VLLM_PLUGINS` at commas and compares names without stripping spaces.
    """
    found = [entry.value for entry in entry_points(group=GROUP) if entry.name == NAME]
    if not found:
        remedy = "install dbo_runtime with pip in the environment that runs vLLM"
        return Finding("plugin", "fail", f"no entry point {NAME} in {GROUP}", remedy)
    if FILTER_VARIABLE not in environ:
        return Finding("plugin", "ok", f"{found[0]}, which vLLM loads")
    allowed = environ[FILTER_VARIABLE].split(",")
    if NAME not in allowed:
        names = ",".join([*filter(None, map(str.strip, allowed)), NAME])
        return Finding(
            "plugin",
            "fail",
            f"{FILTER_VARIABLE}={environ[FILTER_VARIABLE]!r} excludes it",
            f"unset {FILTER_VARIABLE}, or export {FILTER_VARIABLE}={names}",
        )
    excluded = sorted(entry.name for entry in entry_points(group=PLATFORM_GROUP) if entry.name not in allowed)
    if excluded:
        names = ", ".join(excluded)
        note = f"loaded; but {FILTER_VARIABLE}={environ[FILTER_VARIABLE]!r} excludes the platform {names}"
        return Finding("plugin", "warn", note, f"unset {FILTER_VARIABLE}, or add {names}")
    return Finding("plugin", "ok", f"{found[0]}, which {FILTER_VARIABLE} lists")


def check_clashes(environ: Mapping[str, str]) -> Finding:
    """Check that no variables of other overlap implementations are set. They have no effect here."""
    others = sorted(name for name in environ if name.startswith("VLLM_") and "DBO" in name and name != ENABLE)
    if others:
        what = f"{', '.join(others)}: of vLLM's or vllm-ascend's own micro-batching, which this replaces"
        return Finding("other switches", "warn", what, f"unset {' '.join(others)}, and do not pass --enable-dbo")
    return Finding("other switches", "ok", "none are set; do not pass --enable-dbo either")
