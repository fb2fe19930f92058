"""The decoder structure that many model families share, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, NamedTuple

from dbo_models.collectives import record_gather, record_reduce
from dbo_models.experts import ExpertsRecorder
from dbo_runtime.adapter import Collectives, LatentAttention, name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.program import Program, ProgramBuilder, Value

Attend = Callable[[Any, Any, Any], Any]
"""Calls an attention module: (module, positions [tokens], x [tokens, hidden]) -> [tokens, hidden]."""

Route = Callable[[Any, Any], Any]
"""Computes the router's logits: (MoE block, x [tokens, hidden]) -> [tokens, experts]."""

RecordLayer = Callable[[Any, "Stream"], "Stream"]
"""Declares one layer: (layer, stream) -> the stream after it."""

WithoutReduce = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a module without its final all-reduce."""

RESIDUAL = "residual"  # sent between pipeline stages with the hidden states; vLLM uses the same name


class Stream(NamedTuple):
    """The values passed from layer to layer: the hidden states, and the residual before them.

    Attributes:
        x: hidden states [tokens, hidden].
        residual: the residual, shaped like *x*; None before the first layer.
        tokens: number of tokens in all chunks, if *x* and *residual* are chunks [chunk, hidden]; otherwise None.
    """

    x: Value
    residual: Value | None = None
    tokens: Value | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        """The arguments of a norm: (x,) before the first layer, (x, residual) after it."""
        return (self.x,) if self.residual is None else (self.x, self.residual)


def call_attention(attention: Any, positions: Any, x: Any) -> Any:
    """Call an attention module with the arguments that most families use."""
    return attention(positions, x)


@dataclass(frozen=True)
class LayerRecorder:
    """Declares decoders whose norms add the residual, and the parts of their layers.

    Layers have `input_layernorm`, `self_attn` (or `attn`, `linear_attn`), `post_attention_layernorm` and `mlp` (or
    `block_sparse_moe`). Norms take (x, residual) and add before they norm. Attention and MLP end in an all-reduce.

    Attributes:
        p: builder of the micro-batch's program.
        collectives: the ranks' communication.
        positions: positions of the tokens [tokens].
        attend: calls an attention module.
        route: computes the router's logits; needed if the experts do not hold their gate.
    """

    p: ProgramBuilder
    collectives: Collectives
    positions: Value
    attend: Attend = call_attention
    route: Route | None = None

    def record_decoder(
        self, decoder: Any, x: Value, added: Sequence[Value] = (), record_layer: RecordLayer | None = None
    ) -> Value:
        """Declare a decoder, which has `layers` and a final `norm`: embedded tokens in, normed hidden states out.

        One value of *added* [tokens, hidden] is added to the result of each of the first layers. *record_layer*
        replaces the method of that name, for layers of another form between the same embedding and final norm
        (`dbo_models.forms`).

        On a pipeline stage, only the stage's layers are declared. Every stage but the first takes the `residual` as an
        input. Every stage but the last returns it, without the final norm. Both cover all tokens, not a chunk. If a
        draft model reads hidden states between layers (`aux_hidden_state_layers`), they are named outputs.
        """
        p, layers, record_layer = self.p, get_layers(decoder), record_layer or self.record_layer
        stream = Stream(x) if 0 in layers else Stream(x, p.input(RESIDUAL))
        for index, layer in layers.items():
            with p.layer(index):
                self.record_auxiliary(decoder, index, stream)
                stream = record_layer(layer, stream)
                if index < len(added):
                    stream = stream._replace(x=p.compute("add_features", add, stream.x, added[index], token_wise=True))
        if len(decoder.layers) - 1 not in layers:
            assert stream.residual is not None, "a stage has layers"
            p.output(RESIDUAL, self.gather("stage_residual_gather", stream.residual, stream.tokens))
            return self.gather("stage_gather", stream.x, stream.tokens)
        self.record_auxiliary(decoder, len(decoder.layers), stream)
        hidden = p.compute(
            "final_norm", partial(_final_norm, decoder.norm), *stream.values, overwrites=stream.values, token_wise=True
        )
        return self.gather("final_gather", hidden, stream.tokens)

    def record_auxiliary(self, decoder: Any, layers: int, stream: Stream) -> None:
        """Name the hidden states after this many layers as an output, if the decoder returns them for a draft model."""
        if layers in getattr(decoder, "aux_hidden_state_layers", ()):
            hidden = self.p.compute("auxiliary", _add_residual, *stream.values, token_wise=True)
            self.p.output(name_auxiliary(layers), self.gather("auxiliary_gather", hidden, stream.tokens))

    def record_layer(self, layer: Any, stream: Stream) -> Stream:
        """Declare one layer.

        Norms add in place on some platforms, and reduces sum in place on all, so both overwrite the values they read.
        In a sequence parallel layer, chunks are gathered before the next layer's attention.
        """
        x, residual, tokens = record_add_norm(self.p, "attn_norm", layer.input_layernorm, stream)
        x = self.record_attention(layer, self.gather("attn_gather", x, tokens))
        stream = self.record_attention_reduce(layer, Stream(x, residual, tokens))
        x, residual, tokens = record_add_norm(self.p, "mlp_norm", layer.post_attention_layernorm, stream)
        return Stream(self.record_mlp(get_mlp(layer), x, tokens), residual, tokens)

    def record_mlp(self, mlp: Any, x: Value, tokens: Value | None = None) -> Value:
        """Declare a dense MLP or a mixture of experts, [tokens, hidden] or [chunk, hidden] -> like *x*.

        *tokens* is the number of tokens in all chunks, if *x* is a chunk. The ranks share a dense MLP's weights, so for
        a chunk it runs on the tokens of all chunks.
        """
        p, collectives, route, is_moe = self.p, self.collectives, self.route, hasattr(mlp, "experts")
        moe = collectives.decompose(mlp.experts, route and partial(route, mlp), takes_chunks=True) if is_moe else None
        if moe is None and tokens is not None:
            x = p.compute(
                "mlp", partial(_run_without_collectives, mlp), self.gather("mlp_gather", x, tokens), token_wise=True
            )
            scattered: Value = p.comm("mlp_scatter", collectives.reduce_scatter, x, outputs=2, token_wise=True)[0]
            return scattered
        if moe is None:  # two names, because ops of one name are assumed to cost the same
            x = p.compute("moe" if is_moe else "mlp", collectives.without_reduce(mlp), x, token_wise=True)
        elif tokens is None:
            x = ExpertsRecorder(p, collectives, moe).record(x)
        else:
            x = ExpertsRecorder(p, collectives, moe).record_dispatch(x, tokens)
        return x if moe is not None and moe.is_sequence_parallel else self.reduce("mlp_reduce", x)

    def record_attention_reduce(self, layer: Any, stream: Stream) -> Stream:
        """Declare the reduce of attention's results [tokens, hidden], with a residual that may be a chunk.

        If vLLM's own layer is sequence parallel (arXiv:2205.05198), they are reduce-scattered to one chunk per tensor
        parallel rank. The stream stays a chunk until the next attention.
        """
        p, collectives, residual = self.p, self.collectives, stream.residual
        assert residual is not None, "a norm came before"
        if not leaves_reduce(layer):
            x = self.reduce("attn_reduce", stream.x)
            return Stream(x, self.gather("residual_gather", residual, stream.tokens))
        x, tokens = p.comm("attn_scatter", collectives.reduce_scatter, stream.x, outputs=2, token_wise=True)
        if stream.tokens is None:
            take_chunk = collectives.take_chunk
            residual, _ = p.compute(
                "residual_chunk", take_chunk, residual, outputs=2, overwrites=(residual,), token_wise=True
            )
        return Stream(x, residual, tokens)

    def record_attention(self, layer: Any, x: Value) -> Value:
        """Declare attention without its reduce [tokens, hidden] -> [tokens, hidden]: one op, or more if latent.

        It is `ordered`, because the tail of a cut request reads the KV, or the state, that its head wrote.
        """
        attention = get_attention(layer)
        latent = self.collectives.decompose_attention(attention) if self.p.has_side else None
        without_reduce = keep_reduce if leaves_reduce(layer) else self.collectives.without_reduce
        if latent is not None:
            return self.record_latent_attention(latent, without_reduce, x)
        prefix = "linear_" if hasattr(layer, "linear_attn") else ""  # names of their own: their costs differ
        module = without_reduce(partial(self.attend, attention))
        divided = record_divided(self.collectives, attention, self.attend, without_reduce, prefix)
        attended: Value = self.p.compute(f"{prefix}attention", module, self.positions, x, ordered=True, divided=divided)
        return attended

    def record_latent_attention(self, latent: LatentAttention, without_reduce: WithoutReduce, x: Value) -> Value:
        """Declare latent attention with its keys concurrent to its queries, as vllm-ascend #1353 did for decodes.

        Keys are issued first: they take less time, and attention reads them.
        """
        p = self.p
        slots = p.compute("slots", latent.get_slots)
        if latent.has_latent:
            x = p.compute("latent", latent.project, x, token_wise=True)
        keys, rotary = p.side("keys", latent.write_keys, x, self.positions, slots, outputs=2)
        queries = p.compute("queries", latent.make_queries, x, self.positions, token_wise=True)
        x = p.compute("attention", latent.attend, queries, keys, rotary, ordered=True)
        out: Value = p.compute("attn_out", without_reduce(latent.project_out), x, token_wise=True)
        return out

    def reduce(self, name: str, x: Value) -> Value:
        """Declare an all-reduce, if results have to be reduced."""
        reduced: Value = record_reduce(self.p, name, self.collectives, x)
        return reduced

    def gather(self, name: str, x: Value, tokens: Value | None) -> Value:
        """Declare the all-gather of a chunk; no chunk if *tokens* is None."""
        gathered: Value = record_gather(self.p, name, self.collectives, x, tokens)
        return gathered


def record_divided(
    collectives: Collectives, attention: Any, attend: Attend, without_reduce: WithoutReduce, prefix: str = ""
) -> Program | None:
    """Return an attention module's program, (positions, x) -> [tokens, hidden]; None if the module stays one op."""
    divided = collectives.divide_attention(attention, attend)
    if divided is None:
        return None
    p, taken = ProgramBuilder(), divided.taken
    declare, core = partial(p.compute, token_wise=True), f"{prefix}attention_core"
    positions, x = p.input("positions"), p.input("x")
    projected = declare(f"{prefix}qkv", divided.project, positions, x, outputs=taken + divided.kept)
    written = () if divided.written is None else (projected[divided.written],)
    attended = p.compute(core, divided.attend, *projected[:taken], ordered=True, overwrites=written)
    out = declare(f"{prefix}attn_out", without_reduce(divided.project_out), attended, *projected[taken:])
    return p.build(out)


