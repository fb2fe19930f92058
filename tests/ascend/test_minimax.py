"""MiniMax-M3 inside vllm-ascend: split steps give what its own steps give, bit for bit.

Of up to four blocks of keys, its indexer chooses two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ascend.conftest import start
from tests.ascend.minimax import TEXT_ONLY, draft_by_eagle3, make_minimax
from tests.ascend.test_flashcomm import FLASHCOMM, TWO
from tests.ascend.test_sparse_attention import assert_steps_are_equal, share_out
from tests.ascend.test_speculative import answer_with_drafts
from tests.vllm_plugin.engine import find_difference


@pytest.mark.slow
def test_split_steps_are_equal_to_unsplit_ones(tmp_path: Path) -> None:
    for npus in start(1, make_minimax(tmp_path), **share_out(2), **TEXT_ONLY):
        assert_steps_are_equal(npus)


@pytest.mark.slow
def test_drafts_are_verified_in_chunks_of_tokens(tmp_path: Path) -> None:
    """FlashComm v1, in which the dense MLP, too, gathers a chunk, and an Eagle3 head that reads gathered tokens."""
    drafting = draft_by_eagle3(3, tmp_path / "drafter")
    for npus in start(1, make_minimax(tmp_path / "model"), **TWO, **FLASHCOMM, **drafting, **TEXT_ONLY):
        ((unsplit, drafts, none),) = npus.run(answer_with_drafts, False)
        ((split, split_drafts, steps),) = npus.run(answer_with_drafts, True)
        assert (none, steps >= 10) == (0, True)
        assert drafts["drafted"] > 0
        assert split_drafts == drafts
        assert find_difference(unsplit, split) == 0.0
