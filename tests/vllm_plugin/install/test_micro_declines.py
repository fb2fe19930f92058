"""Reasons against micro-batches only: nano-batches remain, unless the settings ask for micro-batches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dbo_models.deepseek_v4 import DeepseekV4Adapter
from dbo_models.deepseek_v41 import DeepseekV41Adapter
from dbo_runtime.adapters.contract import ModelAdapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.install import recorded_model
from dbo_runtime.vllm_plugin.install.config_checks import find_decline, list_declines
from dbo_runtime.vllm_plugin.install.recorded_model import RecordedModel, record_model
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.vllm.configs import make_config

MICRO = Decline("its states are not known", only_micro=True)
BOTH = Decline("its layers are not known")


@pytest.mark.parametrize(
    ("declines", "split", "expected"),
    [
        ([], "auto", None),
        ([MICRO], "auto", None),
        ([MICRO], "nano", None),
        ([MICRO], "micro", MICRO),
        ([MICRO, BOTH], "auto", BOTH),
        ([MICRO, BOTH], "micro", MICRO),
        ([BOTH], "nano", BOTH),
    ],
)
def test_a_reason_against_micro_batches_declines_a_model_only_where_these_are_asked_for(
    declines: list[Decline], split: str, expected: Decline | None
) -> None:
    assert find_decline(declines, RuntimeConfig(split=split)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"use_v2_model_runner": True},
        {"kv_transfer_config": SimpleNamespace(kv_connector="Novel")},
        {"is_hybrid": True, "architecture": "OtherForCausalLM"},
        {"is_hybrid": True, "architecture": "Qwen3NextForCausalLM", "use_sequence_parallel_moe": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_only_attention_meets_leaves_nano_batches(changes: dict[str, Any]) -> None:
    vllm_config: Any = make_config(**{"architecture": "LlamaForCausalLM", **changes})
    adapter: Any = object()
    found = list(list_declines(vllm_config, RuntimeConfig(), adapter))
    assert [decline.only_micro for decline in found] == [True]
    with patch.object(Platform, "cuts_ops", lambda *_: False):
        assert list(list_declines(vllm_config, RuntimeConfig(), adapter)) == [replace(found[0], only_micro=False)]


class Adapter:
    """Declares a token-wise op, and communication that is or is not. It declines as it is told."""

    takes_stages = True

    def __init__(self, token_wise: bool, reason: Decline | None = None) -> None:
        self._token_wise = token_wise
        self._reason = reason

    def decline(self, model: Any) -> Decline | None:
        return self._reason

    def record(self, p: ProgramBuilder, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        with p.layer(0):
            x = p.compute("op", torch.neg, x, token_wise=True)
            return p.comm("reduce", torch.neg, x, token_wise=self._token_wise)


@pytest.fixture
def declines(monkeypatch: pytest.MonkeyPatch) -> list[Decline]:
    found: list[Decline] = []
    monkeypatch.setattr(recorded_model, "list_declines", lambda *_: iter(found))
    monkeypatch.setattr(recorded_model, "_check_backbone", lambda *_: None)
    monkeypatch.setattr(recorded_model, "make_lora_mapping", lambda *_: None)
    monkeypatch.setattr(recorded_model, "find_head", lambda *_: None)
    return found


def record(adapter: Adapter, split: str = "auto") -> RecordedModel | Decline:
    rank: Any = SimpleNamespace(
        config=RuntimeConfig(split=split), vllm_config=None, stage=WHOLE_MODEL, platform=get_platform("cpu")
    )
    model: Any = torch.nn.Module()
    collectives: Any = None
    return record_model(adapter, model, rank, collectives)


def test_a_model_without_micro_batches_is_recorded_with_the_reason(declines: list[Decline]) -> None:
    declines.append(MICRO)
    found = record(Adapter(token_wise=True))
    assert isinstance(found, RecordedModel)
    assert found.no_micro == MICRO
    assert isinstance(found.program, Program)


def test_its_adapter_may_say_so_as_well(declines: list[Decline]) -> None:
    found = record(Adapter(token_wise=True, reason=MICRO))
    assert isinstance(found, RecordedModel)
    assert found.no_micro == MICRO
    assert record(Adapter(token_wise=True, reason=MICRO), split="micro") == MICRO
    assert record(Adapter(token_wise=True, reason=BOTH)) == BOTH


def test_without_communication_that_is_token_wise_nothing_would_overlap(declines: list[Decline]) -> None:
    declines.append(MICRO)
    assert record(Adapter(token_wise=False)) == MICRO


def test_a_model_with_both_has_no_such_reason(declines: list[Decline]) -> None:
    found = record(Adapter(token_wise=True))
    assert isinstance(found, RecordedModel)
    assert found.no_micro is None


@pytest.mark.parametrize(
    ("adapter", "config", "expected"),
    [
        (DeepseekV4Adapter(), {}, None),
        (DeepseekV4Adapter(), {"vision_n_layers": 0}, None),
        (DeepseekV4Adapter(), {"vision_n_layers": 27}, True),
        (DeepseekV4Adapter(), {"use_index_cache": True, "vision_n_layers": 27}, False),
        (DeepseekV41Adapter(), {}, True),
    ],
    ids=["V4", "V4 without an encoder", "V4 that sees images", "V4 that passes on keys", "V4.1"],
)
def test_a_configuration_tells_before_the_load_that_a_model_has_nano_batches_only(
    adapter: ModelAdapter, config: dict[str, Any], expected: bool | None
) -> None:
    """So the doctor says what a server does (`make verdicts`)."""
    vllm_config: Any = make_config()
    vllm_config.model_config.hf_text_config = SimpleNamespace(**config)
    vllm_config.model_config.dtype = torch.bfloat16
    found = [each.only_micro for each in list_declines(vllm_config, RuntimeConfig(), adapter)]
    assert found == ([] if expected is None else [expected])
