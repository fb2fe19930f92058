"""Models that vLLM's kernels for CPU take in bfloat16 only: what is cut anew is rounded anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm.engine import make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import MIXED, assert_close_up_to_ties, run_cut, run_in_nano_batches, run_unsplit
from tests.support.vllm.families import ONLY_BFLOAT16, make_family

PROMPTS = [make_prompt(length, seed) for seed, length in enumerate((96, 64, 160, 128, 80))]
CUTS = [(96,), (160, 320), (17,), (132, 264, 396)]
OPTIONS = {"dtype": "bfloat16", "attention_backend": "CPU_ATTN", "enable_prefix_caching": False}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_BFLOAT16)
def test_split_steps_answer_as_unsplit_ones(name: str, engines: Engines, tmp_path: Path) -> None:
    """Windows are of 64 tokens, so that cut requests read keys on both sides of a cut, and leave others out."""
    with engines.start(2, share_cores(), make_family(name, tmp_path), **OPTIONS) as engine:
        unsplit = run_unsplit(engine, PROMPTS)
        for cuts in CUTS:
            assert_close_up_to_ties(unsplit, run_cut(engine, cuts, PROMPTS))
        mixed = run_unsplit(engine, PROMPTS, 6, MIXED)
        assert_close_up_to_ties(mixed, run_cut(engine, (2, 162), PROMPTS, 6, MIXED))
        assert_close_up_to_ties(mixed, run_in_nano_batches(engine, PROMPTS, 6, MIXED, DBO_MICRO_BATCHES="3"))
