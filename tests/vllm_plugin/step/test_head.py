"""What a model's own forward does with the hidden states of its backbone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.step import head
from dbo_runtime.vllm_plugin.step.head import UNKNOWN, Head, find_head

HIDDEN = 4
POSITIONS = torch.arange(3)


class Backbone(torch.nn.Module):
    """One that must not run when its results are there."""

    scale = 3.0

    def forward(self, *given: Any) -> torch.Tensor:
        raise AssertionError("it ran")


class Reward(torch.nn.Module):
    """Scores what its backbone gives, and reads what that has besides."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()
        self.score = torch.nn.Linear(HIDDEN, 1)

    def forward(self, ids: Any, positions: Any, received: Any = None, x: Any = None) -> Any:
        return self.score(self.model(ids, positions, received, x)) * self.model.scale


class Shifting(Reward):
    """Gives its backbone other positions than it is given."""

    def forward(self, ids: Any, positions: Any, received: Any = None, x: Any = None) -> Any:
        return super().forward(ids, positions + 1, received, x)


class Repeating(Reward):
    """Runs its backbone twice."""

    def forward(self, ids: Any, positions: Any, received: Any = None, x: Any = None) -> Any:
        return super().forward(ids, positions, received, x) + super().forward(ids, positions, received, x)


class Pooling(Reward):
    """Gives one row for all tokens."""

    def forward(self, ids: Any, positions: Any, received: Any = None, x: Any = None) -> Any:
        return super().forward(ids, positions, received, x)[:1]


class Elsewhere(Reward):
    """Has its backbone under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = self.model
        del self.model


class Qwen3ForCausalLM(Reward):
    """Called as an architecture with an adapter, which is written for this forward."""

    def forward(self, ids: Any, positions: Any, received: Any = None, x: Any = None) -> Any:
        return self.model(ids, positions, received, x)


class Qwen3ForEmbedding(Qwen3ForCausalLM):
    """What vLLM makes of it: only a pooler is added."""


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(head, "set_forward_context", lambda *_, **__: torch.no_grad())
    model = SimpleNamespace(architecture="RewardModel", get_hidden_size=lambda: HIDDEN, dtype=torch.float32)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(pipeline_parallel_size=1))


def test_a_head_runs_on_what_was_computed_before_and_the_backbone_does_not(vllm_config: Any) -> None:
    model: Any = Reward()
    found = find_head(model, vllm_config)
    assert isinstance(found, Head)
    backbone, hidden = model.model, torch.randn(3, HIDDEN)
    assert torch.equal(found(hidden, POSITIONS), model.score(hidden) * 3.0)
    assert model.model is backbone
    assert [name for name, _ in model.named_modules()] == ["", "model", "score"]


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Shifting, "Shifting: RuntimeError: it calls its backbone 1 times, or with other arguments"),
        (Repeating, "Repeating: RuntimeError: it calls its backbone 2 times, or with other arguments"),
        (Pooling, "Pooling: it returns Tensor"),
        (Elsewhere, "Reward"),
    ],
)
def test_a_forward_that_does_more_is_declined_by_name(cls: type[Reward], says: str, vllm_config: Any) -> None:
    model: Any = cls()
    assert find_head(model, vllm_config) == Decline(UNKNOWN, says)


def test_a_head_in_a_pipeline_is_declined(vllm_config: Any) -> None:
    vllm_config.parallel_config.pipeline_parallel_size = 2
    model: Any = Reward()
    found = find_head(model, vllm_config)
    assert found == Decline("not supported yet: a head in the forward of a model, in a pipeline", "Reward")


def test_a_forward_that_adapters_are_written_for_has_no_head(vllm_config: Any) -> None:
    model: Any = Qwen3ForEmbedding()
    assert find_head(model, vllm_config) is None
    vllm_config.model_config.architecture = "LlamaForCausalLM"  # registered, whatever its class is called
    model = Reward()
    assert find_head(model, vllm_config) is None
