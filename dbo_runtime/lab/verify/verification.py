"""Verify an adapter against its model, op by op: on one rank, in this process, with random weights.

The model's own forward is the reference. First the program runs unsplit, and each op's results are looked up among
those of the model's modules. Then the step is cut at every token, and each op's results are compared with the unsplit
program's. The micro-batches run in the order that exposes missing `ordered=True` (`policies.latest_first`), with the KV
cache as it was before the step. In both runs each op is watched: whether it changes a value that it only reads, returns
memory that is in use, or computes where it should communicate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from dbo_runtime.adapters.contract import InputAdapter, ModelAdapter, record_program
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.verify.comparing_forward import ComparingForward, Verification
from dbo_runtime.lab.verify.load_format import register_load_format
from dbo_runtime.lab.verify.stage_verification import StageVerification, record_stages
from dbo_runtime.setting_sources import make_switch
from dbo_runtime.vllm_plugin.api.groups import get_groups
from dbo_runtime.vllm_plugin.api.metadata_source import trace_builders
from dbo_runtime.vllm_plugin.api.model_classes import find_adapter
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.unsupported import check_config

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig
    from vllm.model_executor.models.interfaces_base import VllmModel

PROMPT_TOKENS = (7, 5, 9)
STEPS = 2  # a prefill of the prompts, and a decode
NORM_DEVIATION = 0.1  # deviation from 1 of norm weights
LOAD_FORMAT = "dbo_random"  # load format with random weights
ENVIRONMENT = {
    **make_switch(False),  # this module splits steps, not the plugin
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


def verify_adapter(
    directory: str,
    adapter: ModelAdapter | None = None,
    prompts: Sequence[int] = PROMPT_TOKENS,
    has_side: bool = False,
    **options: Any,
) -> Verification:
    """Run a model in vLLM, and compare its own forward with its adapter's program, unsplit and at every cut.

    If the adapter takes pipeline stages, also compare the programs of two stages, one after the other.

    Args:
        directory: directory with the model's `config.json`; weights are random.
        adapter: the adapter to verify; by default the registered one.
        prompts: number of tokens of each prompt.
        has_side: whether to verify the program that the adapter declares if there is a `side` lane.
        options: options for `vllm.LLM`, on top of `OPTIONS`.

    Raises:
        DeclineError: there is no adapter, it declines the model, or vLLM's step cannot be split.
        ProgramError: the adapter breaks its contract.
    """
    with run_model(directory, **options) as (llm, runner):
        model = runner.get_model()
        adapter = adapter or find_adapter(runner.vllm_config.model_config.architecture)
        program, stages = record(model, runner.vllm_config, adapter, has_side)
        take_inputs = adapter.take_inputs if isinstance(adapter, InputAdapter) else None
        splitter = ContextSplitter(get_platform(), runner.vllm_config, runner)
        comparison = ComparingForward(program, stages, model, splitter, take_inputs, runner.kv_caches)
        model.forward = comparison
        generate(llm, prompts)
    return comparison.verification


@contextmanager
def run_model(directory: str, **options: Any) -> Iterator[tuple[LLM, Any]]:
    """Run a model in vLLM in this process, with random weights; return it with vLLM's model runner.

    Args:
        directory: directory with the model's `config.json`.
        options: options for `vllm.LLM`, on top of `OPTIONS`.

    Raises:
        DeclineError: there are several ranks.
    """
    from vllm import LLM

    with patch.dict("os.environ", ENVIRONMENT):
        register_load_format(LOAD_FORMAT, fill_weights)
        trace_builders()
        llm = LLM(directory, **{**OPTIONS, **options})
        try:
            if llm.llm_engine.vllm_config.parallel_config.world_size > 1:
                raise DeclineError("an adapter is verified on one rank; leave out options that ask for several")
            yield llm, llm.llm_engine.model_executor.driver_worker.worker.model_runner
        finally:
            llm.llm_engine.engine_core.shutdown()


def generate(llm: LLM, prompts: Sequence[int], steps: int = STEPS) -> None:
    """Answer prompts of these lengths [tokens] with *steps* tokens each: one prefill, then decodes."""
    from vllm import SamplingParams

    tokens = [[3 + (7 * i + j * j) % 50 for j in range(length)] for i, length in enumerate(prompts)]
    sampling = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)


def record(
    model: VllmModel, vllm_config: VllmConfig, adapter: ModelAdapter | None, has_side: bool = False
) -> tuple[Program, StageVerification | None]:
    """Return the program of a model made by vLLM, and the programs of two pipeline stages.

    Raises:
        DeclineError: there is no adapter, or the model is declined.
        ProgramError: the adapter breaks its contract.
    """
    architecture = vllm_config.model_config.architecture
    if adapter is None:
        raise DeclineError("no adapter is registered", f"{architecture}; `dbo adapter new {architecture}` drafts one")
    groups = get_groups(vllm_config)
    collectives = ModelCollectives(get_platform(), groups.tensor_parallel, groups.data_parallel)
    program = (
        check_config(vllm_config) or adapter.decline(model) or record_program(adapter, model, collectives, has_side)
    )
    if isinstance(program, Decline):
        raise DeclineError(f"{architecture} is declined: {program.reason}", program.detail)
    return program, record_stages(adapter, model, collectives, has_side)


def fill_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model random weights that keep activations at scale. vLLM's own dummy weights are close to zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            scaled = noise / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 1 + NORM_DEVIATION * noise
            parameter.data.copy_(scaled)
