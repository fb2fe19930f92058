"""The decoder structure that many model families share, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple

from dbo_models.collectives import record_gather, record_reduce
from dbo_models.experts import record_dispatch, record_experts
from dbo_runtime.adapter import Collectives, LatentAttention, name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

Attend = Callable[[Any, Any, Any], Any]
"""Calls an attention module: (module, positions [tokens], x [tokens, hidden]) -> [tokens, hidden]."""

Route = Callable[[Any, Any], Any]
"""Computes the router's logits: (MoE block, x [tokens, hidden]) -> [tokens, experts]."""

RecordLayer = Callable[[ProgramBuilder, Any, Collectives, "Stream", Value], "Stream"]
"""Declares one layer: (p, layer, collectives, stream, positions [tokens]) -> the stream after it."""

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


def record_decoder(
    p: ProgramBuilder,
    decoder: Any,
    collectives: Collectives,
    x: Value,
    positions: Value,
    attend: Attend = call_attention,
    added: Sequence[Value] = (),
    route: Route | None = None,
    declare_layer: RecordLayer | None = None,
) -> Value:
    """Declare a decoder whose norms add the residual: embedded tokens in, normed hidden states out.

    *decoder* has `layers`, each with `input_layernorm`, `self_attn` (or `linear_attn`), `post_attention_layernorm` and
    `mlp` (or `block_sparse_moe`), and a final `norm`. Norms take (x, residual) and add before they norm. Attention and
    MLP end in one all-reduce each.

    One value of *added* [tokens, hidden] is added to the result of each of the first layers. *route* is needed if the
    experts do not hold their gate. *declare_layer* replaces `record_layer`, for layers of another form between the same
    embedding and final norm (`dbo_models.forms`).

    On a pipeline stage, only the stage's layers are declared. Every stage but the first takes the `residual` as an
    input. Every stage but the last returns it, without the final norm. Both cover all tokens, not a chunk. If a draft
    model reads hidden states between layers (`aux_hidden_state_layers`), they are named outputs.
    """
    layers = get_layers(decoder)
    declare_layer = declare_layer or partial(record_layer, attend=attend, route=route)
    stream = Stream(x) if 0 in layers else Stream(x, p.input(RESIDUAL))
    for index, layer in layers.items():
        with p.layer(index):
            record_auxiliary(p, decoder, collectives, index, stream)
            stream = declare_layer(p, layer, collectives, stream, positions)
            if index < len(added):
                stream = stream._replace(x=p.compute("add_features", add, stream.x, added[index]))
    if len(decoder.layers) - 1 not in layers:
        assert stream.residual is not None, "a stage has layers"
        p.output(RESIDUAL, record_gather(p, "stage_residual_gather", collectives, stream.residual, stream.tokens))
        handed: Value = record_gather(p, "stage_gather", collectives, stream.x, stream.tokens)
        return handed
    record_auxiliary(p, decoder, collectives, len(decoder.layers), stream)
    hidden = p.compute("final_norm", partial(_final_norm, decoder.norm), *stream.values, overwrites=stream.values)
    gathered: Value = record_gather(p, "final_gather", collectives, hidden, stream.tokens)
    return gathered


def record_auxiliary(p: ProgramBuilder, decoder: Any, collectives: Collectives, layers: int, stream: Stream) -> None:
    """Name the hidden states after this many layers as an output, if the decoder returns them for a draft model."""
    if layers in getattr(decoder, "aux_hidden_state_layers", ()):
        hidden = p.compute("auxiliary", _add_residual, *stream.values)
        p.output(name_auxiliary(layers), record_gather(p, "auxiliary_gather", collectives, hidden, stream.tokens))


def record_layer(
    p: ProgramBuilder,
    layer: Any,
    collectives: Collectives,
    stream: Stream,
    positions: Value,
    attend: Attend,
    route: Route | None = None,
) -> Stream:
    """Declare one layer.

    Norms add in place on some platforms, and reduces sum in place on all, so both overwrite the values they read. In
    a sequence parallel layer, chunks are gathered before the next layer's attention.
    """
    x, residual, _ = record_add_norm(p, "attn_norm", layer.input_layernorm, stream)
    x = record_gather(p, "attn_gather", collectives, x, stream.tokens)
    name = "attention" if hasattr(layer, "self_attn") else "linear_attention"  # two names, because their costs differ
    x = record_attention(p, get_attention(layer), collectives, positions, x, attend, name, not leaves_reduce(layer))
    stream = record_attention_reduce(p, layer, collectives, Stream(x, residual, stream.tokens))
    x, residual, _ = record_add_norm(p, "mlp_norm", layer.post_attention_layernorm, stream)
    x = record_mlp(p, get_mlp(layer), collectives, x, stream.tokens, route)
    return Stream(x, residual, stream.tokens)


def record_add_norm(p: ProgramBuilder, name: str, norm: Any, stream: Stream) -> Stream:
    """Declare a norm that first adds the residual, like vLLM's two-argument `RMSNorm`. The sum is the new residual.

    Before the first layer there is nothing to add, so *x* itself becomes the residual.
    """
    function = norm if stream.residual is not None else partial(_first_norm, norm)
    x, residual = p.compute(name, function, *stream.values, overwrites=stream.values, outputs=2)
    return Stream(x, residual, stream.tokens)


