"""MiniMax-M3 inside vllm-ascend: split steps give what its own steps give, bit for bit.

Of up to four blocks of keys, its indexer chooses two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.minimax import TEXT_ONLY, make_minimax
from tests.ascend.test_sparse_attention import assert_steps_are_equal, share_out


@pytest.mark.slow
def test_split_steps_are_equal_to_unsplit_ones(tmp_path: Path) -> None:
    for npus in start(1, make_minimax(tmp_path), **share_out(2), **TEXT_ONLY):
        assert_steps_are_equal(npus)
