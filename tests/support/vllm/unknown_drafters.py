"""A worker extension to whose process every method of speculative decoding is new.

It is in force where it is imported, which vLLM does in the workers that it is named for.
"""

from __future__ import annotations

from unittest.mock import patch

from dbo_runtime.vllm_plugin.extension import WorkerExtension

patch("dbo_runtime.vllm_plugin.platforms.platform.COMPARED_DRAFTERS", ()).start()


class Extension(WorkerExtension):
    """Tells what first steps have shown."""

    def tell_first_steps(self) -> tuple[bool, str | None]:
        """Return whether any were compared, and why nothing is split any more."""
        first_steps = self.model_runner.get_model().forward.decider.first_steps
        assert first_steps is not None, "what was not compared before is compared now"
        return first_steps.size_and_capacity[0] > 0, first_steps.failure
