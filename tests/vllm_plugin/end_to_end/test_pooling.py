"""Embedding, classification and reward models: split steps pool what unsplit ones do, on the real vLLM.

Poolers and heads run after the forward that is split, or, in reward models, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import PoolerConfig

from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.pooling import OPTIONS, make_pooling, pool, pool_cut, pool_unsplit

CLOSE = 1e-5  # of what is pooled in fp32, where a request is cut inside, or ranks sum
LENGTHS = (40, 33, 57, 20)
BOUNDARIES = list(accumulate(LENGTHS))[:-1]
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
INSIDE = (60, 95)  # of the second request and of the third


class Served(NamedTuple):
    """A tiny model of *architecture*, whose config names *served_as*, and what its pooler is asked for."""

    architecture: str
    served_as: str
    tasks: tuple[str, ...]
    pooling: str | None = None
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @property
    def is_causal(self) -> bool:
        return bool(self.config.get("is_causal", True))


EMBED = ("embed", "token_embed")
CLASSIFY = ("classify", "token_classify")
ENCODER = {"is_causal": False}  # as gte-Qwen2 is served: its attention layers have no KV cache
LABELS = {"id2label": {"0": "a", "1": "b", "2": "c"}}

SERVED = {
    "embedding, last token": Served("Qwen3ForCausalLM", "Qwen3ForCausalLM", EMBED, "LAST"),
    "embedding, mean": Served("Qwen2ForCausalLM", "Qwen2Model", EMBED, "MEAN"),
    "embedding, first token": Served("LlamaForCausalLM", "LlamaModel", EMBED, "CLS"),
    "encoder, Llama": Served("LlamaForCausalLM", "LlamaModel", EMBED, "MEAN", ENCODER),
    "encoder, Qwen2": Served("Qwen2ForCausalLM", "Qwen2ForCausalLM", EMBED, "LAST", ENCODER),
    "encoder, Qwen3": Served("Qwen3ForCausalLM", "Qwen3Model", EMBED, "CLS", ENCODER),
    "classifier": Served("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", CLASSIFY, None, LABELS),
    "reward": Served("Qwen2ForCausalLM", "Qwen2ForRewardModel", ("token_classify",)),
}
TWO_RANKS = ("encoder, Qwen3", "reward", "embedding, last token", "classifier")


def mark_slow(names: Sequence[str], usual: Sequence[str]) -> list[Any]:
    """Return the names as parameters, of which all but the *usual* ones are slow tests."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in names]


def start(engines: Engines, stack: ExitStack, name: str, ranks: int, folder: Path, **options: Any) -> Engine:
    served = SERVED[name]
    model = make_pooling(served.architecture, folder, served.served_as, **served.config)
    pooler = {} if served.pooling is None else {"pooler_config": PoolerConfig(pooling_type=served.pooling)}
    cores = "nobind" if ranks == 1 else share_cores()
    return stack.enter_context(engines.start(ranks, cores, model, **{**OPTIONS, **pooler, **options}))


def find_difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    assert [each.shape for each in one] == [each.shape for each in other]
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def cut_and_count(engine: Engine, cuts: Sequence[int], task: str) -> tuple[list[torch.Tensor], int]:
    before = engine.count_split()
    return pool_cut(engine, cuts, PROMPTS, task), engine.count_split() - before


@pytest.fixture(params=mark_slow([*SERVED], ("encoder, Qwen3", "classifier", "reward")))
def one(request: pytest.FixtureRequest, tmp_path: Path, engines: Engines) -> Iterator[tuple[Engine, Served]]:
    with ExitStack() as stack:
        yield start(engines, stack, request.param, 1, tmp_path), SERVED[request.param]


@pytest.fixture(params=mark_slow(TWO_RANKS, TWO_RANKS[:2]))
def two(request: pytest.FixtureRequest, tmp_path: Path, engines: Engines) -> Iterator[tuple[Engine, Served]]:
    with ExitStack() as stack:
        yield start(engines, stack, request.param, 2, tmp_path), SERVED[request.param]


@pytest.mark.slow
def test_what_is_pooled_between_requests_is_equal_to_the_bit_and_inside_within_rounding(
    one: tuple[Engine, Served],
) -> None:
    engine, served = one
    for task in served.tasks:
        unsplit = pool_unsplit(engine, PROMPTS, task)
        assert len({tuple(each.flatten().tolist()) for each in unsplit}) == len(PROMPTS), "nothing could differ"
        for cuts in (BOUNDARIES[:1], BOUNDARIES[1:]):
            split, steps = cut_and_count(engine, cuts, task)
            assert steps == 1
            assert find_difference(unsplit, split) == 0.0
        split, steps = cut_and_count(engine, INSIDE, task)
        assert steps == served.is_causal, "tokens that attend to later ones must stay with them"
        assert find_difference(unsplit, split) <= CLOSE
    engine.configure(DBO_CHECK="races")
    assert find_difference(unsplit, pool(engine, PROMPTS, served.tasks[-1])) <= CLOSE


@pytest.mark.slow
def test_two_ranks_pool_split_as_unsplit(two: tuple[Engine, Served]) -> None:
    engine, served = two
    for task in served.tasks:
        unsplit = pool_unsplit(engine, PROMPTS, task)
        for cuts in (BOUNDARIES[1:2], BOUNDARIES, *([INSIDE] if served.is_causal else [])):
            split, steps = cut_and_count(engine, cuts, task)
            assert steps == 1
            assert find_difference(unsplit, split) <= CLOSE
    engine.configure(DBO_CHECK="1")
    before = engine.count_split()
    assert find_difference(unsplit, pool(engine, PROMPTS, served.tasks[-1])) <= CLOSE
    assert engine.count_split() > before


@pytest.mark.slow
def test_prompts_in_chunks_and_on_cached_prefixes_pool_alike(tmp_path: Path, engines: Engines) -> None:
    prompts = [make_prompt(200, 1), make_prompt(150, 2), [*make_prompt(200, 1)[:160], *make_prompt(30, 5)]]
    with ExitStack() as stack:
        options = {"enable_prefix_caching": True, "max_num_batched_tokens": 96, "max_num_seqs": 8}
        engine = start(engines, stack, "embedding, last token", 1, tmp_path, **options)
        unsplit = pool_unsplit(engine, prompts, "embed")
        for cuts in ((31,), (20, 60)):
            engine.llm.reset_prefix_cache()
            before = engine.count_split()
            split = pool_cut(engine, cuts, prompts, "embed")
            assert engine.count_split() > before + 3
            assert find_difference(unsplit, split) <= CLOSE
            assert find_difference(unsplit, pool_cut(engine, cuts, prompts, "embed")) <= CLOSE  # on cached prefixes
