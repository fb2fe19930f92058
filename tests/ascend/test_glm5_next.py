"""GLM-5.3-Flash inside vllm-ascend: steps in nano-batches give what its own steps give, bit for bit.

Of up to 128 pools, each of 4 keys, its indexer chooses eight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.equivalence import assert_nano_batches_are_equal
from tests.support.ascend.glm5_next import TEXT_ONLY, make_glm5_next
from tests.support.ascend.jobs import answer, answer_in_nano_batches, make_prompts
from tests.support.ascend.sparse_attention import share_out
from tests.support.vllm.engine import find_difference
from tests.support.vllm.ranks import Ranks

AUTO = {"DBO_SPLIT": "auto"}
CHUNKS = {"additional_config": {"enable_mlapo": False, "enable_flashcomm1": True}}


def assert_mixed_steps_are_equal(npus: Ranks) -> None:
    """Compare steps of decodes, chunks and prefills in nano-batches with unsplit ones."""
    prompts, arrive = [make_prompts(30, 7, 500, 90, 11, 200)], (0, 0, 1, 2, 3, 5)
    ((unsplit, _),) = npus.run(answer, prompts, 8, None, arrive)
    ((nano, steps),) = npus.run(answer_in_nano_batches, prompts, 8, 2, "0", arrive)
    assert min(steps) >= 10, steps
    assert find_difference(unsplit, nano) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "options"), [(1, {}), (2, {}), (2, CHUNKS)], ids=["1", "2", "2-flashcomm1"])
def test_nano_batches_are_equal_to_unsplit_steps(workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    for npus in start(1, make_glm5_next(tmp_path), AUTO, **share_out(workers), **TEXT_ONLY, **options):
        assert_nano_batches_are_equal(npus)
        assert_mixed_steps_are_equal(npus)
