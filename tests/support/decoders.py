"""A decoder on plain numbers, of which a stage of a pipeline has some layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

LAYERS = 5


class Missing:
    """Replaces a layer of another stage, as placeholders of vLLM do: none of its parts may be used."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"layer {self.number} is on another stage")


class Norm:
    """Adds the residual, if there is one, and multiplies."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: int, residual: int | None = None) -> Any:
        if residual is None:
            return x * self.factor
        return (x + residual) * self.factor, x + residual


def make_layer(number: int) -> SimpleNamespace:
    return SimpleNamespace(
        input_layernorm=Norm(2 + number),
        self_attn=lambda positions, x: x + positions * number,
        post_attention_layernorm=Norm(3 + number),
        mlp=lambda x: x * 5 - number,
    )


def make_decoder(start: int = 0, end: int = LAYERS) -> SimpleNamespace:
    """Return what vLLM makes of a decoder of which one stage has these layers."""
    layers = [make_layer(number) if start <= number < end else Missing(number) for number in range(LAYERS)]
    return SimpleNamespace(start_layer=start, end_layer=end, layers=layers, norm=Norm(7))
