"""The environments that doctor is tested in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.surroundings import Surroundings


@pytest.fixture
def core(tmp_path: Path) -> Surroundings:
    """Return an environment with nothing but the core."""
    return Surroundings(tmp_path / "environment")


@pytest.fixture
def serving(core: Surroundings) -> Surroundings:
    """Return an environment in which vLLM would serve on CPU, with overlap turned on."""
    core.add_torch()
    core.add_vllm()
    core.variables["VLLM_ASCEND_ENABLE_DBO"] = "1"
    return core
