"""Attention within an encoder's sequences on the NPU: as on the CPU, and without copying lengths from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from dbo_runtime.vllm_plugin.encoder.host_lengths import make_attention_class
from dbo_runtime.vllm_plugin.platforms.encoder_attention import CpuAttention, NpuAttention, get_unpadded_kernel
from tests.standin.cann.cann import StandIn

WINDOWS, IMAGES = (16, 16, 8, 16, 8, 8), (40, 32)  # of two images
FULL_BLOCKS = (1, 3)  # of BLOCKS; the others attend within windows
BLOCKS = 5
TOLERANCE = 3e-3


def draw(heads: int, kv_heads: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [
        torch.randn(sum(IMAGES), count, size, generator=generator).to(torch.float16)
        for count in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("counts", [WINDOWS, IMAGES, (sum(IMAGES),)], ids=["windows", "images", "one"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("size", [32, 64, 72, 80, 120, 128])
def test_it_is_what_the_cpu_computes(standin: StandIn, size: int, kv_heads: int, counts: Sequence[int]) -> None:
    query, key, value = draw(4, kv_heads, size)
    shape = (4, kv_heads, size, size**-0.5)
    wanted = CpuAttention(*shape).attend(query.float(), key.float(), value.float(), counts)
    with standin.trace() as kernels:
        found = NpuAttention(*shape).attend(query.npu(), key.npu(), value.npu(), counts)
        torch.npu.synchronize()
    assert found.shape == wanted.shape
    assert (found.cpu().float() - wanted).abs().max() < TOLERANCE
    names = [kernel.name for kernel in kernels]
    assert any(name.startswith("FusedInferAttentionScore") for name in names)
    assert "MemcpyDeviceToHost" not in names


def test_where_there_is_no_nnal_its_kernel_is_not_taken(standin: StandIn) -> None:
    assert get_unpadded_kernel() is None


def test_with_nnal_its_kernel_is_taken(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """NNAL is not here: what is shown is what its kernel would be given, by the signature in torch_npu's header."""
    given: dict[str, Any] = {}

    def kernel(
        *, query: Any, key: Any, value: Any, seq_len: Any, scale_value: Any, num_heads: Any, num_kv_heads: Any, out: Any
    ) -> None:
        given.update({name: thing for name, thing in locals().items() if name != "given"})
        out.copy_(query)

    monkeypatch.setattr("dbo_runtime.vllm_plugin.platforms.encoder_attention.get_unpadded_kernel", lambda: kernel)
    query, key, value = draw(4, 2, 80)
    found = NpuAttention(4, 2, 80, 0.1).attend(query.npu(), key.npu(), value.npu(), IMAGES)
    assert torch.equal(found.cpu(), query)
    assert given["query"].shape == (sum(IMAGES), 4, 128)
    assert given["seq_len"].tolist() == list(IMAGES)
    assert given["seq_len"].device.type == "cpu"
    assert (given["scale_value"], given["num_heads"], given["num_kv_heads"]) == (0.1, 4, 2)


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
    """Return what all blocks' attention adds up to; metadata is made once, for each attention kind."""
    blocks = [cls(4, 64) for _ in range(BLOCKS)]
    given = [tensor.npu()[None] for tensor in draw(4, 4, 64)]

    def forward() -> torch.Tensor:
        kinds = []
        for counts in (WINDOWS, IMAGES):
            cu_seqlens = np.array([0, *accumulate(counts)], dtype=np.int32)
            lengths = cls.maybe_compute_seq_lens("npu", cu_seqlens, "npu")
            kinds.append((cls.maybe_recompute_cu_seqlens("npu", cu_seqlens, 256, 1, "npu"), None, lengths))
        x = given[0]
        for number, block in enumerate(blocks):
            x = x + block.forward_oot(x, *given[1:], *kinds[number in FULL_BLOCKS])
        torch.npu.synchronize()
        return x

    return forward(), forward


def test_no_block_copies_lengths_from_the_device(standin: StandIn) -> None:
    """Before: one copy in each block. After: none at all."""
    copies, results = [], []
    for cls in (CopyingAttention, make_attention_class(CopyingAttention, NpuAttention)):
        result, forward = run_encoder(cls)
        with standin.trace() as kernels:
            forward()
        copies.append([kernel.name for kernel in kernels].count("MemcpyDeviceToHost"))
        results.append(result.cpu())
    assert copies == [BLOCKS, 0]
    assert torch.equal(*results)
