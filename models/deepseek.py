"""DeepSeek V2, V3, R1 and V3.2, GLM-5 and the language model of Kimi-K2.5: MLA, then a dense MLP or experts.

Attention may be sparse, over keys that an indexer chooses. Attention and its indexer are then one op.

What overlaps:

- Tensor parallel, with or without expert parallel: tokens stay on their rank and each layer ends in one all-reduce.
  `comm` reduces one micro-batch's attention (or MLP) while `compute` runs the next one's attention (or MLP).
- Data parallel: tokens are dispatched to their experts. `compute` alternates between the two micro-batches:
 the second's attention runs during the first's dispatch, the first's shared experts and experts during the second's
 dispatch, the second's experts during the first's combine, and the first's next attention during the second's combine.

Dense first layers overlap like the others under tensor parallel, and communicate nothing under data parallel.
"""

from __future__ import annotations

from typing import Any

from dbo_models.layers import LayerRecorder, get_layers
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value


class DeepseekAdapter:
    """Splits vLLM's decoder layers at their communication."""

    takes_stages = True

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        config, layers = model.config, list(get_layers(model.model).values())
        if not hasattr(layers[0].self_attn, "mla_attn"):
            return Decline("DeepSeek with plain attention instead of MLA is not supported")
        dtype = str(layers[0].input_layernorm.weight.dtype).removeprefix("torch.")
        if (known := self.decline_config(config, dtype)) is not None:
            return known
        unknown = {type(layer.mlp).__name__ for layer in layers} - {"DeepseekV2MLP", "DeepseekV2MoE"}
        if unknown:
            return Decline("its MLP is not known", ", ".join(sorted(unknown)))
        indexers = [getattr(layer.self_attn, "indexer", None) for layer in layers]
        if any(getattr(indexer, "topk_indices_buffer", None) is not None for indexer in indexers):
            reason = "sparse attention (DeepSeek V3.2) shares index buffers between micro-batches"
            return Decline(reason, only_micro=True)
        return None

    def decline_config(self, config: Any, dtype: str) -> Decline | None:
        """Return why no model of this configuration can be split, or None."""
        if getattr(config, "llama_4_scaling", None) is not None:
            return Decline("attention scaling by position is not supported")
        if dtype == "float16":
            return Decline("fp16 needs the decoder layer's own scaling; serve in bf16 or fp32")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        hidden: Value = LayerRecorder(p, collectives, positions, attend).record_decoder(model.model, x)
        return hidden


class KimiK25Adapter(DeepseekAdapter):
    """Splits the language model of Kimi-K2.5. Its vision encoder stays unsplit."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        return super().decline(model.language_model)

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        return super().record(p, model.language_model, collectives, x, positions)


def attend(attention: Any, positions: Any, x: Any) -> Any:
    """Call MLA. Its third argument, a scaling by position, is None: no supported model has one."""
    return attention(positions, x, None)
