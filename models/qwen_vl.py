"""The vision encoders of Qwen2.5-VL and Qwen3-VL.

`comm` reduces one micro-batch's attention (or MLP) while `compute` runs the next one's, or prepares its images. The
host prepares images while the device still runs the previous micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import add
from typing import Any

from dbo_models.collectives import record_reduce
from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline
from dbo_runtime.program import ProgramBuilder, Value

# Keys of an encoder's metadata for each kind of attention: cumulative, maximum and individual sequence lengths.
FULL = ("cu_seqlens", "max_seqlen_full", "sequence_lengths_full")
WINDOW = ("cu_window_seqlens", "max_seqlen_window", "sequence_lengths_window")
ONLY = ("cu_seqlens", "max_seqlen", "sequence_lengths")


class Qwen25VisionAdapter:
    """Splits an encoder whose layers attend within windows, and some within full images."""

    def decline(self, encoder: Any) -> Decline | None:
        """Return why this encoder cannot be split, or None."""
        return check_encoder_parts(encoder, "Qwen2_5_Vision", "Qwen2_5_Vision")

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        """Return the approximate number of operations for an image or a video."""
        full = len(encoder.fullatt_block_indexes)
        window = min(grid[1] * grid[2], (encoder.window_size // encoder.patch_size) ** 2)
        return estimate_linear_flops(encoder, grid) + sum(
            layers * estimate_attention_flops(encoder, grid, length)
            for layers, length in ((full, grid[1] * grid[2]), (len(encoder.blocks) - full, window))
        )

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Collectives, pixels: Value, grids: Value) -> Value:
        """Declare one micro-batch: patches in, embeddings out."""
        meta = p.compute("prepare", encoder.prepare_encoder_metadata, grids)
        x = p.compute("embed", partial(_embed_in_windows, encoder), pixels, meta)
        for index, block in enumerate(encoder.blocks):
            full = index in encoder.fullatt_block_indexes
            with p.layer(index):
                attention = collectives.without_reduce(partial(_attend, block, FULL if full else WINDOW))
                part = p.compute("attention" if full else "window_attention", attention, x, meta)
                part = record_reduce(p, "attn_reduce", collectives, part)
                normed, x = p.compute("mlp_norm", block.norm2, x, part, overwrites=(x, part), outputs=2)
                part = p.compute("mlp", collectives.without_reduce(block.mlp), normed)
                part = record_reduce(p, "mlp_reduce", collectives, part)
                x = p.compute("mlp_add", add, x, part)
        x = p.compute("merger", collectives.without_reduce(partial(_merge, encoder.merger)), x)
        x = record_reduce(p, "merger_reduce", collectives, x)
        embeddings: Value = p.compute("restore", _restore, x, meta)
        return embeddings


class Qwen3VisionAdapter:
    """Splits an encoder whose layers attend within full images. Some also feed the language model (deepstack)."""

    def decline(self, encoder: Any) -> Decline | None:
        """Return why this encoder cannot be split, or None."""
        return check_encoder_parts(encoder, "Qwen3_Vision", "Qwen2_5_Vision")  # it uses Qwen2.5-VL's attention

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        """Return the approximate number of operations for an image or a video."""
        attention = estimate_attention_flops(encoder, grid, grid[1] * grid[2])
        return estimate_linear_flops(encoder, grid) + len(encoder.blocks) * attention

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Collectives, pixels: Value, grids: Value) -> Value:
        """Declare one micro-batch: patches in, embeddings out."""
        meta = p.compute("prepare", encoder.prepare_encoder_metadata, grids)
        x = p.compute("embed", partial(_embed_in_places, encoder), pixels, meta)
        features = []
        for index, block in enumerate(encoder.blocks):
            with p.layer(index):
                part = p.compute("attention", collectives.without_reduce(partial(_attend, block, ONLY)), x, meta)
                x = p.compute("attn_add", add, x, record_reduce(p, "attn_reduce", collectives, part))
                part = p.compute("mlp", collectives.without_reduce(partial(_norm_and_run, block)), x)
                x = p.compute("mlp_add", add, x, record_reduce(p, "mlp_reduce", collectives, part))
                if index in encoder.deepstack_visual_indexes:
                    merger = encoder.deepstack_merger_list[encoder.deepstack_visual_indexes.index(index)]
                    part = p.compute("deepstack", collectives.without_reduce(merger), x)
                    features.append(record_reduce(p, "deepstack_reduce", collectives, part))
        x = p.compute("merger", collectives.without_reduce(encoder.merger), x)
        x = record_reduce(p, "merger_reduce", collectives, x)
        embeddings: Value = p.compute("join", _join, x, *features)
        return embeddings


def check_encoder_parts(encoder: Any, own: str, attention: str) -> Decline | None:
    """Return why an encoder cannot be decomposed: an unknown class, or attention scales kept in a buffer."""
    expected = [(encoder.merger, f"{own}PatchMerger")]
    for block in encoder.blocks:
        expected += [(block, f"{own}Block"), (block.mlp, f"{own}MLP"), (block.attn, f"{attention}Attention")]
    unknown = sorted({type(part).__name__ for part, name in expected} - {name for _, name in expected})
    if unknown:
        return Decline("its encoder's parts are not known", ", ".join(unknown))
    if any(block.attn.attn.fp8_enabled for block in encoder.blocks):
        return Decline("encoder attention in fp8, whose scales follow the batch, is not supported yet")
    return None


def estimate_linear_flops(encoder: Any, grid: Sequence[int]) -> float:
    """Return the number of operations of this rank's linear layers: two per weight and patch.

    Weights are counted by the layers' shapes, because some platforms repack weights after loading.
    """
    linear = (module for module in encoder.blocks.modules() if hasattr(module, "input_size_per_partition"))
    weights: int = sum(module.input_size_per_partition * module.output_size_per_partition for module in linear)
    return 2.0 * weights * grid[0] * grid[1] * grid[2]


def estimate_attention_flops(encoder: Any, grid: Sequence[int], length: int) -> float:
    """Return the number of operations of one layer's attention on this rank, within sequences of *length* patches."""
    width: float = encoder.hidden_size / encoder.tp_size
    return 4.0 * width * length * grid[0] * grid[1] * grid[2]


