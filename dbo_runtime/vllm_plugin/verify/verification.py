"""Tries an adapter on the model that it is for: one rank, this process, random weights, op by op.

The model's own forward is the truth. First the program is run unsplit, and its ops' results are looked for among those
of the model's modules; then it is cut at every token, and each op's results are compared with the unsplit program's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from vllm import forward_context

from dbo_runtime.adapter import POSITIONS, InputAdapter, ModelAdapter, X, get_adapter, record_program
from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.config import ENABLE
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import SplitError
from dbo_runtime.program import Op, Program, Value
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.context.checks import check_config
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter, trace_builders
from dbo_runtime.vllm_plugin.install.model_setup import open_splitter
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.verify.results import find_first_mismatch, find_first_unmatched, listen, run_ops
from dbo_runtime.vllm_plugin.verify.stage_verification import StageVerification, record_stages

PROMPTS = (7, 5, 9)  # tokens
STEPS = 2  # a prefill of them, and a decode
SPREAD = 0.1  # of norms around 1
RANDOM = "dbo_random"  # the load format of weights that are made up
ENVIRONMENT = {
    ENABLE: "0",  # steps are split here, not by the plugin
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
OPTIONS = {
    "dtype": "float32",
    "load_format": RANDOM,
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
    """Where a program does not do what it should.

    Attributes:
        op: the first that differs, such as `L3.mlp`; of an unsplit program the first after the last that agrees.
        declared_at: `file:line` of its declaration.
        cut: the token at which the step was cut; None if it was not.
        step: what the step was, in words.
        apart: by how much results differ, relative to the largest value.
    """

    op: str
    declared_at: str
    cut: int | None
    step: str
    apart: float

    def __str__(self) -> str:
        """One line."""
        where = "unsplit" if self.cut is None else f"cut at token {self.cut}"
        how = f"differs first, by {self.apart:.1e} of the largest value ({self.declared_at})"
        return f"{self.step}, {where}: {self.op} {how}"


@dataclass
class Verification:
    """What a trial found.

    Attributes:
        program: that the adapter recorded.
        cuts: how many were compared.
        in_stages: whether it was tried as two stages of a pipeline, too.
        faults: the first of each step and cut; none if the adapter is right.
    """

    program: Program
    cuts: int = 0
    in_stages: bool = False
    mismatches: list[Mismatch] = field(default_factory=list)

    def __str__(self) -> str:
        """A line, or one for each fault."""
        if self.mismatches:
            return "\n".join(map(str, self.mismatches))
        ways = f"unsplit{', in two stages' if self.in_stages else ''} and cut at {self.cuts} places"
        return f"equal to the model's own forward: {len(self.program.ops)} ops, {ways}"


def verify_adapter(
    directory: str,
    adapter: ModelAdapter | None = None,
    prompts: Sequence[int] = PROMPTS,
    has_side: bool = False,
    **options: Any,
) -> Verification:
    """Run a model in vLLM, and compare its own forward with the program of its adapter, unsplit and at every cut.

    Of an adapter that takes stages of a pipeline, the programs of two stages are compared, too, one after the other.

    Args:
        directory: with the model's `config.json`; weights are made up.
        adapter: the one that is registered if not given.
        prompts: tokens of each.
        has_side: whether to try what the adapter declares where there is a `side` lane.
        options: of `vllm.LLM`, on top of `OPTIONS`.

    Raises:
        DeclineError: if there is no adapter, or it declines the model, or vLLM's step cannot be split.
        ProgramError: if the adapter breaks its contract.
    """
    from vllm import LLM, SamplingParams

    with patch.dict("os.environ", ENVIRONMENT):
        _register_loader()
        trace_builders()
        llm = LLM(directory, **{**OPTIONS, **options})
        try:
            if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
                raise DeclineError("an adapter is tried on one rank; leave out what asks for several")
            runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
            model = runner.get_model()
            adapter = adapter or get_adapter(runner.vllm_config.model_config.architecture)
            program, stages = record(model, runner.vllm_config, adapter, has_side)
            take_inputs = adapter.take_inputs if isinstance(adapter, InputAdapter) else None
            splitter = open_splitter(runner.vllm_config, runner)
            comparison = _Comparison(program, stages, model, splitter, take_inputs)
            model.forward = comparison
            tokens = [[3 + (7 * i + j * j) % 50 for j in range(length)] for i, length in enumerate(prompts)]
            sampling = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)
        finally:
            llm.llm_engine.engine_core.shutdown()
    return comparison.trial


def record(
    model: Any, vllm_config: Any, adapter: ModelAdapter | None, has_side: bool = False
) -> tuple[Program, StageVerification | None]:
    """Return the program of a model that vLLM has made, and those of two stages of a pipeline.

    Raises:
        DeclineError: if there is no adapter, or it declines.
        ProgramError: if it breaks its contract.
    """
    architecture = vllm_config.model_config.architecture
    if adapter is None:
        raise DeclineError(f"no adapter is registered for {architecture}")
    refusal = check_config(vllm_config) or adapter.decline(model)
    if refusal is not None:
        raise DeclineError(f"{architecture} is declined: {refusal}")
    groups = compat.get_groups(vllm_config)
    collectives = ModelCollectives(groups.tensor_parallel, groups.data_parallel)
    program = record_program(adapter, model, collectives, has_side)
    return program, record_stages(adapter, model, collectives, has_side)


def fill_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model random weights that keep activations alive: vLLM's own dummy weights are all but zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + SPREAD * noise
            parameter.data.copy_(scaled)


def _register_loader() -> None:
    """Make our load format known to vLLM, which warns if it is known already."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if RANDOM in _LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @register_model_loader(RANDOM)
    class RandomLoader(BaseModelLoader):  # type: ignore[misc] # vLLM is untyped to us
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            fill_weights(model)