def record_mlp(
    p: ProgramBuilder, mlp: Any, collectives: Collectives, x: Value, tokens: Value | None, route: Route | None
) -> Value:
    """Declare a dense MLP or a mixture of experts, [tokens, hidden] or [chunk, hidden] -> like *x*.

    The ranks share a dense MLP's weights, so for a chunk it runs on the tokens of all chunks.
    """
    is_moe = hasattr(mlp, "experts")
    moe = collectives.decompose(mlp.experts, route and partial(route, mlp), takes_chunks=True) if is_moe else None
    if moe is None and tokens is not None:
        x = record_gather(p, "mlp_gather", collectives, x, tokens)
        x = p.compute("mlp", partial(_run_without_collectives, mlp), x)
        scattered: Value = p.comm("mlp_scatter", collectives.reduce_scatter, x, outputs=2)[0]
        return scattered
    if moe is None:  # two names, because ops of one name are assumed to cost the same
        name = "moe" if is_moe else "mlp"
        x = p.compute(name, collectives.without_reduce(mlp), x)
    elif tokens is None:
        x = record_experts(p, moe, collectives, x)
    else:
        x = record_dispatch(p, moe, collectives, x, tokens)
    if moe is None or not moe.is_sequence_parallel:
        x = record_reduce(p, "mlp_reduce", collectives, x)
    return x


def record_attention_reduce(p: ProgramBuilder, layer: Any, collectives: Collectives, stream: Stream) -> Stream:
    """Declare the reduce of attention's results [tokens, hidden], with a residual that may be a chunk.

    If vLLM's own layer is sequence parallel (arXiv:2205.05198), they are reduce-scattered to one chunk per tensor
    parallel rank. The stream stays a chunk until the next attention.
    """
    assert stream.residual is not None, "a norm came before"
    if not leaves_reduce(layer):
        x = record_reduce(p, "attn_reduce", collectives, stream.x)
        return Stream(x, record_gather(p, "residual_gather", collectives, stream.residual, stream.tokens))
    x, tokens = p.comm("attn_scatter", collectives.reduce_scatter, stream.x, outputs=2)
    residual = stream.residual
    if stream.tokens is None:
        residual, _ = p.compute("residual_chunk", collectives.take_chunk, residual, outputs=2, overwrites=(residual,))
    return Stream(x, residual, tokens)


def record_attention(
    p: ProgramBuilder,
    attention: Any,
    collectives: Collectives,
    positions: Value,
    x: Value,
    attend: Attend,
    name: str = "attention",
    reduces: bool = True,
) -> Value:
    """Declare attention without its reduce [tokens, hidden] -> [tokens, hidden]: one op, or more if latent.

    It is `ordered`, because the tail of a cut request reads the KV, or the state, that its head wrote. *reduces* says
    whether the module ends in a reduce.
    """
    latent = collectives.decompose_attention(attention) if p.has_side else None
    without_reduce = collectives.without_reduce if reduces else _keep
    if latent is None:
        attended: Value = p.compute(name, without_reduce(partial(attend, attention)), positions, x, ordered=True)
        return attended
    return record_latent_attention(p, latent, without_reduce, positions, x)


def record_latent_attention(
    p: ProgramBuilder,
    latent: LatentAttention,
    without_reduce: Callable[[Callable[..., Any]], Callable[..., Any]],
    positions: Value,
    x: Value,
) -> Value:
    """Declare latent attention with its keys concurrent to its queries, as vllm-ascend #1353 did for decodes.

    Keys are issued first: they take less time, and attention reads them.
    """
    slots = p.compute("slots", latent.get_slots)
    if latent.has_latent:
        x = p.compute("latent", latent.project, x)
    keys, rotary = p.side("keys", latent.write_keys, x, positions, slots, outputs=2)
    queries = p.compute("queries", latent.make_queries, x, positions)
    x = p.compute("attention", latent.attend, queries, keys, rotary, ordered=True)
    out: Value = p.compute("attn_out", without_reduce(latent.project_out), x)
    return out


def get_layers(decoder: Any) -> dict[int, Any]:
    """Return the decoder layers that are on this rank, by number: all layers, or those of a pipeline stage.

    vLLM replaces the other layers with placeholders.
    """
    here = slice(getattr(decoder, "start_layer", 0), getattr(decoder, "end_layer", None))
    return {index: decoder.layers[index] for index in range(len(decoder.layers))[here]}


def get_attention(layer: Any) -> Any:
    """Return a layer's attention, or its linear attention."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn


def get_mlp(layer: Any) -> Any:
    """Return a layer's MLP, or its mixture of experts."""
    return layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe


def leaves_reduce(layer: Any) -> bool:
    """Return whether attention leaves its reduce to the layer, as in layers with vLLM's sequence parallel MoE.

    Checks the attribute names of DeepSeek's, Qwen3-Next's and MiniMax-M3's layers.
    """
    names = ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe", "use_sequence_parallel")
    return any(getattr(layer, name, False) for name in names)


def check_parts(decoder: Any, known: frozenset[str]) -> Decline | None:
    """Decline if a decoder has parts of classes that are not *known*, because they may compute something else."""
    layers = get_layers(decoder).values()
    parts = [decoder, *layers, *map(get_attention, layers), *map(get_mlp, layers)]
    unknown = ", ".join(sorted({type(part).__name__ for part in parts} - known))
    return Decline("its parts are not known", unknown) if unknown else None


def _keep(module: Callable[..., Any]) -> Callable[..., Any]:
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
