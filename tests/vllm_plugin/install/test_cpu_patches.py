"""Upstream bugs of vLLM's CPU build: each is still there, and gone once patched.

If a test here fails because vLLM has closed a gap, remove it from `dbo_runtime.vllm_plugin.install.cpu_patches`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import vllm

from dbo_runtime.vllm_plugin.install import cpu_patches
from dbo_runtime.vllm_plugin.install.cpu_patches import UPSTREAM_BUGS, UpstreamBug

if TYPE_CHECKING:
    from tests.support.vllm.engines import Engines

VERSION = vllm.__version__.partition("+")[0]


@pytest.mark.skipif(
    any(VERSION not in bug.versions for bug in UPSTREAM_BUGS), reason="bugs of a kernel that this vLLM does not have"
)
def test_each_bug_is_there_and_is_gone_once_patched(engines: Engines) -> None:
    from tests.support.vllm.upstream_bugs import check_each_bug

    engines.run(1, check_each_bug)


def test_the_bugs_that_are_found_are_those_that_were_seen_in_this_version(engines: Engines) -> None:
    from tests.support.vllm.upstream_bugs import check_this_version

    engines.run(1, check_this_version, VERSION)


def test_a_bug_whose_test_or_patch_fails_is_named_and_the_others_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of vLLM may have other names."""
    patched: list[str] = []

    def fail() -> bool:
        raise AttributeError("no attribute 'CPUModelRunner'")

    bugs = (
        UpstreamBug("cannot be told", (), fail, lambda: patched.append("first")),
        UpstreamBug("cannot be patched", (), lambda: True, fail),  # type: ignore[arg-type]
        UpstreamBug("is there", (), lambda: True, lambda: patched.append("third")),
        UpstreamBug("is not", (), lambda: False, fail),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(cpu_patches, "UPSTREAM_BUGS", bugs)
    found, failed = cpu_patches.apply_patches()
    assert (found, patched, [*failed]) == (["is there"], ["third"], ["cannot be told", "cannot be patched"])
    assert all("no attribute 'CPUModelRunner'" in reason for reason in failed.values())
