"""DeepSeek V4 (Flash and Pro): sparse attention over compressed keys, and experts, joined by hyper-connections.

The classes are vllm-ascend's. Attention is one op, which writes and reads up to five caches. The first layers choose
experts by token id. In models that see images all do; their steps are cut into nano-batches only.

With tensor parallelism, each layer has two all-reduces. Only the reduced tensors are on `comm`: the residual streams,
which are several times as large, stay on `compute`.

Proven inside vllm-ascend 0.30.0rc2 and 0.23.0.post1 on a stand-in for CANN only (tests/ascend/test_deepseek_v4.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from dbo_models.collectives import record_gather
from dbo_models.forms import get_decoder
from dbo_models.hyper_connections import DEEPSEEK_V4, StreamRecorder, chooses_by_token, shares_out_tokens
from dbo_models.layers import check_parts, get_layers
from dbo_runtime.adapter import INPUT_IDS, KEPT, Collectives, name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

LAYERS = {"DeepseekV4DecoderLayer", "DeepseekV2DecoderLayer"}  # of vllm-ascend 0.30 and 0.23
KNOWN = frozenset({"DeepseekV4Model", "DeepseekV4Attention", "DeepseekV4MoE", *LAYERS})


class DeepseekV4Adapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        if not type(decoder).__module__.startswith("vllm_ascend."):
            return Decline("DeepSeek V4 is split as vllm-ascend's class only")
        layers = get_layers(decoder).values()
        if any(shares_out_tokens(each) and not each.use_sequence_parallel_moe for each in layers):
            return Decline("context parallel sparse attention (enable_dsa_cp) of DeepSeek V4 without FlashComm")
        return self.decline_config(decoder.config)

    def decline_config(self, config: Any, dtype: str = "") -> Decline | None:
        """Return why no model of this configuration can be split, or has micro-batches; None if there is no reason."""
        if getattr(config, "use_index_cache", False):
            return Decline("layers of DeepSeek V4 pass on which keys were chosen (use_index_cache)")
        images = Decline("tokens of an image see each other in DeepSeek V4", only_micro=True)
        return images if getattr(config, "vision_n_layers", 0) > 0 else None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        decoder = get_decoder(model)
        layers, tokens = get_layers(decoder), None
        ids = p.input(INPUT_IDS) if any(chooses_by_token(layer.mlp) for layer in layers.values()) else None
        # Context parallel attention takes a chunk of the step's tokens, which no chunks of nano-batches make up.
        token_wise = not any(shares_out_tokens(layer) for layer in layers.values())
        if getattr(decoder, "use_sequence_parallel_moe", False):
            x, tokens = p.compute("chunk", collectives.take_chunk, x, outputs=2, token_wise=token_wise)
            if ids is not None:
                ids, _ = p.compute("chunk_ids", collectives.take_chunk, ids, outputs=2, token_wise=token_wise)
        streams = p.compute("streams", partial(_make_streams, decoder.hc_mult), x, token_wise=token_wise)
        recorder = StreamRecorder(p, collectives, DEEPSEEK_V4, positions, ids, tokens, token_wise)
        for index, layer in layers.items():
            with p.layer(index):
                streams = recorder.record_layer(layer, streams)
                if index + 1 in getattr(decoder, "aux_hidden_state_layers", ()):
                    mean = p.compute("auxiliary", methodcaller("mean", dim=1), streams, token_wise=token_wise)
                    mean = record_gather(p, "auxiliary_gather", collectives, mean, tokens, token_wise)
                    p.output(name_auxiliary(index + 1), mean)
        streams = record_gather(p, "final_gather", collectives, streams, tokens, token_wise)
        if getattr(decoder, "_needs_mtp_hidden_states", True):  # in vllm-ascend 0.23, always
            p.output(KEPT, streams)
        hidden: Value = p.compute("head", partial(_finish, decoder), streams, token_wise=True)
        return hidden

    def keep_output(self, model: Any, parts: Sequence[Any]) -> None:
        """Store the streams of all tokens before the head in the model's buffer, where MTP layers read them."""
        decoder = get_decoder(model)
        if decoder._mtp_hidden_buffer is None:
            from torch import empty

            shape, dtype = decoder._mtp_buffer_shape, decoder._mtp_buffer_dtype
            decoder._mtp_hidden_buffer = empty(shape, dtype=dtype, device=decoder.device)
        first = 0
        for part in parts:
            decoder._mtp_hidden_buffer[first : first + part.shape[0]].copy_(part.flatten(1))
            first += part.shape[0]


def _make_streams(count: int, x: Any) -> Any:
    return x.unsqueeze(1).repeat(1, count, 1)


def _finish(decoder: Any, streams: Any) -> Any:
    return decoder.norm(decoder.hc_head(streams, decoder.hc_head_fn, decoder.hc_head_scale, decoder.hc_head_base))
