"""Forwards of made-up models, put together as the plugin does when it loads a real one."""

from __future__ import annotations

from typing import Any

from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, Stage
from dbo_runtime.vllm_plugin.step.comparison import StepComparison
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.step.model_ends import ModelEnds
from dbo_runtime.vllm_plugin.step.observer import StepObserver
from dbo_runtime.vllm_plugin.step.runner import StepRunner


def assemble(
    model: Any,
    decider: StepDecider,
    agreement: Agreement,
    adapter: Any = None,
    stage: Stage = WHOLE_MODEL,
    recording: Any = None,
    metrics: Any = None,
    may_diverge: bool = False,
    lora: Any = None,
    mistakes_one_token: bool = False,
) -> SplitForward:
    """Return the split forward of *model*."""
    runtime = decider.runtime
    ends = ModelEnds(model, runtime.program, adapter, stage)
    return SplitForward(
        model,
        decider,
        StepRunner(runtime, ends, decider.platform, lora),
        StepObserver(runtime, agreement, recording, metrics),
        StepComparison(agreement, decider, may_diverge and ends.may_repeat, lora, mistakes_one_token),
    )
