"""The versions that are installed, and what is done with this vLLM."""

from __future__ import annotations

from importlib.metadata import version

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.api.window import Standing, classify_version, describe_tested, describe_window


def check_version() -> Decline | None:
    """Return why this vLLM is not served split, or None if its version is in the window."""
    actual = get_version()
    if classify_version(actual) is not Standing.OUTSIDE:
        return None
    supported = f"{actual}; supported: {describe_window()}; tested: {describe_tested()}"
    return Decline("this version of vLLM is not supported by dbo_runtime", supported)


def is_tested() -> bool:
    """Return whether the tests have passed on this version of vLLM; if not, first steps are compared."""
    return classify_version(get_version()) is Standing.TESTED


def describe_versions() -> str:
    """Return the versions that ranks must share to decide alike."""
    return f"dbo_runtime {version('dbo-runtime')}, vllm {get_version()}"


def describe_packages() -> dict[str, str]:
    """Return the versions that costs are measured with."""
    return {name: version(name) for name in ("dbo-runtime", "torch")} | {"vllm": get_version()}


def get_version() -> str:
    """Return the version of vLLM."""
    import vllm

    return str(vllm.__version__)
