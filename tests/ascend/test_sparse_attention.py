"""Sparse attention (DeepSeek V3.2, GLM-5) inside vllm-ascend: split steps give what its own steps give, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.test_equivalence import (
    BOUNDARIES,
    assert_chunks_are_equal,
    assert_mixed_steps_are_equal,
    assert_prefills_are_equal,
)
from tests.vllm_plugin.families import make_family

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
CUTS = [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES]


@pytest.mark.parametrize(
    ("name", "workers"), [(V32, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(V32, 2)])]
)
def test_split_steps_are_equal_to_unsplit_ones(name: str, workers: int, tmp_path: Path) -> None:
    """Prefills, a request cut inside, and decodes mixed with them; two workers share out the experts."""
    model = make_family(name, tmp_path / "model")
    for npus in start(1, model, tensor_parallel_size=workers, enable_expert_parallel=workers > 1):
        assert_prefills_are_equal(npus, CUTS)
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)
