"""Dense decoders inside vllm-ascend: split steps give what its own steps give, to the last bit.

They are not in the list of known models yet, so steps are split under DBO_CHECK=1.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.jobs import answer, answer_in_chunks, cut_at_boundaries, generate, make_prompts
from tests.vllm_plugin.engine import find_difference
from tests.vllm_plugin.families import make_family

LENGTHS = (5, 40, 130, 3, 64)
PROMPTS = make_prompts(*LENGTHS)
BOUNDARIES = list(accumulate(LENGTHS))[:-1]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_split_steps_are_equal_to_unsplit_ones(name: str, tmp_path: Path) -> None:
    """Prefills, requests cut inside, and decodes mixed with them; one engine a family."""
    model = make_family(name, tmp_path)
    for npus in start(1, model, {"DBO_CHECK": "1"}, tensor_parallel_size=2):
        ((unsplit, _),) = npus.run(answer, [PROMPTS])
        for cuts in ([BOUNDARIES[0]], [BOUNDARIES[2]], BOUNDARIES):
            ((split, counts),) = npus.run(answer, [PROMPTS], 1, cuts)
            assert [count["split"] for count in counts] == [1, 1], counts
            assert find_difference(unsplit, split) == 0.0, cuts
        prompts = make_prompts(400)
        (chunked,) = npus.run(answer_in_chunks, [prompts], 128)
        ((split, counts),) = npus.run(answer, [prompts], 1, [128, 256, 384])
        assert [count["split"] for count in counts] == [1, 1], counts
        assert find_difference(chunked, split) == 0.0
        mixed, arrive = [make_prompts(30, 7, 500, 90, 11, 200)], (0, 0, 1, 2, 3, 5)
        ((unsplit, _),) = npus.run(answer, mixed, 8, None, arrive)
        npus.run(cut_at_boundaries)
        ((split, counts),) = npus.run(generate, mixed, 8, arrive)
        assert all(count["split"] >= 10 for count in counts), counts
        assert find_difference(unsplit, split) == 0.0
