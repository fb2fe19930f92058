"""Speculative decoding: the target's forward is split, the drafter's is not, and both answer as unsplit ones do."""

from __future__ import annotations

import pytest

from tests.vllm_plugin.engine import Engine
from tests.vllm_plugin.engines import Engines
from tests.vllm_plugin.speculation import assert_split_drafts_alike

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def ngram(engines: Engines) -> Engine:
    return engines.get(1, "nobind", speculative_config=NGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [None, (96,), (17,), (4,)])
def test_drafts_from_the_prompt_leave_split_steps_as_they_are(ngram: Engine, cuts: tuple[int, ...] | None) -> None:
    assert_split_drafts_alike(ngram, cuts)
