"""Costs that choose what vLLM captures are loaded before it captures, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.install.cost_source import CostSource
from tests.support.vllm.forwards import Lines, Model, make_forward

FILE = RuntimeConfig(mode="auto", costs="costs.json")


def make_source(monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY) -> Any:
    """Return a source that does not read files, but tells what it was asked to load."""
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2])
    scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4)
    vllm_config = SimpleNamespace(
        compilation_config=compilation, scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=128)
    )
    rank: Any = SimpleNamespace(
        groups=SimpleNamespace(all_ranks=SimpleNamespace(world_size=1)),
        log=Lines(),
        stage=SimpleNamespace(name=""),
        vllm_config=vllm_config,
    )
    source: Any = CostSource(None, make_forward(Model()), None, rank)  # type: ignore[arg-type]
    source.loaded = []
    monkeypatch.setattr(source, "load", source.loaded.append)
    return source


def test_a_file_is_loaded_before_graphs_are_captured_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(monkeypatch)
    source.prepare_graphs(FILE)
    source.prepare(FILE)
    assert source.loaded == ["costs.json"]


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (FILE, CUDAGraphMode.NONE),
        (FILE, CUDAGraphMode.PIECEWISE),
        (RuntimeConfig(mode="auto"), CUDAGraphMode.FULL),
        (RuntimeConfig(mode="always", costs="costs.json"), CUDAGraphMode.FULL),
        (RuntimeConfig(mode="auto", costs="costs.json", calibrate=True), CUDAGraphMode.FULL),
    ],
    ids=["eager", "piecewise", "no costs", "always", "to be measured"],
)
def test_elsewhere_nothing_is_loaded_early(
    monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig, mode: CUDAGraphMode
) -> None:
    source = make_source(monkeypatch, mode)
    source.prepare_graphs(config)
    assert source.loaded == []
    assert source.forward.decider.warm_up.graphs is None


def test_costs_that_cannot_be_used_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(monkeypatch)

    def fail(path: str) -> None:
        source.loaded.append(path)
        raise ConfigError("of another model")

    monkeypatch.setattr(source, "load", fail)
    source.rank.log.warning = source.rank.log.info
    source.prepare_graphs(FILE)
    source.prepare(FILE)
    assert source.loaded == ["costs.json"]
    assert source.rank.log.events == ["no costs to plan with; DBO_MODE=auto goes by the thresholds"]
    assert source.forward.decider.warm_up.graphs is None
