"""Whether vLLM finds this package, and whether variables stand in its way."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from dbo_runtime.config import ENABLE
from dbo_runtime.doctor.finding import Finding

GROUP, PLATFORMS = "vllm.general_plugins", "vllm.platform_plugins"
NAME = "dbo_runtime"
FILTER = "VLLM_PLUGINS"


def check_plugin(environ: Mapping[str, str]) -> Finding:
    """Tell whether vLLM would load the plugin: it is registered, and not left out by `VLLM_PLUGINS`.

    vLLM compares names as they stand between commas, spaces included.
    """
    found = [entry.value for entry in entry_points(group=GROUP) if entry.name == NAME]
    if not found:
        remedy = "install dbo_runtime with pip in the environment that runs vLLM"
        return Finding("plugin", "fail", f"no entry point {NAME} in {GROUP}", remedy)
    if FILTER not in environ:
        return Finding("plugin", "ok", f"{found[0]}, which vLLM loads")
    allowed = environ[FILTER].split(",")
    if NAME not in allowed:
        names = ",".join([*filter(None, map(str.strip, allowed)), NAME])
        return Finding(
            "plugin",
            "fail",
            f"{FILTER}={environ[FILTER]!r} leaves it out",
            f"unset {FILTER}, or export {FILTER}={names}",
        )
    left_out = sorted(entry.name for entry in entry_points(group=PLATFORMS) if entry.name not in allowed)
    if left_out:
        names = ", ".join(left_out)
        found_too = f"loaded; but {FILTER}={environ[FILTER]!r} leaves out the platform {names}"
        return Finding("plugin", "warn", found_too, f"unset {FILTER}, or add {names}")
    return Finding("plugin", "ok", f"{found[0]}, which {FILTER} lists")


def check_clashes(environ: Mapping[str, str]) -> Finding:
    """Tell of variables of other attempts at overlap: set by somebody who expects them to do something."""
    others = sorted(name for name in environ if name.startswith("VLLM_") and "DBO" in name and name != ENABLE)
    if others:
        what = f"{', '.join(others)}: of vLLM's or vllm-ascend's own micro-batching, which this replaces"
        return Finding("other switches", "warn", what, f"unset {' '.join(others)}, and leave out --enable-dbo")
    return Finding("other switches", "ok", "none are set; leave out --enable-dbo, too")
