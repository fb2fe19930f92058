"""Verify an adapter against its model, op by op: on one rank, in this process, with random weights.

The model's own forward is the reference. First the program runs unsplit, and its ops' results are searched for among
those of the model's modules; then the step is cut at every token, and each op's results are compared with the unsplit
program's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from vllm import forward_context

from dbo_runtime.adapter import POSITIONS, InputAdapter, ModelAdapter, X, record_program
from dbo_runtime.adapter_registry import get_adapter
from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import ENABLE
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import SplitError
from dbo_runtime.program import Op, Program, Value
from dbo_runtime.vllm_plugin.api.groups import get_groups
from dbo_runtime.vllm_plugin.api.load_format import register_load_format
from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.unsupported import check_config
from dbo_runtime.vllm_plugin.verify.results import find_first_mismatch, find_first_unmatched, listen, run_ops
from dbo_runtime.vllm_plugin.verify.stage_verification import StageVerification, record_stages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.sequence import IntermediateTensors

PROMPT_TOKENS = (7, 5, 9)
STEPS = 2  # a prefill of the prompts, and a decode
NORM_DEVIATION = 0.1  # of the weights of norms around 1
LOAD_FORMAT = "dbo_random"  # of random weights
ENVIRONMENT = {
    ENABLE: "0",  # steps are split here, not by the plugin
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OPTIONS = {
    "dtype": "float32",
    "load_format": LOAD_FORMAT,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}


class Mismatch(NamedTuple):
    """An op of a program whose results are not the expected ones.

    Attributes:
        op: the first that differs, such as `L3.mlp`; of an unsplit program the first after the last that agrees.
        declared_at: `file:line` of its declaration.
        cut: the token at which the step was cut; None if it was not.
        step: describes the step.
        relative_error: the largest difference, relative to the largest expected value.
    """

    op: str
    declared_at: str
    cut: int | None
    step: str
    relative_error: float

    def __str__(self) -> str:
        """Format as one line."""
        where = "unsplit" if self.cut is None else f"cut at token {self.cut}"
        how = f"differs first, by {self.relative_error:.1e} of the largest value ({self.declared_at})"
        return f"{self.step}, {where}: {self.op} {how}"


@dataclass
class Verification:
    """The outcome of a verification.

    Attributes:
        program: that the adapter recorded.
        cuts: how many were compared.
        in_stages: whether it was also verified as two stages of a pipeline.
        mismatches: the first of each step and cut; none if the adapter is right.
    """

    program: Program
    cuts: int = 0
    in_stages: bool = False
    mismatches: list[Mismatch] = field(default_factory=list)

    def __str__(self) -> str:
        """Format as a line, or one for each mismatch."""
        if self.mismatches:
            return "\n".join(map(str, self.mismatches))
        how = f"unsplit{', in two stages' if self.in_stages else ''} and cut at {self.cuts} places"
        return f"equal to the model's own forward: {len(self.program.ops)} ops, {how}"


def verify_adapter(
    directory: str,
    adapter: ModelAdapter | None = None,
    prompts: Sequence[int] = PROMPT_TOKENS,
    has_side: bool = False,
    **options: Any,
) -> Verification:
    """Run a model in vLLM, and compare its own forward with the program of its adapter, unsplit and at every cut.

    If the adapter takes stages of a pipeline, compare the programs of two stages as well, one after the other.

    Args:
        directory: with the model's `config.json`; weights are random.
        adapter: the registered one if not given.
        prompts: tokens of each.
        has_side: whether to verify the program that the adapter declares where there is a `side` lane.
        options: of `vllm.LLM`, on top of `OPTIONS`.

    Raises:
        DeclineError: if there is no adapter, or it declines the model, or vLLM's step cannot be split.
        ProgramError: if the adapter breaks its contract.
    """
    from vllm import LLM, SamplingParams

    with patch.dict("os.environ", ENVIRONMENT):
        register_load_format(LOAD_FORMAT, fill_weights)
        trace_builders()
        llm = LLM(directory, **{**OPTIONS, **options})
        try:
            if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
                raise DeclineError("an adapter is verified on one rank; leave out options that ask for several")
            runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
            model = runner.get_model()
            adapter = adapter or get_adapter(runner.vllm_config.model_config.architecture)
            program, stages = record(model, runner.vllm_config, adapter, has_side)
            take_inputs = adapter.take_inputs if isinstance(adapter, InputAdapter) else None
            splitter = ContextSplitter(get_platform(), runner.vllm_config, runner)
            comparison = _Comparison(program, stages, model, splitter, take_inputs)
            model.forward = comparison
            tokens = [[3 + (7 * i + j * j) % 50 for j in range(length)] for i, length in enumerate(prompts)]
            sampling = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)
        finally:
            llm.llm_engine.engine_core.shutdown()
    return comparison.verification


def record(
    model: VllmModel, vllm_config: VllmConfig, adapter: ModelAdapter | None, has_side: bool = False
) -> tuple[Program, StageVerification | None]:
    """Return the program of a model that vLLM has made, and those of two stages of a pipeline.

    Raises:
        DeclineError: if there is no adapter, or the model is declined.
        ProgramError: if the adapter breaks its contract.
    """
    architecture = vllm_config.model_config.architecture
    if adapter is None:
        raise DeclineError("no adapter is registered", architecture)
    groups = get_groups(vllm_config)
    collectives = ModelCollectives(get_platform(), groups.tensor_parallel, groups.data_parallel)
    program = (
        check_config(vllm_config) or adapter.decline(model) or record_program(adapter, model, collectives, has_side)
    )
    if isinstance(program, Decline):
        raise DeclineError(f"{architecture} is declined: {program.reason}", program.detail)
    return program, record_stages(adapter, model, collectives, has_side)


def fill_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model random weights that keep activations at scale: vLLM's own dummy weights are close to zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + NORM_DEVIATION * noise
            parameter.data.copy_(scaled)


class _Comparison:
    """Replaces a model's forward: runs it, then the program unsplit and at every cut, and notes mismatches."""

    def __init__(
        self,
        program: Program,
        stages: StageVerification | None,
        model: VllmModel,
        splitter: ContextSplitter,
        take_inputs: Callable[[torch.nn.Module, torch.Tensor, bool], torch.Tensor] | None,
    ) -> None:
        self.verification = Verification(program, in_stages=stages is not None)
        self._stages = stages
        self._take_inputs = take_inputs
        self._model = model
        self._forward = model.forward
        self._splitter = splitter

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        x = self._model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        if self._take_inputs is not None:
            x = self._take_inputs(self._model, x, True)  # the forward takes them as well
        expected: list[torch.Tensor] = []
        with listen(self._model, expected):
            hidden: torch.Tensor = self._forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        context = forward_context.get_forward_context() if forward_context.is_forward_context_available() else None
        if context is not None and context.attn_metadata:
            self._compare(context, x, positions, [*expected, hidden])
        return hidden

    def _compare(
        self, context: ForwardContext, x: torch.Tensor, positions: torch.Tensor, expected: list[torch.Tensor]
    ) -> None:
        batch = self._splitter.read_batch(context, x.shape[0])
        if isinstance(batch, Decline):
            raise DeclineError("vLLM's step cannot be split", str(batch))
        step = f"{'prefill' if batch.prefill_tokens else 'decode'} of {batch.tokens} tokens"
        program = self.verification.program
        unsplit = run_ops(program, program.order_inputs({X: x.clone(), POSITIONS: positions}))
        self._note(step, None, find_first_unmatched(program, unsplit, expected))
        if self._stages is not None:
            self._note(f"{step}, in two stages", None, self._stages.compare(program, unsplit, x, positions))
        for cut in range(1, batch.tokens):
            parts = self._run_cut(context, batch, cut, x, positions)
            if parts is not None:
                self.verification.cuts += 1
                self._note(step, cut, find_first_mismatch(program, unsplit, parts))

    def _run_cut(
        self, context: ForwardContext, batch: Batch, cut: int, x: torch.Tensor, positions: torch.Tensor
    ) -> list[dict[Value, Any]] | None:
        """Return the results of the ops of both micro-batches; None if the batch cannot be cut there."""
        try:
            slices = slice_batch(batch, [cut])
        except SplitError:
            return None
        contexts = self._splitter.split(context, slices)
        if isinstance(contexts, Decline):
            raise DeclineError("vLLM's step cannot be split", str(contexts))
        program, parts = self.verification.program, []
        for piece, own in zip(slices, contexts, strict=True):
            inputs = program.cut_inputs({X: x.clone(), POSITIONS: positions}, piece.tokens, piece.requests)
            with forward_context.override_forward_context(own):
                parts.append(run_ops(program, inputs))
        return parts

    def _note(self, step: str, cut: int | None, mismatch: tuple[Op, float] | None) -> None:
        if mismatch is not None:
            op, error = mismatch
            self.verification.mismatches.append(Mismatch(op.label, op.declared_at, cut, step, error))