def _embed_in_windows(encoder: Any, pixels: Any, meta: Any) -> Any:
    norm = getattr(encoder, "input_norm", _cast)  # vLLM 0.23 norms pixels in the processor
    x = encoder.patch_embed(norm(pixels.to(device=encoder.device), encoder.dtype))
    patches, unit = x.shape[0], encoder.spatial_merge_unit
    return x.reshape(patches // unit, unit, -1)[meta["window_index"]].reshape(patches, 1, -1)


def _cast(pixels: Any, dtype: Any) -> Any:
    return pixels.to(dtype)


def _embed_in_places(encoder: Any, pixels: Any, meta: Any) -> Any:
    x = encoder.patch_embed(pixels.to(device=encoder.device, dtype=encoder.dtype, non_blocking=True))
    return (x + meta["pos_embeds"]).unsqueeze(1)


def _attend(block: Any, keys: tuple[str, str, str], x: Any, meta: Any) -> Any:
    cumulative, greatest, lengths = keys
    return block.attn(
        block.norm1(x),
        cu_seqlens=meta[cumulative],
        rotary_pos_emb_cos=meta["rotary_pos_emb_cos"],
        rotary_pos_emb_sin=meta["rotary_pos_emb_sin"],
        max_seqlen=meta[greatest],
        sequence_lengths=meta.get(lengths),
    )


def _norm_and_run(block: Any, x: Any) -> Any:
    return block.mlp(block.norm2(x))


def _merge(merger: Any, x: Any) -> Any:
    from torch import finfo, float16

    if x.dtype == float16:  # Qwen2.5-VL's last layer exceeds the range of fp16; vLLM clamps, too
        limit = finfo(float16).max - 1000
        x = x.clamp(-limit, limit)
    return merger(x)


def _restore(x: Any, meta: Any) -> Any:
    return x[meta["reverse_indices"]]


def _join(x: Any, *features: Any) -> Any:
    from torch import cat

    return cat((x, *features), dim=1)
