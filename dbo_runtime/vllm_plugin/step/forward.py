"""The forward of a served model: split where it can be and pays, vLLM's own otherwise."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm import forward_context

from dbo_runtime.adapter import POSITIONS, X
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device, Timer
from dbo_runtime.errors import SplitError
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.online.correction import SPLIT, UNSPLIT
from dbo_runtime.runtime import ExecutionPlan, MicroBatchRuntime
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.stage import UNSPLIT as WHOLE_MODEL
from dbo_runtime.vllm_plugin.parallel.stage import Stage, copy_tensors, name_results, take_inputs
from dbo_runtime.vllm_plugin.step.comparison import compare_results
from dbo_runtime.vllm_plugin.step.decision import StepDecider, list_cuts
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.sampling import Recording

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler
    from dbo_runtime.vllm_plugin.calibration.cost_source import CostSource  # which calibrates with forwards


class StepTime(NamedTuple):
    """A step that ran `whole` or `split`: seconds predicted, if it was, and measured."""

    way: str
    expected: float | None
    seconds: float


class SplitForward:
    """Stands in for the `forward` of a loaded model instance.

    Args:
        model: the top-level model.
        forward: its own forward, which unsplit steps run untouched.
        runtime: runs plans.
        planner: plans steps.
        agreement: of all ranks that communicate in a step.
        add_inputs: `take_inputs` of an `InputAdapter`; what the program takes is what vLLM gives if there is none.
        stage: of a pipeline that the model is.

    Attributes:
        recording: records split steps for whoever wants to know.
        metrics: counts steps; None where another rank does.
        last_step: what the last step was, what it was predicted to take, and what it took.
        costs: what gives the runtime its costs; None where nobody did.
        compiler: what compiles the program's ops before serving; None where none are to be.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        runtime: MicroBatchRuntime,
        planner: StepDecider,
        agreement: Agreement,
        add_inputs: Callable[[Any, torch.Tensor, bool], torch.Tensor] | None = None,
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        self.runtime = runtime
        self.planner = planner
        self.recording = Recording()
        self.metrics: Metrics | None = None
        self.last_step: StepTime | None = None
        self.costs: CostSource | None = None
        self.compiler: OpCompiler | None = None
        self._watches: deque[tuple[str, float | None, Timer]] = deque()
        self._model = model
        self._forward = forward
        self._agreement = agreement
        self._add_inputs = add_inputs
        self._stage = stage

    def copy_for(self, device: Device, config: RuntimeConfig, group: Any) -> SplitForward:
        """Return a forward of the same model with plans, counts and times of its own, and a silent log."""
        own = copy.copy(self)
        own.runtime = MicroBatchRuntime(
            self.runtime.program, device, config, open_log(quiet=True), ranks=group.world_size
        )
        own.planner, own._watches = self.planner.copy_for(own.runtime, group), deque()
        own.recording, own.metrics = Recording(), None
        return own

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one step: tokens [tokens], positions [tokens] -> hidden states [tokens, hidden].

        On a stage of a pipeline, from the intermediate tensors of the stage before, and to those of the next.
        """
        watch = self._start_watch()
        tokens = positions.shape[-1]
        whole = partial(self._forward, input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        obstacle = _find_unknown(kwargs) or self._stage.check_inputs(intermediate_tensors, tokens)
        plan, contexts, statement = self.planner.plan(tokens, obstacle)
        checks = self.runtime.config.check
        if checks:
            self._agreement.compare(statement)
        if isinstance(plan, Decline):
            self.runtime.decline(plan)
            hidden = whole()
        else:
            if checks:  # norms may add in place, and the unsplit run needs what they are given, too
                inputs_embeds = None if inputs_embeds is None else inputs_embeds.clone()
                intermediate_tensors = copy_tensors(intermediate_tensors)
            given = self._take(input_ids, intermediate_tensors, inputs_embeds)
            hidden = self._run(plan, contexts, {**given, POSITIONS: positions})
        self._learn(plan, watch)
        if self.metrics is not None and self.planner.serving:
            self.metrics.count_step(plan)
        if checks and isinstance(plan, ExecutionPlan):
            compare_split(name_results(hidden), name_results(whole()), plan)
        return hidden

    def _take(
        self, input_ids: torch.Tensor | None, intermediate_tensors: Any, inputs_embeds: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the program's inputs but for positions: embedded tokens, or what the stage before hands over."""
        if intermediate_tensors is not None:
            return take_inputs(self.runtime.program, intermediate_tensors)
        x = inputs_embeds if inputs_embeds is not None else self._model.embed_input_ids(input_ids)
        return {X: x if self._add_inputs is None else self._add_inputs(self._model, x, self.runtime.config.check)}

    def _run(self, plan: ExecutionPlan, contexts: list[Any], given: dict[str, torch.Tensor]) -> Any:
        program = self.runtime.program
        inputs = [program.cut_inputs(given, piece.tokens, piece.requests) for piece in plan.slices]
        recorder = self.recording.begin() if self.planner.serving else None  # a graph does not tell when its ops ran
        with forward_context.override_forward_context(contexts[0]):  # restores the step's own at the end
            outputs = self.runtime.run(plan, inputs, partial(_enter, contexts), recorder)
        if recorder is not None:
            self.recording.end(recorder, plan.executor.schedule)
        return self._stage.join(program, outputs)

    def _start_watch(self) -> Timer | None:
        """Start a watch, but not before serving: vLLM may be capturing graphs, and a watch is none of their ops."""
        return self.runtime.device.start_timer() if self.planner.serving else None

    def _learn(self, plan: ExecutionPlan | Decline, watch: Timer | None) -> None:
        """Compare what steps took with what was predicted; now and then, with the other ranks, correct predictions.

        A device may be behind its host, and then it is an earlier step whose time is known. Every step of every rank is
        counted, whatever was measured, so that all of them gather at the same one.
        """
        if watch is None:
            return
        watch.stop()
        self._watches.append((UNSPLIT if isinstance(plan, Decline) else SPLIT, plan.expected, watch))
        planner = self.runtime.planner
        while self._watches and (seconds := self._watches[0][2].read()) is not None:
            way, expected, _ = self._watches.popleft()
            self.last_step = StepTime(way, expected, seconds)
            if planner is not None and expected is not None:
                planner.note(way, expected, seconds)
            if self.metrics is not None and expected is not None:
                self.metrics.count_time(way, expected, seconds)
        if planner is not None and planner.correction.count():
            planner.correct(self._agreement.gather(planner.correction.propose()))


def compare_split(split: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor], plan: ExecutionPlan) -> None:
    """Raise SplitError if what a plan gave split is further from what it gave whole than rounding explains."""
    how, remedy = f"cuts at {list_cuts(plan)}, schedule {plan.digest}", "DBO_MODE=off serves unsplit"
    if split.keys() != whole.keys():
        raise SplitError(f"a split step gave {sorted(split)}, an unsplit one {sorted(whole)}; {remedy} meanwhile.")
    for what, wanted in whole.items():
        compare_results(f"split and unsplit {what}", split[what], wanted, how, remedy)


def _find_unknown(kwargs: dict[str, Any]) -> Decline | None:
    return Decline("unknown arguments of forward()", ", ".join(sorted(kwargs))) if kwargs else None


def _enter(contexts: list[Any], micro_batch: int) -> None:
    """Make a micro-batch's forward context the current one. A plain assignment: this runs at every turn."""
    forward_context._forward_context = contexts[micro_batch]
