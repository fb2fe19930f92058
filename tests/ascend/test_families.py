"""Dense decoders inside vllm-ascend: split steps give what its own steps give, to the last bit.

They are not in the list of known models yet, so steps are split under DBO_CHECK=1.
"""

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


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_split_steps_are_equal_to_unsplit_ones(name: str, tmp_path: Path) -> None:
    """Prefills, a request cut inside, and decodes mixed with them; one engine a family."""
    for npus in start(1, make_family(name, tmp_path), {"DBO_CHECK": "1"}, tensor_parallel_size=2):
        assert_prefills_are_equal(npus, [[BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES])
        assert_chunks_are_equal(npus, 400, 128)
        assert_mixed_steps_are_equal(npus)
