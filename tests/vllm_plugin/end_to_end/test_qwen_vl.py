"""Models that see, end to end: the real vLLM, two ranks, encoder and language model split and unsplit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import assert_close, run_cut, run_unsplit
from tests.support.vllm.multimodal_families import make_omni
from tests.support.vllm.picture_requests import KINDS, OPTIONS, ask, count_encoder
from tests.support.vllm.vision_families import QWEN3, QWEN3_MOE, QWEN25, make_requests, make_vision_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=[QWEN25, QWEN3, QWEN3_MOE])
def multimodal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Iterator[Engine]:
    model = make_vision_family(request.param, tmp_path_factory.mktemp(request.param))
    with engines.start(2, share_cores(), model, **OPTIONS) as engine:
        yield engine


def test_split_steps_and_encoders_answer_as_unsplit_ones(multimodal: Engine) -> None:
    """One test a family, so that one engine serves all of it."""
    requests = make_requests(KINDS)
    before = multimodal.count_split(), count_encoder(multimodal)
    unsplit = ask(multimodal, requests, DBO_MODE="off")
    assert (multimodal.count_split(), count_encoder(multimodal)) == before
    for parts in ("2", "3"):
        steps, forwards = multimodal.count_split(), count_encoder(multimodal)
        assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always", DBO_MICRO_BATCHES=parts))
        assert multimodal.count_split() > steps
        assert count_encoder(multimodal) > forwards
    for cut in (1, 2, 3):
        multimodal.llm.collective_rpc("dbo_cut_images_at", args=([cut],))
        multimodal.cut_at(20 * cut)
        assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always"))
    multimodal.llm.collective_rpc("dbo_cut_images_at", args=(None,))
    multimodal.cut_by_settings()
    for check in ("1", "races"):
        assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always", DBO_CHECK=check))


def test_features_of_images_are_cut_with_the_tokens_of_qwen_omni(tmp_path: Path, engines: Engines) -> None:
    """Its first layers add them, as Qwen3-VL's do; the encoder is not split."""
    limits = {**OPTIONS["limit_mm_per_prompt"], "audio": 0}
    model = make_omni(tmp_path / "omni")
    with engines.start(2, share_cores(), model, **{**OPTIONS, "limit_mm_per_prompt": limits}) as engine:
        requests = make_requests(KINDS)
        unsplit = ask(engine, requests, DBO_MODE="off")
        before = engine.count_split()
        assert_close(unsplit, ask(engine, requests, DBO_MODE="always"))
        for cut in (20, 40, 60):
            engine.cut_at(cut)
            assert_close(unsplit, ask(engine, requests, DBO_MODE="always"))
        assert engine.count_split() > before


def test_qwen_omni_without_its_encoders_is_split(tmp_path: Path, engines: Engines) -> None:
    """With `language_model_only` there are no features of images; vLLM 0.23 has its buffers for them on no device."""
    model = make_omni(tmp_path / "omni")
    options = {**OPTIONS, "limit_mm_per_prompt": {}, "language_model_only": True}
    with engines.start(1, "nobind", model, **options) as engine:
        prompts = [make_prompt(40, 1), make_prompt(60, 2)]
        assert_close(run_unsplit(engine, prompts, 3), run_cut(engine, (50,), prompts, 3))