def record_add_norm(p: ProgramBuilder, name: str, norm: Any, stream: Stream) -> Stream:
    """Declare a norm that first adds the residual, like vLLM's two-argument `RMSNorm`. The sum is the new residual.

    Before the first layer there is nothing to add, so *x* itself becomes the residual.
    """
    function = norm if stream.residual is not None else partial(_first_norm, norm)
    x, residual = p.compute(name, function, *stream.values, overwrites=stream.values, outputs=2, token_wise=True)
    return Stream(x, residual, stream.tokens)


def get_layers(decoder: Any) -> dict[int, Any]:
    """Return the decoder layers that are on this rank, by number: all layers, or those of a pipeline stage.

    vLLM replaces the other layers with placeholders.
    """
    here = slice(getattr(decoder, "start_layer", 0), getattr(decoder, "end_layer", None))
    return {index: decoder.layers[index] for index in range(len(decoder.layers))[here]}


def get_attention(layer: Any) -> Any:
    """Return a layer's attention, or its linear attention."""
    names = ("self_attn", "attn", "linear_attn")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def get_mlp(layer: Any) -> Any:
    """Return a layer's MLP, or its mixture of experts."""
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def leaves_reduce(layer: Any) -> bool:
    """Return whether attention leaves its reduce to the layer, as in layers with vLLM's sequence parallel MoE.

    Checks the attribute names of DeepSeek's, Qwen3-Next's and MiniMax-M3's layers.
    """
    names = ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe", "use_sequence_parallel")
    return any(getattr(layer, name, False) for name in names)


