"""The line of the log that says whether steps are split, once a server is ready."""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.adapters.contract import ModelAdapter, name_adapter
from dbo_runtime.decline import Decline
from dbo_runtime.engine.transport import HIDES_NOTHING
from dbo_runtime.observe.declines import warn_declined
from dbo_runtime.setting_values import name_policy
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext

WHERE_IT_GAINS = "spread layers over several hosts, or over chips; `make demo` shows the gain over a link"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the log says of a model whose steps can be split.

    Attributes:
        rank: the rank's context.
        adapter: the model's adapter.
        unfused: reason for which attention stays one op, without concurrent ops; None if it does not.
        no_micro: reason for which steps are cut into nano-batches only; None if micro-batches are possible, too.
    """

    rank: RankContext
    adapter: ModelAdapter
    unfused: Decline | None
    no_micro: Decline | None = None

    def make(self, decline: Decline | None) -> None:
        """Log that overlap is active, or that *decline* keeps every step from being split."""
        rank, log = self.rank, self.rank.log
        if decline is not None:
            advice = WHERE_IT_GAINS if decline in HIDES_NOTHING.values() else None
            model = rank.vllm_config.model_config.architecture
            warn_declined(log, "every step", decline, model=model, advice=advice)
            return
        if self.unfused is not None:
            log.info("attention stays one op, with no concurrent ops", reason=str(self.unfused))
        if self.no_micro is not None:
            log.info("steps are cut into nano-batches only", reason=str(self.no_micro))
        log.info("dual-batch overlap is active", **self._list_facts())
        nothing = HIDES_NOTHING.get(rank.transport)
        if nothing is not None and rank.config.mode == "always" and rank.config.side != "on":
            log.warning("split steps gain nothing here", reason=nothing.detail, advice=WHERE_IT_GAINS)
        for hazard, remedy in rank.platform.list_hazards(rank.vllm_config):
            log.warning(hazard, advice=remedy)
        if rank.platform.notice and not rank.config.check:
            log.warning(rank.platform.notice, advice="compare steps once, with DBO_CHECK=1")

    def _list_facts(self) -> dict[str, object]:
        rank, config = self.rank, self.rank.config
        groups, layers = rank.groups, rank.stage.layers
        return {
            "model": rank.vllm_config.model_config.architecture,
            "adapter": name_adapter(self.adapter),
            "layers": f"{layers.start} to {layers.stop - 1}" if layers else None,
            "device": rank.platform.name,
            "ranks": groups.all_ranks.world_size,
            "data_parallel": 1 if groups.data_parallel is None else groups.data_parallel.world_size,
            "transport": rank.transport,
            "mode": config.mode,
            "split": config.split if self.no_micro is None else "nano",
            "micro_batches": config.micro_batches or "auto",
            "policy": name_policy(*config.policy),
            "dispatch": rank.dispatch,
            "side": config.side,
            "min_tokens": config.min_tokens,
            "min_prefill_tokens": config.min_prefill_tokens,
            "check": str(config.check),
        }
