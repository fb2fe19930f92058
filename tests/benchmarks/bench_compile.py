"""What a split step loses because its ops run eager: the same step as vLLM compiles it, and as ops of a program.

    python -m pytest tests/benchmarks/bench_compile.py -q -s

Two engines of the same model in this process, one rank each: one compiles, as vLLM does by default, and one has
`enforce_eager`. Each takes one real step, whose forward context is kept; then the forwards of both run again and again
on it, in all modes. Each round runs every mode once, in random order. Times are CPU time of this process, one thread;
figures are medians over rounds, and ratios are medians of the ratios within a round.

- **compiled** is vLLM's own forward, and **again** the same once more, which tells how far ratios can be trusted;
- **eager** is the same one without what was compiled (`skip_compiled`);
- **program** is what a split step runs, the adapter's ops one by one, as one micro-batch and without a device, so that
  nothing is in it but the ops; **ops compiled** is this with `DBO_COMPILE=1`;
- **eager engine** and **program, eager engine** are vLLM's forward and the program in the engine that compiles nothing.

Embedding is in all of them, sampling in none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="needs vLLM, which compiles")

import torch
from vllm import LLM, SamplingParams
from vllm.forward_context import get_forward_context, override_forward_context

from dbo_runtime.adapters.contract import record_program
from dbo_runtime.adapters.registry import get_adapter
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.alternatives.compilation import OpCompiler
from dbo_runtime.vllm_plugin.api.groups import get_groups
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from tests.support.page import Publish, find_command, make_table
from tests.support.vllm.families import FAMILIES, SIZES, TINY, find_backend

SECONDS = 8.0  # of measuring each step, about
ROUNDS = 5, 60  # at least, at most
LENGTH = 64  # tokens of the prompts that are decoded after: a short context, so that the rest counts more
MODES = "again", "eager", "program", "ops compiled", "eager engine", "program, eager engine"
HEADER = ("step", *(f"{mode} / compiled" for mode in MODES))
EVIDENCE = ("step", "rounds", "compiled, ms CPU")
STEPS = {
    "decode of 1": (LENGTH,),
    "decode of 8": (LENGTH,) * 8,
    "decode of 32": (LENGTH,) * 32,
    "decode of 64": (LENGTH,) * 64,
    "prefill of 512": (512,),
    "prefill of 2,048": (2048,),
}
LARGE = {"num_hidden_layers": 4, "hidden_size": 2048, "max_position_embeddings": 4096}
QWEN = {"intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
DEEPSEEK = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
}


class Subject(NamedTuple):
    """A model, by its architecture; *sizes* are of one with made-up weights, none of the trained one."""

    architecture: str
    dtype: str
    sizes: Mapping[str, Any] | None = None


SUBJECTS = {
    "tiny-deepseek (trained, hidden 128), fp32": Subject("DeepseekV3ForCausalLM", "float32"),
    "Qwen3, hidden 2,048, 4 layers, fp32": Subject("Qwen3ForCausalLM", "float32", {**LARGE, **QWEN}),
    "Qwen3, hidden 2,048, 4 layers, bf16": Subject("Qwen3ForCausalLM", "bfloat16", {**LARGE, **QWEN}),
    "DeepSeek-V3, hidden 1,024, 4 layers, bf16": Subject("DeepseekV3ForCausalLM", "bfloat16", {**LARGE, **DEEPSEEK}),
}


class Instruction(NamedTuple):
    """One call of a forward: its arguments and the context it ran in."""

    arguments: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Any


class Served:
    """A model in an engine of its own, in this process."""

    def __init__(self, model: Path, subject: Subject, eager: bool) -> None:
        self._llm = LLM(
            str(model),
            dtype=subject.dtype,
            load_format="auto" if subject.sizes is None else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=eager,
            attention_backend=find_backend(subject.architecture),
            kv_cache_memory_bytes=1 << 28,
            max_model_len=2048 + LENGTH if subject.sizes else 1024,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self._runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._model = self._runner.get_model()
        config = self._runner.vllm_config
        groups = get_groups(config)
        collectives = ModelCollectives(get_platform(), groups.tensor_parallel, groups.data_parallel)
        adapter = get_adapter(subject.architecture)
        assert adapter is not None
        self.program = record_program(adapter, self._model, collectives)
        self.compiled = self.program
        if not eager:
            compiler = OpCompiler(config, collectives, open_log())
            self.compiled = compiler.wrap(self.program)
            self.functions = compiler.compile(self.compiled)

    @property
    def compilation(self) -> Any:
        return self._runner.vllm_config.compilation_config

    @property
    def longest(self) -> int:
        return int(self._runner.vllm_config.model_config.max_model_len)

    def keep_step(self, prompts: tuple[int, ...], decodes: bool) -> Instruction:
        """Take steps up to the prefill of these prompts, or the first decode after it, and keep that one."""
        engine, kept = self._llm.llm_engine, []
        forward, wanted = self._model.forward, len(prompts) if decodes else sum(prompts)

        def keep(*arguments: Any, **kwargs: Any) -> Any:
            kept.append(Instruction(arguments, kwargs, get_forward_context()))
            return forward(*arguments, **kwargs)

        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
        for number, length in enumerate(prompts):
            tokens = [(number * 7 + j * (1 + number) + j * j) % 250 + 3 for j in range(length)]
            engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)
        self._model.forward = keep
        try:
            while not kept or kept[-1].kwargs["positions"].shape[-1] != wanted:
                assert engine.has_unfinished_requests(), "no step had all prompts"
                engine.step()
        finally:
            del self._model.forward
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        step = kept[-1]
        assert step.arguments == (), "the runner names all arguments"
        return step._replace(kwargs={name: _copy(value) for name, value in step.kwargs.items()})

    def run_own(self, step: Instruction, skip_compiled: bool = False) -> torch.Tensor:
        """Run the model's own forward."""
        step.context.skip_compiled = skip_compiled
        with override_forward_context(step.context):
            hidden: torch.Tensor = self._model.forward(**step.kwargs)
        return hidden

    def run_program(self, step: Instruction, program: Program) -> torch.Tensor:
        """Run the ops of a program of this model, one after the other."""
        with override_forward_context(step.context):
            x = self._model.embed_input_ids(step.kwargs["input_ids"])
            hidden: torch.Tensor = run_sequential([program], [(x, step.kwargs["positions"])])[0][0]
        return hidden

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def measure(modes: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return CPU seconds of each mode in each round; a first round warms up and says how many there is time for."""
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    names, chance = list(modes), random.Random(0)
    rounds = ROUNDS[1]
    turn = 0
    while turn <= rounds:
        chance.shuffle(names)
        start = time.perf_counter()
        for name in names:
            begun = time.process_time()
            modes[name]()
            seconds[name].append(time.process_time() - begun)
        if turn < 2:  # the very first one may still compile
            rounds = min(ROUNDS[1], max(ROUNDS[0], int(SECONDS / (time.perf_counter() - start))))
        turn += 1
    return {name: each[1:] for name, each in seconds.items()}


def find_ratio(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))


@contextmanager
def serve(subject: Subject, directory: Path) -> Iterator[tuple[Served, Served]]:
    """Yield an engine that compiles, and one that does not."""
    model = TINY if subject.sizes is None else write_config(subject, directory)
    engines = [Served(model, subject, eager) for eager in (False, True)]
    try:
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            engine.close()


def write_config(subject: Subject, directory: Path) -> Path:
    from transformers import AutoConfig

    model_type, extra = FAMILIES[subject.architecture]
    assert subject.sizes is not None
    config = AutoConfig.for_model(model_type, **{**SIZES, **extra, **subject.sizes})
    config.architectures = [subject.architecture]
    config.save_pretrained(directory)
    return directory


def take_step(compiling: Served, eager: Served, title: str) -> tuple[list[str], list[str], list[float]]:
    """Measure one kind of step; return a row of each table, and the ratios of the program, eager and compiled."""
    step, other = (engine.keep_step(STEPS[title], title.startswith("decode")) for engine in (compiling, eager))
    modes: dict[str, Callable[[], torch.Tensor]] = {
        "compiled": partial(compiling.run_own, step),
        "again": partial(compiling.run_own, step),
        "eager": partial(compiling.run_own, step, skip_compiled=True),
        "program": partial(compiling.run_program, step, compiling.program),
        "ops compiled": partial(compiling.run_program, step, compiling.compiled),
        "eager engine": partial(eager.run_own, other),
        "program, eager engine": partial(eager.run_program, other, eager.program),
    }
    unsplit = modes["compiled"]()
    split = modes["ops compiled"]()
    error = float((split - unsplit).abs().max() / unsplit.abs().max())
    seconds = measure(modes)
    ratios = {name: find_ratio(seconds[name], seconds["compiled"]) for name in MODES}
    evidence = [title, str(len(seconds["compiled"])), f"{median(seconds['compiled']) * 1e3:.2f}"]
    print(title, {name: round(ratio, 3) for name, ratio in ratios.items()}, f"{error:.0e}", flush=True)
    row = [title, *(f"{ratio:.3f}" for ratio in ratios.values())]
    return row, evidence, [ratios["program"], ratios["ops compiled"]]


def test_what_a_split_step_loses(publish: Publish, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = []
    try:
        for number, (name, subject) in enumerate(SUBJECTS.items()):
            with torch.inference_mode(), serve(subject, tmp_path / str(number)) as (compiling, eager):
                print(f"\n{name}", flush=True)
                steps = [title for title, prompts in STEPS.items() if max(prompts) <= compiling.longest - LENGTH]
                rows, evidence, losses = zip(*(take_step(compiling, eager, title) for title in steps), strict=True)
                worst = [max(each) - 1 for each in zip(*losses, strict=True)]
                lines += [f"**{name}** ({compiling.compilation.mode.name} by {compiling.compilation.backend}):", ""]
                lines += [*make_table(HEADER, rows), "", *make_table(EVIDENCE, evidence), ""]
                lines += [f"- A split step loses at most {worst[0]:.1%}, with its ops compiled {worst[1]:.1%}.", ""]
    finally:
        torch.set_num_threads(threads)
    publish("compile", find_command(__file__), lines[:-1])
