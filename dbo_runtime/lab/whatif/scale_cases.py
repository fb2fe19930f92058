"""The published cases that `dbo plan --scale` spreads over many chips, with their chips, networks and models."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.batch import Batch
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.whatif.expert_models import EXPERT_MODELS, ExpertModel
from dbo_runtime.lab.whatif.expert_scale import scale_experts
from dbo_runtime.lab.whatif.fabrics import FABRICS, Fabric
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.nearest import find_nearest
from dbo_runtime.planner.costs.cost_table import CostTable

PREFILL, DECODE = "prefill", "decode"
LENGTH = 4096  # tokens of a prompt, and of a decode's context, as in most publications
PROMPTS = 2  # per rank and prefill step: with 16,384 tokens SGLang's unsplit step ran out of memory
MOST_DECODES = 128  # per rank and step, as in DeepSeek's profile; fewer if memory is short
USABLE = 0.9  # share of the memory for weights and KV cache: vLLM's default


@dataclass(frozen=True, slots=True)
class ScaleCase:
    """The phase of a model on a kind of chip.

    Attributes:
        case: the published case with the costs of a rank.
        phase: `prefill` or `decode`.
        chip: name of the chip in tables.
        model: key of the model in `EXPERT_MODELS`.
        fabric: key of the network in `FABRICS`.
        memory: bytes of memory per rank.
        ranks_per_chip: number of ranks per chip; a 910C has 2 dies.
    """

    case: str
    phase: str
    chip: str
    model: str
    fabric: str
    memory: float
    ranks_per_chip: int = 1

    @property
    def experts(self) -> ExpertModel:
        """The model with its experts."""
        return EXPERT_MODELS[self.model]

    @property
    def network(self) -> Fabric:
        """The network that connects the ranks."""
        return FABRICS[self.fabric]

    def count_ranks(self, chips: int) -> int:
        """Return the number of ranks that experts are spread over: all, or as many as the network joins.

        More ranks form further groups.
        """
        return min(chips * self.ranks_per_chip, self.network.largest)

    def spread(self, chips: int) -> CostTable:
        """Return the costs of a rank on this number of chips."""
        return scale_experts(get_case(self.case).table, self.count_ranks(chips), self.experts, self.network)

    def fill_step(self, chips: int) -> Batch | None:
        """Return the step of a rank: prompts, or as many decodes as fit; None if the weights leave no room."""
        room = self.experts.count_sequences(self.memory * USABLE, self.count_ranks(chips), LENGTH)
        if room < (PROMPTS if self.phase == PREFILL else 1):
            return None
        if self.phase == PREFILL:
            return Batch((LENGTH,) * PROMPTS, LENGTH * PROMPTS)
        count = min(room, MOST_DECODES)
        return Batch((1,) * count, 0, context_lens=(LENGTH,) * count)


_910B, _910C, _H800 = "910B", "910C", "H800"
SCALE_CASES = (
    ScaleCase("r1-prefill-910b", PREFILL, _910B, "r1", "prefill-910b", 64e9),
    ScaleCase("r1-prefill-910c", PREFILL, _910C, "r1", "prefill-910c", 64e9, 2),
    ScaleCase("r1-prefill-h800", PREFILL, _H800, "r1", "prefill-h800", 80e9),
    ScaleCase("r1-decode-910b", DECODE, _910B, "r1", "decode-910b", 64e9),
    ScaleCase("r1-decode-910c", DECODE, _910C, "r1", "decode-910c", 64e9, 2),
    ScaleCase("r1-decode-h800", DECODE, _H800, "r1", "decode-h800", 80e9),
    ScaleCase("qwen3-235b-910b", PREFILL, _910B, "qwen3-235b", "prefill-910b", 64e9),
    ScaleCase("qwen3-235b-910c", PREFILL, _910C, "qwen3-235b", "prefill-910c", 64e9, 2),
    ScaleCase("qwen3-235b-prefill-h800", PREFILL, _H800, "qwen3-235b", "prefill-h800", 80e9),
    ScaleCase("qwen3-235b-910b", DECODE, _910B, "qwen3-235b", "decode-910b", 64e9),
    ScaleCase("qwen3-235b-910c", DECODE, _910C, "qwen3-235b", "decode-910c", 64e9, 2),
    ScaleCase("qwen3-235b-decode-h800", DECODE, _H800, "qwen3-235b", "decode-h800", 80e9),
)


def find_scale_cases(model: str | None = None, phase: str | None = None, name: str | None = None) -> list[ScaleCase]:
    """Return the cases with a model, a phase and a name; None means any.

    Raises:
        ConfigError: there are none.
    """
    found = [
        each
        for each in SCALE_CASES
        if model in (None, each.model) and phase in (None, each.phase) and name in (None, each.case)
    ]
    if not found:
        asked = ", ".join(filter(None, (model, phase, name)))
        names = [*dict.fromkeys(each.case for each in SCALE_CASES)]
        close = find_nearest(model or name or "", [*names, *(each.model for each in SCALE_CASES)])
        hint = f"did you mean {close}?" if close else f"it spreads {', '.join(names)}."
        raise ConfigError(f"--scale knows no case of {asked}; {hint}")
    return found
