"""Vision encoders inside vllm-ascend with the host plan, and split: its own answers, and no copy in each block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from examples.tiny_pictures import held_out
from tests.ascend.conftest import start
from tests.ascend.encoder_jobs import Seen, count_blocks, see
from tests.vllm.vision_families import QWEN3, QWEN25, TINY, make_vision_family

QUESTIONS = held_out(12)  # with no picture, one, two and three
TOKENS = 16
ARRIVE = (0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4)
OPTIONS = {"limit_mm_per_prompt": {"image": 3, "video": 0}, "mm_processor_cache_gb": 0}


def make_requests() -> list[dict[str, Any]]:
    return [
        {"prompt": each.prompt, **({"multi_modal_data": {"image": list(each.pictures)}} if each.pictures else {})}
        for each in QUESTIONS
    ]


def watch(model: Path, overlap: str, modes: tuple[str, ...], **options: Any) -> tuple[int, list[Seen]]:
    """Return an encoder's blocks, and what an engine with overlap or without saw in each of these modes."""
    found = []
    for engines in start(1, model, {"VLLM_ASCEND_ENABLE_DBO": overlap}, **OPTIONS, **options):
        (blocks,) = engines.run(count_blocks)
        for mode in modes:
            (seen,) = engines.run(see, make_requests(), TOKENS, ARRIVE, {"DBO_MODE": mode})
            found.append(seen)
    return blocks, found