def check_attention(decoder: Any) -> Decline | None:
    """Decline dual chunk attention, which goes by a known class name."""
    attentions = map(get_attention, get_layers(decoder).values())
    uses_chunks = any(getattr(attention, "dual_chunk_attention_config", None) for attention in attentions)
    return Decline("dual chunk attention is not supported") if uses_chunks else None


def check_parts(decoder: Any, known: frozenset[str]) -> Decline | None:
    """Decline if a decoder has parts of classes that are not *known*, because they may compute something else."""
    layers = get_layers(decoder).values()
    parts = [decoder, *layers, *map(get_attention, layers), *map(get_mlp, layers)]
    unknown = ", ".join(sorted({type(part).__name__ for part in parts} - known))
    return Decline("its parts are not known", unknown) if unknown else None


def keep_reduce(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module as it is: the layer, not the module, reduces its results."""
    return module


def _run_without_collectives(mlp: Any, x: Any) -> Any:
    gate_up, _ = mlp.gate_up_proj(x)
    return mlp.down_proj(mlp.act_fn(gate_up))[0]


def _add_residual(x: Any, residual: Any = 0) -> Any:
    return x + residual  # also without a residual: makes a copy, because the first norm may overwrite x


def _first_norm(norm: Any, x: Any) -> tuple[Any, Any]:
    return norm(x), x  # the residual is x itself, so x counts as overwritten


def _final_norm(norm: Any, x: Any, residual: Any) -> Any:
    return norm(x, residual)[0]
