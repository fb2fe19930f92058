"""FlashComm v1 of vllm-ascend 0.23 in a split step: left out, and taken up again where the runner expects it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.vllm_plugin.platforms import npu_flashcomm
from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import FlashComm, find_flashcomm, run_on_chunk, set_padding
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

RANKS = 4


class Group:
    """One rank of a tensor parallel group whose ranks have joined *whole* tensors, one after another."""

    world_size = RANKS

    def __init__(self, rank: int, whole: list[torch.Tensor]) -> None:
        self.rank_in_group = rank
        self._whole = whole

    def all_gather(self, chunk: torch.Tensor, dim: int) -> torch.Tensor:
        whole = self._whole.pop(0)
        assert chunk.equal(whole.tensor_split(RANKS)[self.rank_in_group])
        return whole


def make_step(padding: int, is_enabled: bool = True) -> Any:
    return SimpleNamespace(flash_comm_v1_enabled=is_enabled, pad_size=padding)


def test_layers_hand_on_all_tokens_while_it_is_left_out_and_chunks_again_after() -> None:
    step, part = make_step(3), make_step(3)
    with FlashComm(step).left_out([part]):
        assert [vars(each) for each in (step, part)] == [{"flash_comm_v1_enabled": False, "pad_size": 0}] * 2
    assert vars(step) == {"flash_comm_v1_enabled": True, "pad_size": 3}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rank", range(RANKS))
def test_chunks_of_all_ranks_are_all_tokens(rank: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 8 - padding
    hidden, auxiliary = torch.randn(tokens, 2), torch.randn(tokens, 3)
    padded = [torch.nn.functional.pad(each, (0, 0, 0, padding)) for each in (hidden, auxiliary)]
    group = Group(rank, padded)
    monkeypatch.setattr(npu_flashcomm, "get_tp_group", lambda: group)
    flashcomm = FlashComm(make_step(padding))
    chunk, chunks = flashcomm.take_chunks((hidden, [auxiliary]))
    assert chunk.shape == (2, 2)
    joined, others = flashcomm.join_chunks((chunk, chunks))
    assert joined.equal(hidden)
    assert isinstance(others, list)
    assert others[0].equal(auxiliary)


def test_steps_without_it_are_left_alone() -> None:
    assert find_flashcomm(make_step(0, is_enabled=False)) is None
    assert find_flashcomm(SimpleNamespace()) is None  # type: ignore[arg-type]  # of 0.30, which has no such field
    assert get_platform("npu").find_flashcomm(make_step(0)) is not None
    assert get_platform("cpu").find_flashcomm(make_step(0)) is None


def test_a_micro_batch_in_a_step_of_its_own_is_padded_by_its_own_tokens() -> None:
    part = SimpleNamespace(**vars(make_step(3)), padded_length=12, num_tokens=10)
    set_padding(part)  # type: ignore[arg-type]
    assert part.pad_size == 2


@pytest.mark.parametrize("tokens", [8, 5, 2])
def test_a_module_that_takes_chunks_returns_them_among_zeros(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over the ranks, its results are those of all tokens, in steps whose layers hand on all of them."""
    x, step, seen = torch.randn(tokens, 2), make_step(0, is_enabled=False), []

    def double(positions: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        assert positions.shape[0] == tokens
        seen.append((chunk.shape[0], dict(vars(step))))
        return chunk * 2

    monkeypatch.setattr(npu_flashcomm, "get_current", lambda: step)
    total = torch.zeros_like(x)
    for rank in range(RANKS):
        monkeypatch.setattr(npu_flashcomm, "get_tp_group", lambda rank=rank: Group(rank, []))
        total += run_on_chunk(double, torch.arange(tokens), x)
    assert total.equal(x * 2)
    padding = -tokens % RANKS
    assert seen == [((tokens + padding) // RANKS, {"flash_comm_v1_enabled": True, "pad_size": padding})] * RANKS
    assert vars(step) == {"flash_comm_v1_enabled": False, "pad_size": 0}


def test_a_module_that_fails_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(0, is_enabled=False)
    monkeypatch.setattr(npu_flashcomm, "get_current", lambda: step)
    monkeypatch.setattr(npu_flashcomm, "get_tp_group", lambda: Group(0, []))
    with pytest.raises(ZeroDivisionError):
        run_on_chunk(lambda x: x / (1 // 0), torch.randn(4, 2))
    assert vars(step) == {"flash_comm_v1_enabled": False, "pad_size": 0}
