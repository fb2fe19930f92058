"""All-reduces taken out of the modules that end in one, and made elsewhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dbo_models.qwen_hybrid import attend_to_output
from dbo_runtime.errors import ProgramError
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.vllm.engines import Engines

ROOT = Path(__file__).parents[3]
CPU = get_platform("cpu")


class FakeGroup:
    """A group of ranks that all hold the same: the reduce multiplies, into new memory as vLLM's does."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.world_size


class Linear:
    """A module that ends in an all-reduce."""

    def __init__(self, group: FakeGroup) -> None:
        self.group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x + 1)


class ReducesTwice(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.group.all_reduce(x))


class ReducesNever(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class ScalesAfterwards(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x) * 0.5


class ReturnsARow(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x)[:1]


class ReturnsOtherBits(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(x).view(torch.int32)


class Fails(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no memory for it")


class MiniMaxText01RMSNormTP(torch.nn.Module):
    """Called like vLLM's norm that sums squares over the ranks."""


class NormsAcrossRanks(torch.nn.Module):
    """An attention module with such norms, which ends in an all-reduce."""

    def __init__(self, group: FakeGroup) -> None:
        super().__init__()
        self.group, self.norm = group, MiniMaxText01RMSNormTP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = self.group.all_reduce(x.square().sum(1))
        return self.group.all_reduce(x * squares[:, None])


X = torch.arange(6.0).reshape(2, 3)


def test_a_module_gives_this_ranks_part_of_the_sum() -> None:
    group = FakeGroup()
    module = Linear(group)
    assert torch.equal(module(X), (X + 1) * 2)
    assert torch.equal(ModelCollectives(CPU, group).without_reduce(module)(X), X + 1)


class FillsOutput(torch.nn.Module):
    """Attention that copies what it reduces to a tensor that it is given, as in vLLM 0.23."""

    rotary_emb: torch.nn.Module

    def __init__(self, group: FakeGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, hidden_states: torch.Tensor, output: Any, positions: torch.Tensor | None = None) -> None:
        assert (positions is not None) == hasattr(self, "rotary_emb")
        output[: len(hidden_states)] = self.group.all_reduce(hidden_states + 1)


@pytest.mark.parametrize("has_positions", [False, True])
def test_attention_that_fills_a_tensor_gives_this_ranks_part_of_the_sum(has_positions: bool) -> None:
    group = FakeGroup()
    attention = FillsOutput(group)
    if has_positions:
        attention.rotary_emb = torch.nn.Identity()
    positions = torch.arange(len(X))
    assert attend_to_output(attention, positions, X).equal((X + 1) * 2)
    unreduced = ModelCollectives(CPU, group).without_reduce(partial(attend_to_output, attention))
    assert unreduced(positions, X).equal(X + 1)


class CopiesIntoPadding(torch.nn.Module):
    """Attention that reduces the tokens of its metadata and returns padding, too, as vllm-ascend's sparse one does."""

    def __init__(self, group: FakeGroup, padding: int) -> None:
        super().__init__()
        self.group, self.padding = group, padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0] + self.padding, x.shape[1])
        out[: x.shape[0]] = self.group.all_reduce(x + 1)
        return out


def test_a_copy_of_what_is_reduced_may_have_padding_after_it() -> None:
    group, platform = FakeGroup(), copy.copy(CPU)
    platform.copying_modules = ("CopiesIntoPadding",)
    collectives = ModelCollectives(platform, group)
    with patch("dbo_runtime.vllm_plugin.parallel.collectives.has_metadata", lambda: True):
        assert torch.equal(collectives.without_reduce(CopiesIntoPadding(group, 1))(X)[:2], X + 1)
        with pytest.raises(ProgramError, match="returned something else"):
            collectives.without_reduce(ReducesPadding(group, 1))(X)


class ReducesPadding(CopiesIntoPadding):
    """One that leaves out rows that it has reduced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[: x.shape[0] - self.padding]


def test_sums_of_squares_are_reduced_where_a_norm_needs_them() -> None:
    group = FakeGroup()
    module = NormsAcrossRanks(group)
    partial_sum = ModelCollectives(CPU, group).without_reduce(module)(X)
    assert torch.equal(partial_sum, X * 2 * X.square().sum(1, keepdim=True))
    assert torch.equal(module(X), 2 * partial_sum)


def test_the_group_reduces_again_afterwards() -> None:
    group = FakeGroup()
    module = Linear(group)
    ModelCollectives(CPU, group).without_reduce(module)(X)
    assert "all_reduce" not in vars(group)
    assert torch.equal(module(X), (X + 1) * 2)


def test_the_group_reduces_again_after_a_module_that_failed() -> None:
    group = FakeGroup()
    with pytest.raises(MemoryError, match="no memory for it"):
        ModelCollectives(CPU, group).without_reduce(Fails(group))(X)
    assert "all_reduce" not in vars(group)
    assert torch.equal(group.all_reduce(X), X * 2)


@pytest.mark.parametrize(
    ("cls", "made"),
    [
        (ReducesTwice, r"it made 2\."),
        (ReducesNever, r"it made 0\."),
        (ScalesAfterwards, "it made 1 and returned something else"),
        (ReturnsARow, "it made 1 and returned something else"),
        (ReturnsOtherBits, "it made 1 and returned something else"),
    ],
)
def test_a_module_that_does_not_end_in_one_all_reduce_raises_with_its_name(cls: type[Linear], made: str) -> None:
    group = FakeGroup()
    reduced = ModelCollectives(CPU, group).without_reduce(cls(group))
    with pytest.raises(ProgramError, match=rf"^{cls.__name__} must end in one all-reduce .*{made}"):
        reduced(X)
    assert torch.equal(group.all_reduce(X), X * 2)


class Knowing(Platform):
    """A platform that knows how to leave out the reduces of modules of one class."""

    def get_unreduced(self, module: Callable[..., Any], parts: Iterable[torch.nn.Module]) -> Callable[..., Any] | None:
        return torch.neg if any(isinstance(part, torch.nn.Identity) for part in parts) else None


def test_a_module_whose_reduce_the_platform_knows_to_leave_out_runs_so() -> None:
    collectives = ModelCollectives(Knowing("cpu"), FakeGroup())
    assert collectives.without_reduce(torch.nn.Sequential(torch.nn.Identity())) is torch.neg
    assert collectives.without_reduce(partial(call, torch.nn.Identity())) is torch.neg
    linear = Linear(FakeGroup())
    assert collectives.get_reducing_module(collectives.without_reduce(linear)) is linear


def call(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


def attend(group: FakeGroup, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x) + 1


def test_a_partial_function_raises_with_the_functions_name() -> None:
    group = FakeGroup()
    with pytest.raises(ProgramError, match=r"^attend must end in one all-reduce"):
        ModelCollectives(CPU, group).without_reduce(partial(attend, group))(X)


def test_with_one_rank_modules_and_values_pass_through() -> None:
    parallel = ModelCollectives(CPU, SimpleNamespace(world_size=1))
    assert parallel.without_reduce(attend) is attend
    assert parallel.all_reduce(X) is X


def run_rank(rank: int, store: str) -> None:
    """Reduce a contiguous and a non-contiguous tensor over two ranks, in a separate process."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    try:
        sibling = dist.new_group(backend="gloo")
        parallel = ModelCollectives(CPU, SimpleNamespace(world_size=2, make_sibling_device_group=lambda name: sibling))
        parallel.connect()
        partial_sum = torch.arange(12.0).reshape(3, 4) * (rank + 1)
        reduced = parallel.all_reduce(partial_sum)
        assert reduced is partial_sum
        assert torch.equal(partial_sum, torch.arange(12.0).reshape(3, 4) * 3)

        columns = (torch.arange(12.0).reshape(3, 4) * (rank + 1))[:, 1:3]
        assert not columns.is_contiguous()
        assert torch.equal(parallel.all_reduce(columns), torch.arange(12.0).reshape(3, 4)[:, 1:3] * 3)

        half = torch.full((4, 2), rank + 0.5, dtype=torch.bfloat16)
        assert torch.equal(parallel.all_reduce(half), torch.full((4, 2), 2.0, dtype=torch.bfloat16))
    finally:
        dist.destroy_process_group()


def test_all_reduce_sums_over_the_ranks_and_in_place_where_it_can(tmp_path: Path, engines: Engines) -> None:
    engines.run(2, run_rank, str(tmp_path / "store"))
