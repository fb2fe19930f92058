"""Sequence lengths for an encoder's attention, computed on the host once per forward.

Without them, each layer copies the lengths from the device. Before the first layer, vLLM asks the class of its encoder
attention for the lengths, which it computes from data on the host. It asks once per *attention kind* of the layers
(full attention, and windows in some encoders), and passes each layer the lengths of its kind. The class here derives
from the registered one.

vllm-ascend's #6448 kept lengths across layers, so windowed layers got the lengths of other layers. Here they are an
argument of the forward that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.platforms.encoder_attention import EncoderAttention
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.differences import compare_results

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

NAME = "MMEncoderAttention"  # name that vLLM looks the class up by
COMPARED = "images' attention with host lengths and without"
REMEDY = "VLLM_ASCEND_ENABLE_DBO=0 serves without host lengths"
_BASE = "_dbo_base"  # attribute of the derived class that holds its base class


class HostLengths(torch.Tensor):
    """Lengths of sequences on the host [sequences].

    Attributes:
        counts: the lengths as integers; empty in tensors that torch derives from this one.
    """

    counts: tuple[int, ...] = ()


def make_lengths(cu_seqlens: np.ndarray[Any, Any]) -> HostLengths:
    """Return the lengths of sequences from their cumulative lengths *cu_seqlens* [sequences + 1]."""
    counts = np.diff(cu_seqlens).astype(np.int32)
    lengths = torch.from_numpy(counts).as_subclass(HostLengths)
    lengths.counts = tuple(counts.tolist())
    return lengths


def install_host_lengths(check: bool = False) -> None:
    """Register a class derived from the registered encoder attention, before a model is made. Idempotent.

    With *check*, each attention is also computed without host lengths, and compared.
    """
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    kernel = get_platform().get_encoder_attention()
    registered = custom_op.op_registry_oot.get(NAME, MMEncoderAttention)
    if kernel is not None:
        custom_op.op_registry_oot[NAME] = make_attention_class(getattr(registered, _BASE, registered), kernel, check)


def make_attention_class(
    base: type[MMEncoderAttention], kernel: type[EncoderAttention], check: bool = False
) -> type[MMEncoderAttention]:
    """Return an encoder attention derived from *base* that takes host lengths; see `install_host_lengths`."""

    class MMEncoderAttention(base):  # type: ignore[misc] # named as vLLM expects
        name = base.name

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kernel = kernel(self.num_heads, self.num_kv_heads, self.head_size, self.scale)

        @classmethod
        def maybe_compute_seq_lens(
            cls, attn_backend: AttentionBackendEnum, cu_seqlens: np.ndarray[Any, Any], device: torch.device
        ) -> HostLengths:
            """Return the sequence lengths for one attention kind."""
            return make_lengths(cu_seqlens)

        @classmethod
        def maybe_recompute_cu_seqlens(
            cls, attn_backend: AttentionBackendEnum, cu_seqlens: np.ndarray[Any, Any], *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            """Return the cumulative sequence lengths for one attention kind on the host: no kernel needs a copy."""
            return torch.from_numpy(np.ascontiguousarray(cu_seqlens, dtype=np.int32))

        def forward_cpu(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Attend within each sequence, like `forward_native`."""
            return self._attend(super().forward_cpu, query, *args, **kwargs)

        def forward_oot(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Attend within each sequence, like `forward_native`."""
            return self._attend(super().forward_oot, query, *args, **kwargs)

        def _attend(
            self,
            run_base: Callable[..., torch.Tensor],
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            cu_seqlens: torch.Tensor | None = None,
            max_seqlen: torch.Tensor | None = None,
            sequence_lengths: torch.Tensor | None = None,
        ) -> torch.Tensor:
            counts = getattr(sequence_lengths, "counts", ())
            run: Callable[..., torch.Tensor] = partial(run_base, query, key, value)
            if not counts or query.dim() != 4 or query.shape[0] != 1:
                return run(cu_seqlens, max_seqlen, None if counts else sequence_lengths)
            _check_lengths(counts, query.shape[1])
            attended = self._kernel.attend(query[0], key[0], value[0], counts)[None]
            if check:
                ends = None if cu_seqlens is None else cu_seqlens.to(query.device)  # vLLM keeps it on that device
                compare_results(COMPARED, attended[0], run(ends, max_seqlen)[0], f"lengths {counts}", REMEDY)
            return attended

    setattr(MMEncoderAttention, _BASE, base)
    return MMEncoderAttention


def _check_lengths(counts: Sequence[int], patches: int) -> None:
    """Raise SplitError unless lengths add up to the patches. Otherwise a kernel would skip patches without an error."""
    if sum(counts) != patches:
        raise SplitError(f"an encoder's attention got {patches} patches, but sequence lengths of {sum(counts)}.")
