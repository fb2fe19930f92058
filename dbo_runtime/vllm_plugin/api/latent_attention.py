"""vLLM's latent attention (MLA), decomposed into queries and keys. vLLM runs both in one call.

Follows vllm/model_executor/layers/mla.py and .../attention/mla_attention.py of vLLM 0.23.0 to 0.33.0. There, the op
that writes the cache reads slots from the current forward context. Here, the slots are a value of the micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

from dbo_runtime.adapters.communication import DividedAttention, LatentAttention
from dbo_runtime.decline import Decline

if TYPE_CHECKING:
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

KNOWN_MODULES = ("MultiHeadLatentAttentionWrapper",)
SINGLE, PAIRED = "RotaryEmbedding", "DeepseekScalingRotaryEmbedding"  # the second rotates keys with the queries


class LatentParts(LatentAttention, Protocol):
    """Latent attention in parts: those of `LatentAttention`, and those for nano-batches.

    Attributes:
        is_gated: whether a gate scales what attention returns. Then only nano-batches have parts.
    """

    is_gated: bool

    def divide(self) -> DividedAttention:
        """Return the parts for nano-batches."""


def get_latent_module(attention: torch.nn.Module) -> MultiHeadLatentAttentionWrapper | None:
    """Return the latent attention module inside a decoder's attention, or None if it is another kind of attention."""
    module = getattr(attention, "mla_attn", None)
    return module if hasattr(module, "mla_attn") or hasattr(module, "kv_lora_rank") else None


def check_attention(module: MultiHeadLatentAttentionWrapper) -> Decline | None:
    """Return why latent attention stays one op, or None if it can be decomposed."""
    name = type(module).__name__
    if name not in KNOWN_MODULES:
        return Decline("the class of latent attention runs it as one op", name)
    rotary = type(module.rotary_emb).__name__
    if rotary not in (SINGLE, PAIRED):
        return Decline("the rotary embedding is not known to rotate queries without keys", rotary)
    layer = module.mla_attn
    # vLLM 0.23 lacks all attributes that have a default here; 0.28 lacks `fuse_qkv_rmsnorm` and a hierarchical cache.
    is_context_parallel = getattr(module, "dcp_q_replicate", False) or getattr(layer, "use_pcp", False)
    checks = (
        (getattr(module.rotary_emb, "use_flashinfer", False), "one kernel rotates queries and keys"),
        (getattr(module, "fuse_qkv_rmsnorm", False), "one kernel normalizes queries and keys"),
        (module.is_sparse or module.indexer is not None, "latent attention is sparse"),
        (getattr(module, "g_proj", None) is not None, "the output of latent attention is gated"),
        (is_context_parallel, "latent attention is context parallel"),
        (getattr(layer, "hisparse_cache", None) is not None, "the cache of latent attention is hierarchical"),
    )
    return next((Decline(what) for is_used, what in checks if is_used), None)


class SplitLatentAttention:
    """One layer's latent attention, decomposed; see `dbo_runtime.adapters.communication.LatentAttention`."""

    is_gated = False  # `check_attention` refuses gates

    def __init__(self, module: MultiHeadLatentAttentionWrapper) -> None:
        self.has_latent = module.q_lora_rank is not None
        self._module = module
        self._layer = module.mla_attn

    def get_slots(self) -> torch.Tensor | None:
        """Return the cache slots of this micro-batch's tokens [tokens]; None in a profiling run."""
        slots: torch.Tensor | None = get_attention_context(self._layer.layer_name)[3]
        return slots

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Project *x* [tokens, hidden] -> [tokens, q_lora_rank + kv_lora_rank + rotary]."""
        latent: torch.Tensor = self._module.fused_qkv_a_proj(x)[0]
        return latent

    def write_keys(
        self, latent: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate the keys, and write them to the cache -> [tokens, kv_lora_rank], [tokens, 1, rotary]."""
        keys, rotary = self.make_keys(latent, positions)
        self._write(keys, rotary, slots)
        return keys, rotary

    def divide(self) -> DividedAttention:
        """Return the parts for nano-batches: keys and queries are made token-wise, and the cache is written at once."""
        return DividedAttention(self._project, self._write_and_attend, self.project_out, taken=3)

    def make_keys(self, latent: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate the keys -> [tokens, kv_lora_rank], [tokens, 1, rotary].

        A kernel that rotates in place only changes columns of *latent* that no other op reads.
        """
        module = self._module
        own = latent[:, module.q_lora_rank :] if self.has_latent else module.kv_a_proj_with_mqa(latent)[0]
        keys, rotary = own.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
        keys = module.kv_a_layernorm(keys)
        return keys, self._rotate(positions, rotary.unsqueeze(1))

    def make_queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the queries -> [tokens, heads, head]."""
        module = self._module
        if self.has_latent:
            queries = module.q_b_proj(module.q_a_layernorm(latent[:, : module.q_lora_rank]))[0]
        else:
            queries = module.q_proj(latent)[0]
        queries = queries.view(-1, module.num_heads, module.qk_head_dim)
        rotated = queries[..., module.qk_nope_head_dim :]
        queries[..., module.qk_nope_head_dim :] = self._rotate(positions, rotated)
        result: torch.Tensor = queries
        return result

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attend to the cache and, in a prefill, to the new keys -> [tokens, heads * head]."""
        module = self._module
        attended = torch.empty(
            (queries.shape[0], module.num_heads * module.v_head_dim), dtype=queries.dtype, device=queries.device
        )
        _attend_with_hooks(self._layer.layer_name, queries, keys, rotary, attended)
        return attended

    def project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """Project back [tokens, heads * head] -> [tokens, hidden]."""
        out: torch.Tensor = self._module.o_proj(attended)[0]
        return out

    def _project(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        latent = self.project(x) if self.has_latent else x
        keys, rotary = self.make_keys(latent, positions)
        return self.make_queries(latent, positions), keys, rotary

    def _write_and_attend(self, queries: torch.Tensor, keys: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        self._write(keys, rotary, self.get_slots())
        return self.attend(queries, keys, rotary)

    def _write(self, keys: torch.Tensor, rotary: torch.Tensor, slots: torch.Tensor | None) -> None:
        layer = self._layer
        if slots is not None:
            layer.impl.do_kv_cache_update(keys, rotary, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)

    def _rotate(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Rotate *x* [tokens, heads, rotary] by its positions.

        The scaled embedding requires keys, too, so it gets keys without heads.
        """
        rotary = self._module.rotary_emb
        rotated: torch.Tensor = rotary(positions, x, x[:, :0] if type(rotary).__name__ == PAIRED else None)[0]
        return rotated


def _attend(
    layer_name: str, queries: torch.Tensor, keys: torch.Tensor, rotary: torch.Tensor, attended: torch.Tensor
) -> None:
    metadata, layer, cache, _ = get_attention_context(layer_name)
    layer.forward_impl(queries, keys, rotary, cache, metadata, output=attended)


_attend_with_hooks = maybe_transfer_kv_layer(_attend)  # hooks of a KV connector, as around vLLM's own op
