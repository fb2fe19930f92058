"""What is kept of the recording of adapters on the classes of other versions of vLLM."""

from __future__ import annotations

import json

import pytest

from dbo_runtime.vllm_plugin.api.known import VLLM_WINDOW
from tests.compat.recorded import ABSENT, DECLINED, FAILED, NOT_MADE, OUTCOMES, RESULTS, list_architectures

KEPT = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_first_and_the_last_version_of_the_window_were_recorded() -> None:
    minors = {tuple(map(int, version.split(".")))[:2] for version in KEPT}
    first, (major, end) = VLLM_WINDOW
    assert {first, (major, end - 1)} <= minors


@pytest.mark.parametrize("version", KEPT)
def test_every_registered_adapter_was_recorded_and_none_fails(version: str) -> None:
    found = KEPT[version]["architectures"]
    assert set(found) == set(list_architectures())
    assert {name for name, outcome in found.items() if outcome["what"] == FAILED} == set()
    assert {outcome["what"] for outcome in found.values()} <= set(OUTCOMES)


@pytest.mark.parametrize("version", KEPT)
def test_what_was_not_recorded_has_a_reason(version: str) -> None:
    for outcome in KEPT[version]["architectures"].values():
        assert outcome["what"] not in (DECLINED, ABSENT, NOT_MADE) or outcome["detail"]
