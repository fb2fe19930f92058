"""Decoder layers with attention residuals (arXiv:2603.15031), as vllm-ascend's Kimi-K3 has them.

Layers are in blocks. What attention and MLP or experts read is a mix of the sums of earlier blocks, and of the sum so
far. Sums of blocks are kept in a bank [tokens, blocks, hidden], of which each kernel reads the rows that are filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from dbo_models.layers import LayerRecorder
from dbo_runtime.program import ProgramBuilder, Value


class Sums(NamedTuple):
    """The values passed from layer to layer.

    Attributes:
        total: sum so far [tokens, hidden].
        bank: sums of blocks [tokens, blocks, hidden].
        added: result that the next kernel adds to the sum first [tokens, hidden]; none before the first layer.
    """

    total: Value
    bank: Value
    added: tuple[Value, ...] = ()


@dataclass(frozen=True)
class ResidualRecorder:
    """Declares layers with attention residuals.

    Attributes:
        layers: recorder of what is in layers of any form.
        tokens: number of tokens in all chunks, if sums are of this rank's chunk only; otherwise None.
    """

    layers: LayerRecorder
    tokens: Value | None = None

    @property
    def p(self) -> ProgramBuilder:
        """Builder of the micro-batch's program."""
        p: ProgramBuilder = self.layers.p
        return p

    def record_begin(self, x: Value, blocks: int) -> Sums:
        """Declare the bank of that many *blocks*; *x* are the embedded tokens [tokens, hidden]."""
        return Sums(x, self.p.compute("bank", partial(_make_bank, blocks), x, token_wise=True))

    def record_end(self, decoder: Any, sums: Sums, blocks: int) -> Value:
        """Declare the mix of all *blocks*, which no norm follows."""
        run = partial(_mix, decoder.output_attn_res_proj, decoder.output_attn_res_norm, blocks, None)
        mixed = self.p.compute("final_mix", run, sums.total, sums.bank, *sums.added, outputs=2, token_wise=True)
        hidden: Value = mixed[0]
        return hidden

    def record_layer(self, layer: Any, name: str, sums: Sums) -> Sums:
        """Declare one layer, whose attention is the op *name*.

        Where a block begins, the sum before it goes to the bank, and attention's result is the new sum itself.
        """
        p, writes = self.p, layer.is_block_write_layer
        mix, before = partial(_mix_for_attention, layer), (sums.total, sums.bank, *sums.added)
        written = (sums.bank,) if writes else ()
        x, kept = p.compute("attn_mix", mix, *before, overwrites=written, outputs=2, token_wise=True)
        x = self.record_attention(layer, name, x)
        mix, before = partial(_mix_for_mlp, layer), (x, kept) if writes else (kept, sums.bank, x)
        returned = (x,) if writes else ()
        x, total = p.compute("mlp_mix", mix, *before, overwrites=returned, outputs=2, token_wise=True)
        x = self.layers.record_mlp(layer.mlp, x, self.tokens)
        return Sums(total, kept if writes else sums.bank, (x,))

    def record_attention(self, layer: Any, name: str, x: Value) -> Value:
        """Declare attention and its communication, [tokens, hidden] or [chunk, hidden] -> like *x*."""
        p, layers, run = self.p, self.layers, partial(self.layers.attend, layer.self_attn)
        if self.tokens is None:
            x = p.compute(name, layers.collectives.without_reduce(run), layers.positions, x, ordered=True)
            reduced: Value = layers.reduce("attn_reduce", x)
            return reduced
        x = layers.gather("attn_gather", x, self.tokens)
        x = p.compute(name, run, layers.positions, x, ordered=True)  # leaves its reduce to the layer
        chunk: Value = p.comm("attn_scatter", layers.collectives.reduce_scatter, x, outputs=2, token_wise=True)[0]
        return chunk


def _make_bank(blocks: int, x: Any) -> Any:
    return x.new_empty(x.shape[0], blocks, x.shape[1])


def _mix_for_attention(layer: Any, total: Any, bank: Any, *added: Any) -> tuple[Any, Any]:
    """Return what attention reads, and the sum so far; where a block begins, the bank that has taken it."""
    mixed, total, _ = layer.prepare_attn_residual(total, bank, *added)
    return mixed, bank if layer.is_block_write_layer else total


def _mix_for_mlp(layer: Any, *sums: Any) -> tuple[Any, Any]:
    blocks = layer.prev_valid_blocks + layer.is_block_write_layer
    return _mix(layer.mlp_res_proj, layer.mlp_res_norm, blocks, layer.post_attention_layernorm, *sums)


def _mix(
    query: Any, norm: Any, blocks: int, out_norm: Any, total: Any, bank: Any, added: Any = None
) -> tuple[Any, Any]:
    """Return the mix, normed unless *out_norm* is None, and the sum."""
    from torch import ops

    mix = partial(ops._C_ascend.attn_res_fwd, total, added, bank, query.weight, norm.weight, norm.variance_epsilon)
    mixed, total, _ = mix(blocks) if out_norm is None else mix(blocks, out_norm.weight, out_norm.variance_epsilon)
    return mixed, total
