"""What vLLM's expert load balancing (EPLB) would record in split steps, and why they are declined with it.

vLLM refuses EPLB on CPUs, and maps experts in a Triton kernel. Its router is real here; the kernel is written again in
torch, and the routing is a plain top-k.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dbo_runtime.vllm_plugin.api.moe import MoeLayer

pytestmark = pytest.mark.vllm

EXPERTS, PER_TOKEN = 4, 2
REPLICAS = torch.tensor([[0, 4], [1, 5], [2, -1], [3, -1]])  # physical experts of each logical one
COUNTS = torch.tensor([2, 2, 1, 1])
LOGICAL = torch.tensor([0, 1, 2, 3, 0, 1])  # of each physical one
KNUTH = 2654435769
TOKENS = 40


def map_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor,
) -> torch.Tensor:
    """Do what `_eplb_map_and_record_i32_kernel` does: choose replicas by the row, and count tokens but padding."""
    rows = torch.arange(len(topk_ids))[:, None]
    replica = (rows * KNUTH % 2**32) % logical_replica_count[topk_ids]
    physical = logical_to_physical_map[topk_ids, replica]
    counted = physical[: int(num_unpadded_tokens)].flatten()
    expert_load_view.index_add_(0, counted, torch.ones_like(counted))
    return physical


def make_layer(monkeypatch: pytest.MonkeyPatch, tokens: int) -> tuple[MoeLayer, torch.Tensor]:
    """Return a layer for steps with so many tokens, without padding, and the load that its router records."""
    from vllm.distributed.eplb.eplb_state import EplbLayerState
    from vllm.model_executor.layers.fused_moe.router import base_router

    class TopK(base_router.BaseRouter):
        routing_method_type = None

        def _compute_routing(self, hidden_states: Any, router_logits: Any, *rest: Any, **more: Any) -> Any:
            return router_logits.topk(PER_TOKEN)

    monkeypatch.setattr(base_router, "eplb_map_to_physical_and_record", map_and_record)
    load = torch.zeros(len(LOGICAL), dtype=torch.long)
    state = EplbLayerState(load, REPLICAS, COUNTS, torch.tensor(True), [torch.tensor(tokens)])
    runner = SimpleNamespace(
        gate=lambda x: (x, None),
        router=TopK(PER_TOKEN, EXPERTS, state),
        _quant_method=SimpleNamespace(topk_indices_dtype=None),
    )
    return MoeLayer(runner), load


def sum_logical(load: torch.Tensor) -> list[int]:
    return torch.zeros(EXPERTS, dtype=torch.long).index_add_(0, LOGICAL, load).tolist()


@pytest.mark.parametrize("cuts", [[1, 39], [7, 13, 20]], ids=str)
def test_split_steps_record_the_load_of_unsplit_ones_spread_over_other_replicas(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    layer, load = make_layer(monkeypatch, TOKENS)
    weights, ids = layer.choose_experts(x)
    unsplit = load.clone()
    load.zero_()
    parts = [layer.choose_experts(piece) for piece in x.split(cuts)]
    assert sum_logical(load) == sum_logical(unsplit)
    assert load.sum() == TOKENS * PER_TOKEN
    assert torch.equal(torch.cat([part for part, _ in parts]), weights)
    split_ids = torch.cat([part for _, part in parts])
    assert torch.equal(LOGICAL[split_ids], LOGICAL[ids])
    assert not torch.equal(split_ids, ids), "replicas are chosen by the row in a micro-batch"


def test_split_steps_would_record_padding_which_unsplit_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens without padding is that of the step, and each micro-batch has fewer."""
    x = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    layer, load = make_layer(monkeypatch, TOKENS - 8)
    layer.choose_experts(x)
    assert load.sum() == (TOKENS - 8) * PER_TOKEN
    load.zero_()
    for piece in x.split(TOKENS // 2):
        layer.choose_experts(piece)
    assert load.sum() == TOKENS * PER_TOKEN
