"""A worker extension to whose process every method of speculative decoding is new.

It is in force where it is imported, which vLLM does in the workers that it is named for.
"""

from __future__ import annotations

from dbo_runtime.vllm_plugin.extension import WorkerExtension
from dbo_runtime.vllm_plugin.step import unsupported

unsupported.KNOWN_DRAFTERS = ()


class Extension(WorkerExtension):
    """Tells what a model is declined for."""

    def tell_decline(self) -> tuple[str, str | None]:
        """Return the reason against micro-batches, and the difference that compared first steps have shown."""
        decider = self.model_runner.get_model().forward.decider
        assert decider.first_steps is not None, "what was compared for few models is compared here, too"
        return str(decider.no_micro), decider.first_steps.failure
