"""Requests with pictures, asked at once and one after the other."""

from __future__ import annotations

from typing import Any

from tests.support.vllm.engine import Answer, Engine

KINDS = (1, 3, 0, 2, 1)  # pictures of each request: text only and mixed, too
OPTIONS = {
    "attention_backend": "CPU_ATTN",
    "enable_prefix_caching": False,
    "limit_mm_per_prompt": {"image": 3, "video": 0},
    "mm_processor_cache_gb": 0,
    "max_model_len": 512,
}


def count_encoder(engine: Engine) -> int:
    """Return how many forwards of the encoder were split so far; all ranks must agree."""
    counts = {rank["split"] for rank in engine.llm.collective_rpc("dbo_encoder_statistics")}
    assert len(counts) == 1
    return int(counts.pop())


def ask(engine: Engine, requests: list[dict[str, Any]], **settings: Any) -> list[Answer]:
    """Ask at once, so that decodes follow steps with images at their front, and again while others are answered."""
    engine.configure(**settings)
    try:
        return engine.generate(requests, tokens=3) + engine.generate(requests, tokens=4, arrive=(0, 0, 0, 1, 2))
    finally:
        engine.configure(DBO_MODE="always")
