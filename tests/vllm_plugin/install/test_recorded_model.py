"""Which adapter records a loaded model, and what declines before it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_models.dense import DenseAdapter
from dbo_models.sandwich import Gemma3Adapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.alternatives.generic import GenericAdapter
from dbo_runtime.vllm_plugin.install import recorded_model
from dbo_runtime.vllm_plugin.install.recorded_model import _check_backbone, _prefer_generic, record_model
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL
from dbo_runtime.vllm_plugin.platforms.registry import get_platform


class Unknown(torch.nn.Module):
    """A model whose parts no adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleNamespace(layers=[], norm=None)


class Decoder(torch.nn.Module):
    """One that holds no other."""


def make_rank(architecture: str, generic: bool = False) -> Any:
    config = RuntimeConfig(enabled=True, generic=generic)
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(architecture=architecture))
    group = SimpleNamespace(world_size=2)
    groups = SimpleNamespace(tensor_parallel=group)
    return SimpleNamespace(
        config=config, vllm_config=vllm_config, groups=groups, stage=WHOLE_MODEL, platform=get_platform("cpu")
    )


@pytest.mark.parametrize(
    ("architecture", "generic", "expected"),
    [
        ("MiMoForCausalLM", False, DenseAdapter),  # which declines its parts by name
        ("MiMoForCausalLM", True, GenericAdapter),
        ("LlamaForCausalLM", True, DenseAdapter),
    ],
)
def test_without_an_adapter_is_preferred_to_one_of_the_backbone_that_does_not_know_its_parts(
    architecture: str, generic: bool, expected: type
) -> None:
    model: Any = Unknown()
    assert isinstance(_prefer_generic(DenseAdapter(), model, make_rank(architecture, generic)), expected)


def test_an_adapter_that_is_broken_is_not_replaced() -> None:
    model: Any = Unknown()
    broken = Decline("its adapter cannot be used", "no such module")
    assert _prefer_generic(broken, model, make_rank("X", generic=True)) is broken
    assert isinstance(_prefer_generic(None, model, make_rank("X", generic=True)), GenericAdapter)


def test_a_decoder_that_holds_no_backbone_is_declined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_model, "list_declines", lambda *_: iter(()))
    model: Any = Decoder()
    collectives: Any = None
    found = record_model(Gemma3Adapter(), model, make_rank("Gemma3TextModel"), collectives)
    assert found == Decline("its parts are not known", "Decoder")
    assert _check_backbone(Gemma3Adapter(), model, make_rank("Gemma3ForCausalLM")) is None  # which says so itself
