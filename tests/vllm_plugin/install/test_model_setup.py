"""What the set-up of a loaded model compares and decides, without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.install import model_setup
from dbo_runtime.vllm_plugin.install.model_setup import _compare_settings
from dbo_runtime.vllm_plugin.parallel import agreement, rank_context
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext, make_rank_context
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL
from dbo_runtime.vllm_plugin.platforms.registry import get_platform


@pytest.mark.parametrize(
    ("platform", "side", "found"),
    [
        ("cpu", "on", True),
        ("cpu", "auto", False),
        ("cpu", "off", False),
        ("npu", "on", True),
        ("npu", "auto", True),
        ("npu", "off", False),
        ("cuda", "auto", True),
    ],
)
def test_the_cpu_has_a_second_compute_lane_only_for_those_who_ask(platform: str, side: str, found: bool) -> None:
    assert get_platform(platform).opens_side_lane(RuntimeConfig(enabled=True, side=side)) is found


class Pair:
    """A group of two ranks, of which the other gathers what it is given."""

    world_size = 2
    rank_in_group = 0
    cpu_group = "cpu"


def let_other_gather(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    monkeypatch.setattr(agreement, "exchange_bytes", lambda _, own: [own, json.dumps(other).encode()])


_P = ProgramBuilder()
PROGRAM = _P.build(_P.compute("op", lambda: None))
SAME = f"{RuntimeConfig()}, model: can be split, encoder: None, dispatch: all_gather, unproven: nothing, versions"


def make_rank(config: RuntimeConfig) -> RankContext:
    groups: Any = Groups(Pair, None, Pair)  # type: ignore[arg-type]
    log: Any = None
    return RankContext(log, config, get_platform("cpu"), groups, WHOLE_MODEL, 1, "network", "all_gather", (), log)


@pytest.mark.parametrize(
    ("config", "program", "encoder"),
    [
        (RuntimeConfig(mode="off"), PROGRAM, None),
        (RuntimeConfig(), Decline("no adapter is registered", "X"), None),
        (RuntimeConfig(), PROGRAM, Decline("no adapter is registered for the encoder")),
    ],
    ids=["settings", "packages", "packages of encoders"],
)
def test_ranks_with_other_settings_or_packages_stop_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    config: RuntimeConfig,
    program: Program | Decline,
    encoder: Decline | None,
) -> None:
    monkeypatch.setattr(model_setup, "describe_versions", lambda: "versions")
    let_other_gather(monkeypatch, SAME)
    _compare_settings(make_rank(RuntimeConfig()), PROGRAM, None)
    with pytest.raises(ConfigError, match=r"give all ranks on all hosts the same settings.*rank 0: .*rank 1: "):
        _compare_settings(make_rank(config), program, encoder)


def test_ranks_with_other_weights_stop_as_well_because_only_one_would_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_setup, "describe_versions", lambda: "versions")
    let_other_gather(monkeypatch, SAME)
    rank = replace(make_rank(RuntimeConfig()), unproven=("quantized weights W4A4",))
    with pytest.raises(ConfigError, match=r"unproven: quantized weights W4A4"):
        _compare_settings(rank, PROGRAM, None)


def make_context_of_pair(monkeypatch: pytest.MonkeyPatch, host: str, config: RuntimeConfig, **methods: Any) -> Any:
    """Return the context of one of two ranks, the other of which is on *host*; *methods* are the platform's."""
    groups = Groups(Pair, None, Pair)  # type: ignore[arg-type]
    platform = {"get_transport": lambda *_: "network", "check_support": lambda _: None}
    platform |= {"find_stage_buffers": lambda _: None}
    platform |= {"list_compared": lambda _: iter(["a drafter"]), **methods}
    monkeypatch.setattr(rank_context.vllm_groups, "get_groups", lambda _: groups)
    monkeypatch.setattr(rank_context.vllm_groups, "get_host", lambda: "10.0.0.1")
    monkeypatch.setattr(rank_context, "get_stage", lambda *_: WHOLE_MODEL)
    monkeypatch.setattr(rank_context, "get_platform", lambda: SimpleNamespace(**platform))
    let_other_gather(monkeypatch, host)
    model: Any = None
    vllm_config: Any = SimpleNamespace(speculative_config=None)
    return make_rank_context(model, vllm_config, config)


@pytest.mark.parametrize(("host", "hosts"), [("10.0.0.1", 1), ("10.0.0.2", 2)])
def test_ranks_learn_on_how_many_hosts_they_are(monkeypatch: pytest.MonkeyPatch, host: str, hosts: int) -> None:
    config = RuntimeConfig(dispatch="all_gather")
    assert make_context_of_pair(monkeypatch, host, config).hosts == hosts


@pytest.mark.parametrize(
    ("setting", "unsupported", "dispatch"),
    [
        ("auto", None, "all_to_all"),
        ("all_gather", None, "all_gather"),
        ("auto", Decline("this version is not known"), "all_gather"),
    ],
)
def test_a_known_platform_chooses_how_tokens_are_dispatched_unless_settings_do(
    monkeypatch: pytest.MonkeyPatch, setting: str, unsupported: Decline | None, dispatch: str
) -> None:
    methods = {"choose_dispatch": lambda _: "all_to_all", "check_support": lambda _: unsupported}
    found = make_context_of_pair(monkeypatch, "10.0.0.1", RuntimeConfig(dispatch=setting), **methods)
    assert found.dispatch == dispatch
    assert found.unproven == (() if unsupported else ("a drafter",))
