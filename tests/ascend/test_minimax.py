"""MiniMax-M3 inside vllm-ascend: split steps give what its own steps give, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.minimax import TEXT_ONLY, make_minimax
from tests.ascend.test_sparse_attention import assert_steps_are_equal, share_out


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_split_steps_are_equal_to_unsplit_ones(workers: int, tmp_path: Path) -> None:
    for npus in start(1, make_minimax(tmp_path), **share_out(workers), **TEXT_ONLY):
        assert_steps_are_equal(npus)
