"""DeepSeek V4.1: sparse attention to keys that layers share, experts and an engram, joined by hyper-connections.

The classes are vllm-ascend's. Layers pass on to later ones which keys an indexer has chosen. So attention, with its
indexer and compressor, is one op for all tokens of the step, which is cut into nano-batches only. A part of a layer
reads the mix of the residual streams that the part before it has decided.

Proven inside vllm-ascend 0.30.0rc2 on a stand-in for CANN only (tests/ascend/test_deepseek_v41.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import methodcaller
from typing import Any

from dbo_models.collectives import record_gather
from dbo_models.deepseek_v4 import DeepseekV4Adapter
from dbo_models.engram import HAS_ROWS, add_rows, list_engrams, name_rows, take_rows
from dbo_models.forms import get_decoder
from dbo_models.hyper_connections import DEEPSEEK_V41, StreamRecorder, chooses_by_token
from dbo_models.layers import check_parts, get_layers
from dbo_runtime.adapter import INPUT_IDS, KEPT, Collectives, name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

KNOWN = frozenset({"DeepseekV41Model", "DeepseekV41DecoderLayer", "DeepseekV41Attention", "DeepseekV41MoE"})


class DeepseekV41Adapter:
    """Splits vllm-ascend's decoder layers at their communication."""

    keep_output = DeepseekV4Adapter.keep_output  # of streams, for layers that draft

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        decoder = get_decoder(model)
        unknown: Decline | None = check_parts(decoder, KNOWN)
        if unknown is not None:
            return unknown
        if not type(decoder).__module__.startswith("vllm_ascend."):
            return Decline("DeepSeek V4.1 is split as vllm-ascend's class only")
        return self.decline_config(decoder.config)

    def decline_config(self, config: Any, dtype: str = "") -> Decline:
        """Return why no model of this architecture has micro-batches."""
        return Decline("layers of DeepSeek V4.1 pass on which keys were chosen", only_micro=True)

    def take_arguments(self, model: Any, given: Mapping[str, Any], tokens: int) -> dict[str, Any] | Decline:
        """Return the rows of each engram, and which tokens have rows; or why there are none."""
        rows: dict[str, Any] | Decline = take_rows(get_decoder(model), given, tokens)
        return rows

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: embedded tokens in, normed hidden states out."""
        decoder = get_decoder(model)
        layers, engrams, tokens = get_layers(decoder), list_engrams(decoder), None
        names = [INPUT_IDS] if any(chooses_by_token(layer.mlp) for layer in layers.values()) else []
        names += [HAS_ROWS, *map(name_rows, engrams)] if engrams else []
        given = {name: p.input(name) for name in names}
        if decoder.use_sequence_parallel:
            take = partial(p.compute, outputs=2, token_wise=True)
            x, tokens = take("chunk", collectives.take_chunk, x)
            given = {name: take(f"chunk_{name}", collectives.take_chunk, one)[0] for name, one in given.items()}
        streams, mix = p.compute("streams", partial(_make_streams, decoder.hc_mult), x, outputs=2, token_wise=True)
        recorder = StreamRecorder(p, collectives, DEEPSEEK_V41, positions, given.get(INPUT_IDS), tokens)
        for index, layer in layers.items():
            with p.layer(index):
                if index + 1 in getattr(decoder, "aux_hidden_state_layers", ()):
                    mean = p.compute("auxiliary", methodcaller("mean", dim=1), streams, token_wise=True)
                    p.output(name_auxiliary(index + 1), record_gather(p, "auxiliary_gather", collectives, mean, tokens))
                if index in engrams:
                    add = partial(add_rows, decoder, layer)
                    streams = p.compute(
                        "engram", add, streams, given[name_rows(index)], given[HAS_ROWS], token_wise=True
                    )
                streams, mix = recorder.record_delayed(layer, streams, mix)
        if decoder._mtp_hidden_buffer is not None:
            p.output(KEPT, record_gather(p, "kept_gather", collectives, streams, tokens))
        x = p.compute("collapse", layers[max(layers)].hc_collapse, streams, mix, token_wise=True)
        x = record_gather(p, "final_gather", collectives, x, tokens)
        hidden: Value = p.compute("final_norm", decoder.norm, x, token_wise=True)
        return hidden


def _make_streams(count: int, x: Any) -> tuple[Any, Any]:
    mix = x.new_zeros(x.shape[0], count).float()
    mix[:, 0] = 1.0  # the first part of the first layer reads one stream
    return x.unsqueeze(1).repeat(1, count, 1), mix
