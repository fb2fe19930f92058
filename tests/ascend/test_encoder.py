"""Vision encoders inside vllm-ascend with host sequence lengths, and split: its own answers, and no copy in each block.

The stand-in computes each patch by itself, so equal means equal to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from examples.tiny_pictures import held_out
from tests.support.ascend.encoder_jobs import Seen, count_blocks, see
from tests.support.ascend.engines import start
from tests.support.vllm.vision_families import QWEN3, QWEN25, TINY, make_vision_family

QUESTIONS = held_out(12)  # with no picture, one, two and three
TOKENS = 16
ARRIVE = (0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4)
# A forked worker makes torch's thread pool anew, and now and then finds none: streams of the stand-in ask for it, too.
SETTINGS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
OPTIONS = {"limit_mm_per_prompt": {"image": 3, "video": 0}, "mm_processor_cache_gb": 0}


def make_requests() -> list[dict[str, Any]]:
    """Return the questions in the words of vLLM."""
    return [
        {"prompt": each.prompt, **({"multi_modal_data": {"image": list(each.pictures)}} if each.pictures else {})}
        for each in QUESTIONS
    ]


def record(model: Path, workers: int, overlap: str, modes: tuple[str, ...]) -> tuple[int, list[Seen]]:
    """Return an encoder's blocks, and what an engine with overlap or without saw in each of these modes."""
    found = []
    settings = {"VLLM_ASCEND_ENABLE_DBO": overlap, **SETTINGS}
    for engines in start(1, model, settings, tensor_parallel_size=workers, **OPTIONS):
        (blocks,) = engines.run(count_blocks)
        for mode in modes:
            found += engines.run(see, make_requests(), TOKENS, ARRIVE, {"DBO_MODE": mode})
    return blocks, found


def count_copies(seen: Seen) -> set[int]:
    """Return how many copies the host waited for in forwards of the encoder: each number that there was."""
    assert all(len(forwards) >= 4 for forwards in seen.forwards)
    return {forward.copies for forwards in seen.forwards for forward in forwards}


def count_right(seen: Seen) -> int:
    """Return how many answers are right, as far as they go."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    found = [tokenizer.decode(answer.tokens) for answer in seen.answers]
    return sum(text.startswith(each.answer[:TOKENS]) for text, each in zip(found, QUESTIONS, strict=True))


def check_equal(one: Seen, other: Seen) -> None:
    """Compare embeddings of all forwards on all workers, to the last bit, and the answers."""
    assert [answer.tokens for answer in one.answers] == [answer.tokens for answer in other.answers]
    for forwards, others in zip(one.forwards, other.forwards, strict=True):
        pairs = zip(forwards, others, strict=True)
        assert all(torch.equal(a.embeddings, b.embeddings) for a, b in pairs)


@pytest.mark.parametrize(
    ("family", "workers"), [(QWEN25, 1), (QWEN3, 1), pytest.param(QWEN25, 2, marks=pytest.mark.slow)]
)
def test_no_block_copies_lengths_and_answers_are_vllm_ascends(family: str, workers: int, tmp_path: Path) -> None:
    """Before: a copy from the device, which the host waits for, in each block of each forward. After: none."""
    trained = family == QWEN25
    model = TINY if trained else make_vision_family(family, tmp_path)
    blocks, (own,) = record(model, workers, "0", ("off",))
    _, (planned, split) = record(model, workers, "1", ("off", "always"))
    assert count_copies(own) == {blocks}
    assert count_copies(planned) == count_copies(split) == {0}
    assert (own.split, planned.split) == ([0] * workers, [0] * workers)
    assert all(forwards >= 3 for forwards in split.split)  # of four: one has a single picture
    assert not trained or count_right(own) >= 11
    check_equal(own, planned)
    check_equal(own, split)
