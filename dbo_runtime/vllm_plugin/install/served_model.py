"""A loaded model whose steps are split on this rank, with everything set up for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dbo_runtime.errors import ConfigError

if TYPE_CHECKING:  # vLLM imports the worker extension, and with it this module, before its platform has patched vLLM
    from vllm.model_executor.models.interfaces_base import VllmModel

    from dbo_runtime.config import RuntimeConfig
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler
    from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
    from dbo_runtime.vllm_plugin.install.announcement import Announcement
    from dbo_runtime.vllm_plugin.install.cost_source import CostSource
    from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
    from dbo_runtime.vllm_plugin.step.forward import SplitForward

_ATTRIBUTE = "_dbo_served_model"


@dataclass(slots=True)
class ServedModel:
    """Everything set up for one loaded model. It is stored on the model instance; see `get_served_model`.

    Attributes:
        rank: the rank's context, with the settings read at start.
        forward: the forward that splits steps, with runtime, decider and telemetry; None if this rank splits no steps.
        encoder: the forward that splits the vision encoder; None if there is no encoder, or it is not split.
        costs: source of the costs that the runtime plans by.
        compiler: compiler of the program's ops, used before serving; None if they run eager.
        announcement: line of the log for a model whose steps can be split; None if they cannot.
    """

    rank: RankContext
    forward: SplitForward | None = None
    encoder: SplitEncoder | None = None
    costs: CostSource | None = None
    compiler: OpCompiler | None = None
    announcement: Announcement | None = None

    def install(self, model: VllmModel) -> None:
        """Store this on *model*, and install the splitting forwards."""
        setattr(model, _ATTRIBUTE, self)
        if self.forward is not None:
            model.forward = self.forward
        if self.encoder is not None:
            self.encoder.install()

    def start_warm_up(self) -> None:
        """Prepare the programs that vLLM may capture, because it captures graphs while it warms up.

        Compiled ops are not captured: they are compiled after vLLM's warm-up.
        """
        if self.forward is not None and self.costs is not None and self.compiler is None:
            self.costs.prepare_graphs(self.forward.runtime.config)

    def start_serving(self, is_final: bool = False) -> None:
        """Compile, get costs, and split from now on, because vLLM's warm-up is over.

        With *is_final*, settings and costs do not change later, so a model of which nothing is split gets its own
        forward back.
        """
        if self.forward is not None:
            runtime = self.forward.runtime
            if self.compiler is not None:  # compile first, because costs must be those of the served ops
                self.compiler.compile(runtime.program)
            if self.costs is not None and not self.costs.is_early:
                self.costs.prepare(runtime.config)
            self.forward.decider.warm_up.graphs = {}  # they are captured
            decline = self.forward.start_serving(is_final)
            if self.announcement is not None and self.forward.decider.refusal is None:  # which is in the log already
                self.announcement.make(decline)
        if self.encoder is not None:
            self.encoder.start_serving()

    def configure(self, config: RuntimeConfig) -> None:
        """Apply other settings from the next step on.

        Raises:
            ConfigError: the settings ask for the second compute lane, but it was not opened at start.
        """
        platform = self.rank.platform
        if platform.opens_side_lane(config) and not platform.opens_side_lane(self.rank.config):
            raise ConfigError(
                f"DBO_SIDE={config.side}: the second compute lane was not opened at start, and cannot be opened later. "
                f"Set DBO_SIDE={config.side} in the server's environment and start again."
            )
        if self.forward is not None:
            self.forward.runtime.prepare(self.forward.decider.limit(config))
        if self.encoder is not None:
            self.encoder.runtime.prepare(config)


def get_served_model(model: VllmModel) -> ServedModel | None:
    """Return the setup of a loaded model; None if nothing of it is split."""
    served: ServedModel | None = vars(model).get(_ATTRIBUTE)
    return served
