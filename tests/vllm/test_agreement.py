"""Ranks with different settings stop at the start and say who has what."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.agreement import find_disagreement
from dbo_runtime.vllm_plugin.hooks import _check_settings


class Pair:
    """A group of two ranks, of which the other says what it is told to."""

    world_size = 2
    cpu_group = "cpu"


def let_other_say(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def gather(said: list[Any], own: Any, group: Any) -> None:
        assert group == Pair.cpu_group
        said[:] = [own, words]

    monkeypatch.setattr(dist, "all_gather_object", gather)


def test_ranks_that_say_the_same_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_say(monkeypatch, "split")
    assert find_disagreement(Pair, "split") is None


def test_a_disagreement_names_ranks_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    let_other_say(monkeypatch, "whole")
    assert find_disagreement(Pair, "split") == "rank 0: split; rank 1: whole"


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather_object", None)  # calling it would fail
    assert find_disagreement(type("One", (), {"world_size": 1}), "split") is None


@pytest.mark.parametrize(
    ("config", "refusal"), [(RuntimeConfig(mode="off"), None), (RuntimeConfig(), "no adapter is registered for X")]
)
def test_ranks_with_other_settings_or_packages_stop_at_the_start(
    monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig, refusal: str | None
) -> None:
    let_other_say(monkeypatch, f"{RuntimeConfig()}, can be split")
    with pytest.raises(ConfigError, match=r"give all ranks on all hosts the same settings.*rank 0: .*rank 1: "):
        _check_settings(Pair, config, refusal)
    _check_settings(Pair, RuntimeConfig(), None)
