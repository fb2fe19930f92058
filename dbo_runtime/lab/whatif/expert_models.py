"""Models with experts, from their published configurations: data sent to experts, and data kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """The properties of a model that decide how its experts can be spread over ranks.

    Attributes:
        name: common name.
        hidden: number of values in a hidden state.
        experts: number of routed experts in a layer.
        chosen: number of experts that each token is sent to.
        groups: number of groups of experts; a token's experts are in `chosen_groups` of them; 1 if routing has no
            groups.
        chosen_groups: number of groups that a token's experts are in.
        expert_bytes: bytes of one expert's weights in all layers, one byte per weight (FP8 or W8A8).
        replicated_bytes: bytes of weights on every data parallel rank: attention, dense MLPs, shared experts,
            vocabulary.
        cache_bytes: bytes of KV cache per token of a sequence, in bf16.
    """

    name: str
    hidden: int
    experts: int
    chosen: int
    groups: int
    chosen_groups: int
    expert_bytes: float
    replicated_bytes: float
    cache_bytes: float

    def count_experts(self, ranks: int) -> float:
        """Return the number of experts on each of *ranks* ranks. With more ranks than experts, experts are copied."""
        return max(self.experts / ranks, 1.0)

    def count_hosts(self, hosts: int) -> float:
        """Return the expected number of hosts, among *hosts* and including its own, that have a token's experts.

        With up to as many hosts as groups, a host has whole groups, and is needed unless none of them is chosen. With
        more hosts, a group spans several, and each chosen expert is equally likely on any host of the chosen groups.
        """
        if self.groups >= hosts and self.groups % hosts == 0:
            left_out = comb(self.groups - self.groups // hosts, self.chosen_groups)
            return hosts * (1 - left_out / comb(self.groups, self.chosen_groups))
        reached = hosts * self.chosen_groups / self.groups
        return reached * (1.0 - (1.0 - 1.0 / reached) ** self.chosen)

    def count_sequences(self, memory: float, ranks: int, tokens: int) -> int:
        """Return the number of sequences of *tokens* tokens that fit into *memory* bytes of a rank after its weights.

        Activations, communication buffers and fragmentation are not counted.
        """
        weights = self.replicated_bytes + self.count_experts(ranks) * self.expert_bytes
        return max(int((memory - weights) / (self.cache_bytes * tokens)), 0)


# DeepSeek: 58 layers with experts of 3 x 7168 x 2048; 187 million weights of MLA in each of 61 layers, 3 dense MLPs of
# 396 million, 58 shared experts, and a vocabulary of 129,280, twice, in bf16. Qwen3: 94 layers with experts of 3 x 4096
# x 1536; 71 million weights of attention, 4 heads of keys and of values of 128.
DEEPSEEK = ExpertModel(
    "DeepSeek-R1",
    hidden=7168,
    experts=256,
    chosen=8,
    groups=8,
    chosen_groups=4,
    expert_bytes=58 * 44.04e6,
    replicated_bytes=61 * 187e6 + 3 * 396e6 + 58 * 44.04e6 + 2 * 2 * 129_280 * 7168,
    cache_bytes=61 * (512 + 64) * 2,
)
QWEN3_235B = ExpertModel(
    "Qwen3-235B-A22B",
    hidden=4096,
    experts=128,
    chosen=8,
    groups=1,
    chosen_groups=1,
    expert_bytes=94 * 18.87e6,
    replicated_bytes=94 * 71.3e6 + 2 * 2 * 151_936 * 4096,
    cache_bytes=94 * 2 * 4 * 128 * 2,
)
EXPERT_MODELS: Mapping[str, ExpertModel] = MappingProxyType({"r1": DEEPSEEK, "qwen3-235b": QWEN3_235B})
