"""Decoder layers with hyper-connections (arXiv:2409.19606).

A token has several residual streams [tokens, streams, hidden]. Attention and experts each read a mix of the streams,
and their results are spread over all streams again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dbo_models.collectives import record_gather, record_reduce
from dbo_models.deepseek import attend
from dbo_models.experts import ExpertsRecorder
from dbo_models.layers import Attend
from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value

Mix = Callable[..., tuple[Any, ...]]
"""Mixes a layer's streams [tokens, streams, hidden]: (layer, streams) -> (x, post, comb).

*x* [tokens, hidden] is normed; for a router it may come in float32, too, as a second tensor. `layer.hc_post` spreads
the result by *post* [tokens, streams] and *comb* [tokens, streams, streams]. If the part before has decided how much of
each stream is read [tokens, streams], that is a third argument, and the same for the next part is returned last.
"""


@dataclass(frozen=True)
class Form:
    """What differs between families of layers.

    Attributes:
        attend: calls attention.
        mix_for_attention: mixes the streams for attention.
        mix_for_mlp: mixes the streams for the MLP or the experts.
        attends_to_chunks: whether context parallel attention (`enable_dsa_cp`) takes and returns a chunk of the tokens.
    """

    attend: Attend
    mix_for_attention: Mix
    mix_for_mlp: Mix
    attends_to_chunks: bool = True


@dataclass(frozen=True)
class StreamRecorder:
    """Declares layers [tokens, streams, hidden] or [chunk, streams, hidden] -> like it.

    Attributes:
        p: builder of the micro-batch's program.
        collectives: the ranks' communication.
        form: the family's own part of the layers.
        positions: positions of all tokens [tokens].
        input_ids: token ids of the tokens whose streams are passed, or None if no layer reads them.
        tokens: number of tokens in all chunks, if the streams are this rank's chunk only; otherwise None.
        token_wise: whether attention takes and gives all tokens of this rank, not a chunk of them.
    """

    p: ProgramBuilder
    collectives: Collectives
    form: Form
    positions: Value
    input_ids: Value | None = None
    tokens: Value | None = None
    token_wise: bool = True

    def record_layer(self, layer: Any, streams: Value) -> Value:
        """Declare one layer."""
        return self.record_delayed(layer, streams)[0]

    def record_delayed(self, layer: Any, streams: Value, *mix: Value) -> tuple[Value, ...]:
        """Declare one layer; *mix* is how much of each stream attention reads, if the layer before has decided that.

        Returns the streams, and such a mix for the next layer.
        """
        p, form = self.p, self.form
        mixed = 3 + len(mix)
        x, post, comb, *mix_of_mlp = p.compute(
            "attn_mix", partial(form.mix_for_attention, layer), streams, *mix, outputs=mixed, token_wise=self.token_wise
        )
        x = self.record_attention(layer, x)
        streams = p.compute("attn_spread", layer.hc_post, x, streams, post, comb, token_wise=self.token_wise)
        casts = hasattr(layer, "rms_norm_cast")  # from vllm-ascend 0.30 on
        x, *rest = p.compute(
            "mlp_mix",
            partial(form.mix_for_mlp, layer),
            *(streams, *mix_of_mlp),
            outputs=mixed + casts,
            token_wise=self.token_wise,
        )
        cast, (post, comb, *next_mix) = rest[:casts], rest[casts:]
        x = self.record_mlp(layer.mlp, x, *cast)
        spread = p.compute("mlp_spread", layer.hc_post, x, streams, post, comb, token_wise=self.token_wise)
        return spread, *next_mix

    def record_attention(self, layer: Any, x: Value) -> Value:
        """Declare attention and its communication, [tokens, hidden] or [chunk, hidden] -> like *x*.

        With context parallelism (`enable_dsa_cp`), the op itself gathers chunks and reduces to chunks, on vLLM's
        communicator.
        """
        p, collectives, run = self.p, self.collectives, partial(self.form.attend, layer.self_attn)
        if self.tokens is None:
            x = p.compute("attention", collectives.without_reduce(run), self.positions, x, ordered=True)
            reduced: Value = record_reduce(p, "attn_reduce", collectives, x)
            return reduced
        if self.form.attends_to_chunks and shares_out_tokens(layer):
            attended: Value = p.compute("attention", run, self.positions, x, ordered=True)
            return attended
        x = record_gather(p, "attn_gather", collectives, x, self.tokens)
        x = p.compute("attention", run, self.positions, x, ordered=True)  # leaves its reduce to the layer
        chunk: Value = p.comm("attn_scatter", collectives.reduce_scatter, x, outputs=2, token_wise=True)[0]
        return chunk

    def record_mlp(self, mlp: Any, x: Value, *cast: Value) -> Value:
        """Declare the experts, or a dense MLP, [tokens, hidden] or [chunk, hidden] -> like *x*.

        Each rank has all weights of a dense MLP that takes a chunk. *cast* is *x* in float32, for the router. An op
        that takes only *x* casts it itself. Without a cast, a layer finds the ids of its tokens in the forward context.
        """
        p, collectives, ids = self.p, self.collectives, self.input_ids if chooses_by_token(mlp) else None
        if not hasattr(mlp, "experts"):
            run = mlp if self.tokens is not None else collectives.without_reduce(mlp)
            x = p.compute("mlp", run, x, token_wise=self.token_wise)
            return x if self.tokens is not None else record_reduce(p, "mlp_reduce", collectives, x)
        moe = collectives.decompose(mlp.experts, takes_chunks=True)
        assert moe is not None or self.tokens is None, "experts of chunks are dispatched"
        if moe is None:
            run = collectives.without_reduce(partial(_run_experts, mlp) if cast else mlp)
            x = p.compute("moe", run, x, *cast, *(() if ids is None or not cast else (ids,)), token_wise=True)
        elif self.tokens is None:
            x = ExpertsRecorder(p, collectives, moe).record(x, ids)
        else:
            x = ExpertsRecorder(p, collectives, moe, self.token_wise).record_dispatch(x, self.tokens, input_ids=ids)
        if moe is None or not moe.is_sequence_parallel:
            x = record_reduce(p, "mlp_reduce", collectives, x)
        return x


def chooses_by_token(mlp: Any) -> bool:
    """Return whether experts are chosen by token id: by a table of tokens, or others for the tokens of images."""
    return getattr(mlp, "hash", False) or getattr(getattr(mlp, "gate", None), "bias_vl", None) is not None


def shares_out_tokens(layer: Any) -> bool:
    """Return whether the layer's attention takes and returns a chunk of the tokens (`enable_dsa_cp`).

    In vllm-ascend 0.23 it does so inside layers that hand on all tokens here.
    """
    return getattr(layer, "enable_dsa_cp", False)


def _mix_for_attention(layer: Any, streams: Any) -> tuple[Any, Any, Any]:
    x, post, comb = layer.hc_pre(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base)
    return layer.input_layernorm(x), post, comb


def _mix_for_experts(layer: Any, streams: Any) -> tuple[Any, ...]:
    x, post, comb = layer.hc_pre(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base)
    normed = layer.rms_norm_cast(x) if hasattr(layer, "rms_norm_cast") else (layer.post_attention_layernorm(x),)
    return (*normed, post, comb)


def _mix_for_attention_as_told(layer: Any, streams: Any, mix: Any) -> tuple[Any, ...]:
    x, *rest = layer.hc_pre(streams, layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, mix)
    return layer.input_layernorm(x), *rest


def _mix_for_experts_as_told(layer: Any, streams: Any, mix: Any) -> tuple[Any, ...]:
    x, *rest = layer.hc_pre(streams, layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, mix)
    return *layer.rms_norm_cast(x), *rest


DEEPSEEK_V41 = Form(attend, _mix_for_attention_as_told, _mix_for_experts_as_told, attends_to_chunks=False)
"""The form of DeepSeek V4.1's layers. Context parallel attention, too, takes all tokens, and shares them out itself."""

DEEPSEEK_V4 = Form(attend, _mix_for_attention, _mix_for_experts)
"""The form of DeepSeek V4's layers, in vllm-ascend 0.30 and 0.23."""


def _run_experts(mlp: Any, x: Any, cast: Any, input_ids: Any = None) -> Any:
    return mlp(x, input_ids=input_ids, hidden_states_fp32=cast)
