"""The conditions that measured costs hold for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dbo_runtime.vllm_plugin.api.identity import describe_model, describe_parallel
from dbo_runtime.vllm_plugin.api.versions import describe_packages
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext


class Identity(NamedTuple):
    """The conditions of measured costs, which a cost file must match.

    Attributes:
        machine: kind of machine, transport and dispatch.
        model: the model's architecture and shapes.
        parallel: number of ranks of each kind, and of hosts.
        versions: package versions; costs of other versions are used with a warning.
        bytes_per_token: bytes that a rank sends for one token.
    """

    machine: Mapping[str, str]
    model: Mapping[str, str]
    parallel: Mapping[str, int]
    versions: Mapping[str, str]
    bytes_per_token: float


def make_identity(rank: RankContext) -> Identity:
    """Return the conditions on this rank."""
    model_config = rank.vllm_config.model_config
    return Identity(
        machine={
            **rank.platform.describe_machine(),
            "transport": rank.transport,
            "dispatch": rank.dispatch,
        },
        model=describe_model(rank.vllm_config),
        parallel={**describe_parallel(rank.vllm_config, rank.hosts), **rank.stage.describe()},
        versions=describe_packages(),
        bytes_per_token=float(model_config.get_hidden_size() * model_config.dtype.itemsize),
    )
