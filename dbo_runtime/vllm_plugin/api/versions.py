"""The installed versions, and how this vLLM version is treated."""

from __future__ import annotations

from importlib.metadata import version

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.window import Standing, classify_version, describe_tested, describe_window


def check_version() -> Decline | None:
    """Return why steps of this vLLM are not split, or None if its version is in the window."""
    actual = get_version()
    if classify_version(actual) is not Standing.OUTSIDE:
        return None
    supported = f"{actual}; supported: {describe_window()}; tested: {describe_tested()}"
    return Decline("this version of vLLM is not supported by dbo_runtime", supported)


def is_tested() -> bool:
    """Return whether the tests passed on this vLLM version. If not, first steps are compared."""
    return classify_version(get_version()) is Standing.TESTED


def describe_versions() -> str:
    """Return the versions that must be equal on all ranks so that they decide alike."""
    return f"dbo_runtime {version('dbo-runtime')}, vllm {get_version()}"


def describe_packages() -> dict[str, str]:
    """Return the package versions that costs depend on."""
    return {name: version(name) for name in ("dbo-runtime", "torch")} | {"vllm": get_version()}


def get_version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(vllm.__version__)
