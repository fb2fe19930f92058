"""A loaded model whose steps are split on this rank, with everything that was set up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbo_runtime.errors import ConfigError

if TYPE_CHECKING:  # vLLM imports the worker extension, and with it this module, before its platform has patched vLLM
    from vllm.model_executor.models.interfaces_base import VllmModel

    from dbo_runtime.config import RuntimeConfig
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler
    from dbo_runtime.vllm_plugin.calibration.cost_source import CostSource
    from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
    from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
    from dbo_runtime.vllm_plugin.step.forward import SplitForward

_ATTRIBUTE = "_dbo_served_model"


@dataclass(slots=True)
class ServedModel:
    """What belongs to one loaded model. It is stored on the model instance; see `get_served_model`.

    Attributes:
        rank: what it is served with, with the settings that were read at start.
        forward: splits steps, with its runtime, decider and telemetry; None if steps of this rank are not split.
        encoder: splits forwards of the vision encoder; None if there is none, or it is not split.
        costs: gives the runtime the costs that it plans by.
        compiler: compiles the program's ops before serving; None if they run eager.
    """

    rank: RankContext
    forward: SplitForward | None = None
    encoder: SplitEncoder | None = None
    costs: CostSource | None = None
    compiler: OpCompiler | None = None

    def install(self, model: VllmModel) -> None:
        """Store this on *model*, and replace the forwards that split."""
        setattr(model, _ATTRIBUTE, self)
        if self.forward is not None:
            model.forward = self.forward
        if self.encoder is not None:
            self.encoder.install()

    def start_serving(self, is_final: bool = False) -> None:
        """Compile, get costs, and split from now on: vLLM has warmed up.

        With *is_final*, settings and costs are not changed later, and a model of which nothing is split gets its own
        forward back.
        """
        if self.forward is not None:
            runtime = self.forward.runtime
            if self.compiler is not None:  # first, because costs are those of the ops that serve
                self.compiler.compile(runtime.program)
            if self.costs is not None:
                self.costs.prepare(runtime.config)
            self.forward.start_serving(is_final)
        if self.encoder is not None:
            self.encoder.start_serving()

    def configure(self, config: RuntimeConfig) -> None:
        """Obey other settings from the next step on.

        Raises:
            ConfigError: if they ask for the second compute lane, and it was not opened at start.
        """
        platform = self.rank.platform
        if platform.opens_side_lane(config) and not platform.opens_side_lane(self.rank.config):
            raise ConfigError(
                f"DBO_SIDE={config.side}: the second compute lane was not opened at start, and cannot be opened later. "
                f"Set DBO_SIDE={config.side} in the server's environment and start again."
            )
        for split in (self.forward, self.encoder):
            if split is not None:
                split.runtime.prepare(config)


def get_served_model(model: VllmModel) -> ServedModel | None:
    """Return what was set up for a loaded model; None if nothing of it is split."""
    served: ServedModel | None = vars(model).get(_ATTRIBUTE)
    return served
