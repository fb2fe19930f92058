"""DeepSeek V2, V3 and R1: MLA, then a dense MLP or a mixture of experts.

What overlaps what:

- Tensor parallel, with or without expert parallel: tokens stay where they are and each layer ends in one all-reduce.
  `comm` reduces one micro-batch's attention (or MLP) while `compute` is in the next one's attention (or MLP).
- Data parallel: tokens travel to their experts. While the first micro-batch's are on their way, `compute` has the
  second one's attention; while the second one's are, the first one's shared experts and experts; while the first
  one's return, the second one's experts; and while those return, the first one's next attention.

Dense first layers overlap like the others under tensor parallel, and communicate nothing under data parallel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dbo_models.layers import record_experts, record_reduce
from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value


class DeepseekAdapter:
    """Takes vLLM's decoder layer apart at its communication."""

    def decline(self, model: Any) -> str | None:
        """Return why this model cannot be split, or None."""
        config, layers = model.config, model.model.layers
        if not hasattr(layers[0].self_attn, "mla_attn"):
            return "DeepSeek with plain attention instead of MLA is not supported"
        if hasattr(config, "index_topk"):
            return "sparse attention (DeepSeek V3.2) shares index buffers between micro-batches"
        if getattr(config, "llama_4_scaling", None) is not None:
            return "attention scaling by position is not supported"
        if str(layers[0].input_layernorm.weight.dtype) == "torch.float16":
            return "fp16 needs the decoder layer's own scaling; serve in bf16 or fp32"
        unknown = {type(layer.mlp).__name__ for layer in layers} - {"DeepseekV2MLP", "DeepseekV2MoE"}
        if unknown:
            return f"the MLP class {', '.join(sorted(unknown))} is not known"
        experts = (layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts"))
        if any(getattr(moe, "_fused_output_is_reduced", True) for moe in experts):
            return "the MoE kernel reduces its own output"
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        stream: tuple[Value, ...] = (x,)
        for index, layer in enumerate(model.model.layers):
            with p.layer(index):
                stream = record_layer(p, layer, collectives, stream, positions)
        hidden: Value = p.compute("final_norm", partial(_final_norm, model.model.norm), *stream, overwrites=stream)
        return hidden


def record_layer(
    p: ProgramBuilder, layer: Any, collectives: Collectives, stream: tuple[Value, ...], positions: Value
) -> tuple[Value, Value]:
    """Declare one layer: (x,) for the first, (x, residual) after it -> (x, residual).

    Norms add in place on some platforms, and reduces do everywhere: both overwrite what they read.
    """
    norm = layer.input_layernorm if len(stream) == 2 else partial(_first_norm, layer.input_layernorm)
    x, residual = p.compute("attn_norm", norm, *stream, overwrites=stream, outputs=2)
    attention = collectives.without_reduce(partial(_attend, layer.self_attn))
    x = p.compute("attention", attention, positions, x, ordered=True)  # a cut request reads the KV its head wrote
    x = record_reduce(p, "attn_reduce", collectives, x)
    stream = x, residual
    x, residual = p.compute("mlp_norm", layer.post_attention_layernorm, *stream, overwrites=stream, outputs=2)
    moe = collectives.take_apart(layer.mlp.experts) if hasattr(layer.mlp, "experts") else None
    if moe is not None:
        x = record_experts(p, moe, x)
    else:  # named apart, because ops that are named alike are taken to cost alike
        name = "moe" if hasattr(layer.mlp, "experts") else "mlp"
        x = p.compute(name, collectives.without_reduce(layer.mlp), x)
    return record_reduce(p, "mlp_reduce", collectives, x), residual


def _first_norm(norm: Any, x: Any) -> tuple[Any, Any]:
    return norm(x), x  # the residual is x itself, which is why x counts as overwritten


def _attend(attention: Any, positions: Any, x: Any) -> Any:
    return attention(positions, x, None)


def _final_norm(norm: Any, x: Any, residual: Any) -> Any:
    return norm(x, residual)[0]
