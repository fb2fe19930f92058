"""vllm-ascend's latent attention (MLA), decomposed into projections, keys and attention. It runs all in one operator.

Follows vllm_ascend/attention/mla_v1.py of vllm-ascend 0.30.0rc2. There, decodes and prefills of a step go different
ways, by the attention metadata. So attention itself is vllm-ascend's own forward, on a copy of its implementation whose
projections return what ops before have projected.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from dbo_runtime.adapters.communication import DividedAttention
from dbo_runtime.decline import Decline

CLASS = "AscendMultiHeadLatentAttention"
IMPLEMENTATION = "AscendMLAImpl"  # context parallel and sparse attention have others


def check_attention(module: Any) -> Decline | None:
    """Return why vllm-ascend's latent attention stays one op, or None if it can be decomposed."""
    implementation = module.mla_attn.impl
    name = type(implementation).__name__
    if name != IMPLEMENTATION or "written_kv" not in inspect.signature(implementation.mla_preprocess_decode).parameters:
        return Decline("the class of latent attention runs it as one op", name)  # 0.23 has another form, too
    has_fused = implementation.enable_mlapo or implementation.fa_quant_layer
    checks = (
        (has_fused, "one kernel projects queries and keys and writes the cache"),
        (implementation.pcp_enabled, "latent attention is context parallel"),
        (implementation.o_proj.custom_op is not None, "the last projection of latent attention communicates"),
    )
    return next((Decline(what) for is_used, what in checks if is_used), None)


class AscendLatentAttention:
    """One layer's latent attention, decomposed; see `dbo_runtime.adapters.communication.LatentAttention`."""

    def __init__(self, module: Any) -> None:
        self._layer = module.mla_attn
        self._implementation = module.mla_attn.impl
        self.has_latent = self._implementation.fused_qkv_a_proj is not None
        self.is_gated = self._implementation.use_output_gate

    def get_slots(self) -> Any:
        """Return this micro-batch's attention metadata, which has its slots; None in a profiling run."""
        metadata = get_forward_context().attn_metadata
        return metadata[self._layer.layer_name] if metadata else None

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Project *x* [tokens, hidden] -> [tokens, q_lora_rank + kv_lora_rank + rotary]."""
        latent: torch.Tensor = self._implementation.fused_qkv_a_proj(x)[0]
        return latent

    def write_keys(
        self, latent: torch.Tensor, positions: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate the keys, and write them to the cache.

        Returns:
            those of prefills, which attention reads from here [prefill tokens, 1, 1, kv_lora_rank], and their rotary
            part [prefill tokens, 1, 1, rotary]. Decodes read theirs from the cache.
        """
        own, implementation = self._make_keys(latent), self._implementation
        if metadata is None:
            return own[:0], own[:0]
        cache, slots = self._layer.kv_cache, metadata.slot_mapping
        if implementation.layerwise_kv_cache_hook is not None:
            implementation.layerwise_kv_cache_hook.wait_for_layer(self._layer.layer_name)
        decodes, tokens = metadata.num_decode_tokens, metadata.num_actual_tokens
        if metadata.num_decodes:
            rows = metadata.decode
            implementation.exec_kv_decode(own[:decodes], rows.cos, rows.sin, cache, slots[:decodes])
        if not metadata.num_prefills:
            return own[:0], own[:0]
        cos, sin = (_take(rows, tokens - decodes) for rows in (metadata.prefill.cos, metadata.prefill.sin))
        rotary, keys = implementation.exec_kv_prefill(
            own[decodes:tokens], cos, sin, cache, slots[decodes:tokens], attn_metadata=metadata
        )
        return keys, rotary

    def make_queries(self, latent: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the queries, which attention rotates -> [tokens, heads * head]."""
        implementation = self._implementation
        if self.has_latent:
            latent = implementation.q_a_layernorm(latent[:, : implementation.q_lora_rank])
        queries: torch.Tensor = implementation.q_proj(latent)[0]
        return queries

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attend to the cache and, in a prefill, to the new keys -> [tokens, heads * head]."""
        cache = self._layer.kv_cache
        return self._attend(
            queries,
            queries[:, :0],  # the keys are made
            layerwise_kv_cache_hook=None,  # `write_keys` has waited
            exec_kv_decode=lambda *_, **__: (cache[1], cache[0]),
            exec_kv_prefill=lambda *_, **__: (rotary, keys),
        )

    def project_out(self, attended: torch.Tensor, *gate: torch.Tensor) -> torch.Tensor:
        """Project back [tokens, heads * head] -> [tokens, hidden]. A *gate* [tokens, heads * head] scales first."""
        for values in gate:
            attended = attended * torch.sigmoid(values)
        out: torch.Tensor = self._implementation.o_proj(attended)[0]
        return out

    def divide(self) -> DividedAttention:
        """Return the parts for nano-batches: latents and queries are made token-wise, keys in attention."""
        return DividedAttention(self._project, self._attend, self.project_out, taken=2, kept=int(self.is_gated))

    def _project(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        latent = self.project(x) if self.has_latent else x
        gate = (self._implementation.g_proj(x.contiguous())[0],) if self.is_gated else ()
        return self.make_queries(latent, positions), self._make_keys(latent), *gate

    def _make_keys(self, latent: torch.Tensor) -> torch.Tensor:
        """Return keys before their norm [tokens, kv_lora_rank + rotary]."""
        implementation = self._implementation
        if self.has_latent:
            return latent[:, implementation.q_lora_rank :].contiguous()
        keys: torch.Tensor = implementation.kv_a_proj_with_mqa(latent)[0]
        return keys

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, **replaced: Any) -> torch.Tensor:
        """Run vllm-ascend's forward, with these results of projections -> [tokens, heads * head]."""
        core, layer = copy(self._implementation), self._layer
        core.fused_qkv_a_proj, core.kv_a_proj_with_mqa = None, _return(keys)
        core.q_proj = core.o_proj = _keep
        core.use_output_gate = False
        for name, value in replaced.items():
            setattr(core, name, value)
        attended = queries.new_empty((queries.shape[0], core.num_heads * core.v_head_dim))
        core.forward(layer.layer_name, queries, layer.kv_cache, self.get_slots(), attended)
        return attended


def _take(rows: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if rows is None else rows[:count]


def _keep(x: torch.Tensor, **_: bool) -> tuple[torch.Tensor]:
    return (x,)


def _return(keys: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor]]:
    return lambda _: (keys,)
