"""Versions of vLLM: which are known, and which are installed."""

from __future__ import annotations

from importlib.metadata import version

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.known import KNOWN_VLLM_VERSIONS


def check_version() -> Decline | None:
    """Return why this vLLM is not served split, or None if its version is known."""
    actual = _get_version()
    if actual.startswith(KNOWN_VLLM_VERSIONS):
        return None
    known = ", ".join(f"{prefix}x" for prefix in KNOWN_VLLM_VERSIONS)
    return Decline("this version of vLLM is not known to dbo_runtime", f"{actual}; known: {known}")


def describe_versions() -> str:
    """Return the versions that ranks must share to decide alike."""
    return f"dbo_runtime {version('dbo-runtime')}, vllm {_get_version()}"


def describe_packages() -> dict[str, str]:
    """Return the versions that costs are measured with."""
    return {name: version(name) for name in ("dbo-runtime", "torch")} | {"vllm": _get_version()}


def _get_version() -> str:
    import vllm

    return str(vllm.__version__)
