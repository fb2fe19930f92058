"""Attention within an encoder's sequences on the NPU, without copying lengths from the device.

Of vllm-ascend's own class, tests/ascend/test_encoder.py shows the same.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from dbo_runtime.vllm_plugin.host_plan import plan_attention
from tests.standin_cann.cann import StandIn

WINDOWS, WHOLE = (16, 16, 8, 16, 8, 8), (40, 32)  # of two images
FULL_BLOCKS = (1, 3)  # of BLOCKS; the others attend within windows
BLOCKS = 5


def draw(heads: int, kv_heads: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(sum(WHOLE), count, size, generator=generator).to(torch.float16)
        for count in (heads, kv_heads, kv_heads)
    ]


class CopyingAttention:
    """Encoder attention as vllm-ascend 0.30 has it: each layer copies where sequences end from the device."""

    name = "mm_encoder_attn"

    def __init__(self, num_heads: int, head_size: int) -> None:
        self.num_heads = self.num_kv_heads = num_heads
        self.head_size, self.scale = head_size, head_size**-0.5

    @classmethod
    def maybe_compute_seq_lens(cls, backend: Any, cu_seqlens: Any, device: Any) -> Any:
        return None

    @classmethod
    def maybe_recompute_cu_seqlens(cls, backend: Any, cu_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.from_numpy(cu_seqlens).npu()

    def forward_oot(
        self, query: Any, key: Any, value: Any, cu_seqlens: Any = None, max_seqlen: Any = None, lengths: Any = None
    ) -> Any:
        ends = cu_seqlens.cpu()[1:].tolist()
        return torch.ops.npu.npu_fused_infer_attention_score(
            query[0],
            key[0],
            value[0],
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
            num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            scale=self.scale,
            input_layout="TND",
        )[0][None]


def run_encoder(cls: Any) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Return what all blocks' attention adds up to; metadata is made once, and handed to each by its role."""
    blocks = [cls(4, 64) for _ in range(BLOCKS)]
    given = [tensor.npu()[None] for tensor in draw(4, 4, 64)]

    def forward() -> torch.Tensor:
        roles = []
        for counts in (WINDOWS, WHOLE):
            cu_seqlens = np.array([0, *accumulate(counts)], dtype=np.int32)
            lengths = cls.maybe_compute_seq_lens("npu", cu_seqlens, "npu")
            roles.append((cls.maybe_recompute_cu_seqlens("npu", cu_seqlens, 256, 1, "npu"), None, lengths))
        x = given[0]
        for number, block in enumerate(blocks):
            x = x + block.forward_oot(x, *given[1:], *roles[number in FULL_BLOCKS])
        torch.npu.synchronize()
        return x

    return forward(), forward


def test_no_block_copies_lengths_from_the_device(standin: StandIn) -> None:
    """Before: one copy in each block. After: none at all."""
    copies, results = [], []
    for cls in (CopyingAttention, plan_attention(CopyingAttention, "npu")):
        result, forward = run_encoder(cls)
        with standin.trace() as kernels:
            forward()
        copies.append([kernel.name for kernel in kernels].count("MemcpyDeviceToHost"))
        results.append(result.cpu())
    assert copies == [BLOCKS, 0]
    assert torch.equal(*results)
