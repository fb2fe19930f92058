"""MiniMax-M2 as it is served with vllm-ascend: quantized, with drafts, and with attention that one kernel prepares.

Tensor parallel ranks sum squares of queries and keys inside attention, which reads the step's own rotary tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ascend.drafts import assert_drafts_are_equal, leave_backend
from tests.support.ascend.engines import start
from tests.support.ascend.families import OPTIONS_OF
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.ascend.modelslim import DYNAMIC, quantize_model
from tests.support.ascend.sparse_attention import answer_without, share_rows
from tests.support.vllm.drafters import draft_by_head_of
from tests.support.vllm.engine import find_difference
from tests.support.vllm.families import make_family

MINIMAX = "MiniMaxM2ForCausalLM"
PROMPTS = [make_prompts(40, 30, 20, 10, 5, 50)]

pytestmark = pytest.mark.slow


def test_minimax_m2_in_int8_with_drafts_is_equal_to_the_bit(tmp_path: Path) -> None:
    source = make_family(MINIMAX, tmp_path / "source")
    model = quantize_model(source, tmp_path / "quantized", DYNAMIC)
    drafts = leave_backend(draft_by_head_of(3, tmp_path / "drafter", source))
    options = {**OPTIONS_OF[MINIMAX], **drafts, "quantization": "ascend", "enable_expert_parallel": True}
    for npus in start(1, model, tensor_parallel_size=2, **options):
        assert_drafts_are_equal(npus, accepts=False)


def test_where_micro_batches_read_the_first_rows_of_the_tables_answers_are_wrong(tmp_path: Path) -> None:
    for npus in start(1, make_family(MINIMAX, tmp_path), **OPTIONS_OF[MINIMAX]):
        ((unsplit, _),) = npus.run(answer, PROMPTS, 4)
        ((split, steps),) = npus.run(answer_without, share_rows, PROMPTS)
        assert steps[0]["split"] >= 4, steps
        assert find_difference(unsplit, split) > 0.0
