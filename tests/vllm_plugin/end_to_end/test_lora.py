"""Requests with LoRA adapters: split steps give each token the adapter that it has in unsplit ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import NANO, PROMPTS, assert_close
from tests.support.vllm.families import make_family
from tests.support.vllm.lora import make_lora

USED = (1, None, 2, 2, 1)  # adapter of each of PROMPTS
CUTS = [(96,), (96, 320), (17, 263), (300,)]  # where adapters change; inside requests
ARRIVE = (0, 0, 1, 2, 3)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def engine(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    model = make_family("LlamaForCausalLM", tmp_path_factory.mktemp("lora"))
    options = {"attention_backend": "CPU_ATTN", "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with engines.start(request.param, share_cores(), model, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The adapter of each prompt, as vLLM takes it."""
    from vllm.lora.request import LoRARequest

    known = {
        number: LoRARequest(f"lora-{number}", number, str(make_lora(tmp_path_factory.mktemp("adapter"), number)))
        for number in set(USED) - {None}
    }
    return [known.get(number) for number in USED]


def generate(engine: Engine, loras: list[Any], tokens: int, **settings: str) -> list[Answer]:
    engine.configure(**settings)
    return engine.generate(PROMPTS, tokens, ARRIVE if tokens > 1 else (), loras)


@pytest.mark.parametrize("tokens", [1, 6], ids=["prefill", "mixed"])
def test_each_token_has_its_adapter_wherever_the_batch_is_cut(engine: Engine, loras: list[Any], tokens: int) -> None:
    """Mixed steps hold decodes and prefills; some are decodes only."""
    unsplit = generate(engine, loras, tokens, DBO_MODE="off")
    without = generate(engine, [None] * len(PROMPTS), tokens, DBO_MODE="off")
    differs = [find_difference([one], [other]) > 0.1 for one, other in zip(unsplit, without, strict=True)]
    assert differs == [number is not None for number in USED], "adapters change too little to be compared"
    for cuts in CUTS if tokens == 1 else ((2,), (40,)):
        before = engine.count_split()
        engine.cut_at(*cuts)
        split = generate(engine, loras, tokens, DBO_MODE="always")
        engine.cut_by_settings()
        assert engine.count_split() > before
        assert_close(unsplit, split)


@pytest.mark.parametrize("count", ["2", "5"])
def test_each_token_has_its_adapter_in_nano_batches(engine: Engine, loras: list[Any], count: str) -> None:
    """Attention's projections take the adapters of all tokens, and each nano-batch those of its own."""
    unsplit = generate(engine, loras, 6, DBO_MODE="off")
    before = engine.statistics()[0]["nano"]
    answers = generate(engine, loras, 6, **NANO, DBO_MICRO_BATCHES=count)
    engine.configure(DBO_MODE="always")
    assert engine.statistics()[0]["nano"] > before
    assert_close(unsplit, answers)


def test_the_mapping_of_the_step_is_back_after_a_split_step(engine: Engine, loras: list[Any]) -> None:
    """vLLM updates the mapping only where it differs from that of the last step, as here it does not."""
    prompts, same = [PROMPTS[0], PROMPTS[0]], [loras[0], loras[2]]
    engine.configure(DBO_MODE="off")
    unsplit = engine.generate(prompts, 1, (), same)
    engine.cut_at(96)
    for mode in ("always", "off", "always"):
        engine.configure(DBO_MODE=mode)
        assert_close(unsplit, engine.generate(prompts, 1, (), same))
    engine.cut_by_settings()


def test_checked_steps_are_those_of_the_whole_batch(engine: Engine, loras: list[Any]) -> None:
    engine.cut_at(96)
    before = engine.count_split()
    generate(engine, loras, 4, DBO_MODE="always", DBO_CHECK="1")
    assert engine.count_split() > before
    engine.cut_by_settings()
    engine.configure(DBO_MODE="always", DBO_CHECK="0")
