"""Lengths of an encoder's sequences, known on the host: found once a forward, not copied from the device by each layer.

vLLM asks the class of its encoder attention for them before the first layer, from what the host knows anyway, once for
each *role* that layers have (full attention, and windows where an encoder has them), and hands each layer those of its
role. Ours is the class on top of whatever is registered. What #6448 of vllm-ascend kept across layers, which gave those
with windows the others' lengths, is here an argument of the forward that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dbo_runtime.errors import SplitError
from dbo_runtime.vllm_plugin.platforms.encoder_attention import EncoderAttention
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.comparison import compare_results

NAME = "MMEncoderAttention"  # under which vLLM looks its class up
COMPARED = "images' attention with the host plan and without"
REMEDY = "VLLM_ASCEND_ENABLE_DBO=0 serves without the plan"
_BASE = "_dbo_base"  # of our class: what it is on top of


class HostLengths(torch.Tensor):
    """Lengths of sequences on the host [sequences], with the same as integers.

    Attributes:
        counts: they. What torch makes of such a tensor has none.
    """

    counts: tuple[int, ...] = ()


def make_lengths(cu_seqlens: np.ndarray[Any, Any]) -> HostLengths:
    """Return the lengths of sequences that begin and end at *cu_seqlens* [sequences + 1]."""
    counts = np.diff(cu_seqlens).astype(np.int32)
    lengths = torch.from_numpy(counts).as_subclass(HostLengths)
    lengths.counts = tuple(counts.tolist())
    return lengths


def install_host_lengths(check: bool = False) -> None:
    """Put our class on top of the one that vLLM would take, before a model is made. Safe to call again.

    With *check*, each attention is computed as it would be without the plan, too, and compared.
    """
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    kernel = get_platform().get_encoder_attention()
    registered = custom_op.op_registry_oot.get(NAME, MMEncoderAttention)
    if kernel is not None:
        custom_op.op_registry_oot[NAME] = make_attention_class(getattr(registered, _BASE, registered), kernel, check)


def make_attention_class(base: Any, kernel: type[EncoderAttention], check: bool = False) -> Any:
    """Return an encoder attention like *base* that takes lengths from the host plan; for *check* see above."""

    class MMEncoderAttention(base):  # type: ignore[misc] # named as vLLM asks for it
        name = base.name

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kernel = kernel(self.num_heads, self.num_kv_heads, self.head_size, self.scale)

        @classmethod
        def maybe_compute_seq_lens(
            cls, attn_backend: Any, cu_seqlens: np.ndarray[Any, Any], device: Any
        ) -> HostLengths:
            """Return the lengths of one role's sequences."""
            return make_lengths(cu_seqlens)

        @classmethod
        def maybe_recompute_cu_seqlens(
            cls, attn_backend: Any, cu_seqlens: np.ndarray[Any, Any], *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            """Return where one role's sequences begin and end, on the host: no kernel wants it on the device."""
            return torch.from_numpy(np.ascontiguousarray(cu_seqlens, dtype=np.int32))

        def forward_cpu(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Attend within each sequence, as `forward_native`."""
            return self._attend(super().forward_cpu, query, *args, **kwargs)

        def forward_oot(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """Attend within each sequence, as `forward_native`."""
            return self._attend(super().forward_oot, query, *args, **kwargs)

        def _attend(
            self,
            unplanned: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            cu_seqlens: torch.Tensor | None = None,
            max_seqlen: torch.Tensor | None = None,
            sequence_lengths: torch.Tensor | None = None,
        ) -> torch.Tensor:
            counts = getattr(sequence_lengths, "counts", ())
            run: Callable[..., torch.Tensor] = partial(unplanned, query, key, value)
            if not counts or query.dim() != 4 or query.shape[0] != 1:
                return run(cu_seqlens, max_seqlen, None if counts else sequence_lengths)
            _expect(counts, query.shape[1])
            found = self._kernel.attend(query[0], key[0], value[0], counts)[None]
            if check:
                ends = None if cu_seqlens is None else cu_seqlens.to(query.device)  # where vLLM has it
                compare_results(COMPARED, found[0], run(ends, max_seqlen)[0], f"lengths {counts}", REMEDY)
            return found

    setattr(MMEncoderAttention, _BASE, base)
    return MMEncoderAttention


def _expect(counts: Sequence[int], patches: int) -> None:
    """Raise SplitError unless a plan is one for so many patches: a kernel would leave some out, and not say so."""
    if sum(counts) != patches:
        raise SplitError(f"{patches} patches came to an encoder's attention that was planned for {sum(counts)}.")
