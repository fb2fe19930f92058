"""Decoders of several forms on plain torch, with what drafts look for in vLLM's modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

HIDDEN = 8
OUTSIDE = torch.ones(HIDDEN)


def tensor_model_parallel_all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks, of which there is one: as vLLM's function of this name."""
    return x


class Norm(nn.Module):
    """Norms; given a residual, adds it first, in place."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return torch.nn.functional.layer_norm(x, (HIDDEN,))
        residual += x
        return torch.nn.functional.layer_norm(residual, (HIDDEN,)), residual


class RowParallelLinear(nn.Linear):
    """A projection that reduces, if it is told to."""

    def __init__(self, reduce_results: bool = True) -> None:
        super().__init__(HIDDEN, HIDDEN)
        self.reduce_results = reduce_results


class Attention(nn.Module):
    """Depends on positions, and has a cache."""

    def __init__(self, reduce_results: bool = True, returns_bias: bool = False) -> None:
        super().__init__()
        self.kv_cache = None
        self.returns_bias = returns_bias
        self.o_proj = RowParallelLinear(reduce_results)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
        out = self.o_proj(hidden_states * positions[:, None])
        return (out, None) if self.returns_bias else out


class Mlp(nn.Module):
    def __init__(self, reduce_results: bool = True) -> None:
        super().__init__()
        self.down_proj = RowParallelLinear(reduce_results)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(x))


class Layer(nn.Module):
    """What all have."""

    def __init__(self, index: int, **options: bool) -> None:
        super().__init__()
        self.layer_idx = index
        self.norm = Norm()
        self.self_attn = Attention(**options)
        self.mlp = Mlp(options.get("reduce_results", True))


class ScaledLayer(Layer):
    """Adds scaled blocks itself."""

    residual_multiplier: float

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.residual_multiplier = 0.22

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(positions=positions, hidden_states=self.norm(x)) * self.residual_multiplier
        return x + self.mlp(x) * self.residual_multiplier


class FusedLayer(Layer):
    """Its norms add the residual."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.second_norm = Norm()

    def forward(self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, x = x, self.norm(x)
        else:
            x, residual = self.norm(x, residual)
        x, residual = self.second_norm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


class ParallelLayer(Layer):
    """Reduces the sum of attention and MLP itself."""

    def __init__(self, index: int) -> None:
        super().__init__(index, reduce_results=False, returns_bias=True)
        self.tp_size = 1

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        attended, bias = self.self_attn(positions, normed)
        both = attended + self.mlp(normed)
        if bias is not None:
            both = both + bias
        if self.tp_size > 1:
            both = tensor_model_parallel_all_reduce(both)
        return x + both


class AlternatingLayer(Layer):
    """Has no norm in every other layer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.is_normed = index % 2 == 1

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.self_attn(positions, self.norm(x) if self.is_normed else x)
        return self.mlp(x)


class BatchedLayer(Layer):
    """Has a dimension for a batch around its MLP."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(positions, self.norm(x))
        first = x[:, :4]
        halves = self.mlp(x[None])[0]
        return halves + x + torch.cat([first, first], dim=-1)


class OutsideLayer(Layer):
    """Adds a tensor that the model does not hold."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.self_attn(positions, x)) + OUTSIDE


class Decoder(nn.Module):
    def __init__(self, layer: type[nn.Module], layers: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: {"embedding_multiplier": 12.5}, embedding_multiplier=12.5)
        self.is_fused = layer is FusedLayer
        self.layers = nn.ModuleList(layer(index) for index in range(layers))
        self.norm = Norm()

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual = None
        if not self.is_fused:
            x *= self.config.embedding_multiplier
        for layer in self.layers:
            x, residual = layer(positions, x, residual) if self.is_fused else (layer(positions, x), None)
        return self.norm(x, residual)[0] if self.is_fused else self.norm(x)[...]


class Model(nn.Module):
    """As vLLM calls models: token ids, positions, tensors of another stage, embedded tokens."""

    def __init__(self, layer: type[nn.Module], layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(layer, layers)

    def forward(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any
    ) -> torch.Tensor:
        return self.model(positions, inputs_embeds)


class SkippingDecoder(Decoder):
    """Its third layer reads the first one's result, too."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](positions, x)
        second = self.layers[1](positions, first)
        return self.norm(self.layers[2](positions, second + 0) + self.layers[3](positions, first))


class ShiftingDecoder(Decoder):
    """Computes other positions and hidden states in front of all layers."""

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x, positions = x + 1, positions * 2
        for layer in self.layers:
            x = layer(positions, x)
        return self.norm(x)