class _Comparison:
    """Stands in for a model's forward: runs it, and then the program in all ways, and notes where they differ."""

    def __init__(
        self,
        program: Program,
        stages: StageVerification | None,
        model: Any,
        splitter: ContextSplitter,
        take_inputs: Any,
    ) -> None:
        self.trial = Verification(program, in_stages=stages is not None)
        self._stages = stages
        self._take_inputs = take_inputs
        self._model = model
        self._forward = model.forward
        self._splitter = splitter

    def __call__(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        x = self._model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        if self._take_inputs is not None:
            x = self._take_inputs(self._model, x, True)  # the forward takes them, too
        own: list[torch.Tensor] = []
        with listen(self._model, own):
            hidden = self._forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)
        context = forward_context.get_forward_context() if forward_context.is_forward_context_available() else None
        if context is not None and context.attn_metadata:
            self._compare(context, x, positions, [*own, hidden])
        return hidden

    def _compare(self, context: Any, x: torch.Tensor, positions: torch.Tensor, own: list[torch.Tensor]) -> None:
        batch = self._splitter.read_batch(context, x.shape[0])
        if isinstance(batch, Decline):
            raise DeclineError(f"vLLM's step cannot be split: {batch}")
        step = f"{'prefill' if batch.prefill_tokens else 'decode'} of {batch.tokens} tokens"
        program = self.trial.program
        whole = run_ops(program, program.order_inputs({X: x.clone(), POSITIONS: positions}))
        self._note(step, None, find_first_unmatched(program, whole, own))
        if self._stages is not None:
            self._note(f"{step}, in two stages", None, self._stages.compare(program, whole, x, positions))
        for cut in range(1, batch.tokens):
            parts = self._run_cut(context, batch, cut, x, positions)
            if parts is not None:
                self.trial.cuts += 1
                self._note(step, cut, find_first_mismatch(program, whole, parts))

    def _run_cut(
        self, context: Any, batch: Batch, cut: int, x: torch.Tensor, positions: torch.Tensor
    ) -> list[dict[Value, Any]] | None:
        """Return what the ops of both micro-batches return; None if the batch cannot be cut there."""
        try:
            slices = slice_batch(batch, [cut])
        except SplitError:
            return None
        contexts = self._splitter.split(context, slices)
        if isinstance(contexts, Decline):
            raise DeclineError(f"vLLM's step cannot be split: {contexts}")
        program, parts = self.trial.program, []
        for piece, own in zip(slices, contexts, strict=True):
            given = program.cut_inputs({X: x.clone(), POSITIONS: positions}, piece.tokens, piece.requests)
            with forward_context.override_forward_context(own):
                parts.append(run_ops(program, given))
        return parts

    def _note(self, step: str, cut: int | None, found: tuple[Op, float] | None) -> None:
        if found is not None:
            op, apart = found
            self.trial.mismatches.append(Mismatch(op.label, op.declared_at, cut, step, apart))
