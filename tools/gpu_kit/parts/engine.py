"""A vLLM engine on the device, and what parts ask of it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..machine import ROOT
from .checkpoints import get_checkpoint

EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"
WITHOUT_WEIGHTS = ("wide", "deep")
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_seqs": 64,
    "skip_tokenizer_init": True,
    "worker_extension_cls": EXTENSION,
    "disable_log_stats": True,
    "enable_prefix_caching": False,  # prompts are repeated, and a hit is another computation
}
# The cache is of a given size, and no memory is claimed by share, so that engines do not see each other's memory.
BY_DEVICE: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.05,
        # What vLLM compiles ahead is more than what is used here, and engines side by side would wait for each other.
        "kernel_config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False},
    },
    "cpu": {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 1 << 26,
    },
}
BETWEEN = "between requests"
Cuts = Sequence[int] | str | None
"""Where steps are cut: at these tokens; BETWEEN requests, near the middle; None: where the settings say."""

EVERY_STEP = {"DBO_MODE": "always", "DBO_MIN_TOKENS": "1", "DBO_MIN_PREFILL_TOKENS": "0"}


class Engine:
    """An `LLM` over one of the kit's models.

    Args:
        model: its name.
        device: device type that vLLM serves on.
        options: arguments of `LLM`, before the kit's.

    Attributes:
        llm: vLLM's.
        seconds: that it took to start.
    """

    def __init__(self, model: str, device: str, **options: Any) -> None:
        folder = get_checkpoint(model, device)
        start = time.perf_counter()
        from vllm import LLM

        self.llm: Any = LLM(str(folder), use_tqdm_on_load=False, **{**make_options(model, device), **options})
        self.seconds = round(time.perf_counter() - start, 1)
        if self.llm.collective_rpc("dbo_statistics")[0] is None:
            raise RuntimeError("no step of this engine would be split; its log says why")

    def describe(self) -> dict[str, Any]:
        """Return what of vLLM serves: attention backends, model runner, graphs."""
        from dbo_runtime.vllm_plugin.api.features import uses_second_runner

        config = self.llm.llm_engine.vllm_config
        return {
            "backends": self.llm.collective_rpc(list_backends)[0],
            "runner": "second" if uses_second_runner(config) else "first",
            "graphs": config.compilation_config.cudagraph_mode.name,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "seconds to start": self.seconds,
        }

    def configure(self, settings: Mapping[str, str], cuts: Cuts = None) -> None:
        """Change settings from the next step on, and where steps are cut."""
        self.llm.collective_rpc("dbo_configure", args=(dict(settings),))
        if cuts == BETWEEN:
            self.llm.collective_rpc(cut_between_requests)
        else:
            self.llm.collective_rpc("dbo_cut_at", args=(None if cuts is None else list(cuts),))

    @property
    def is_compiled(self) -> bool:
        """Whether vLLM compiles the model."""
        return bool(self.llm.llm_engine.vllm_config.compilation_config.mode)

    @property
    def cuts_prompts(self) -> bool:
        """Whether vLLM cuts prompts that are too long for a step: with latent attention, its CPU build does not."""
        return bool(self.llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill)

    @contextmanager
    def without_compilation(self) -> Iterator[None]:
        """Return a context manager in which the model's own code runs, not what was compiled of it."""
        self.llm.collective_rpc(use_compiled, args=(False,))
        try:
            yield
        finally:
            self.llm.collective_rpc(use_compiled, args=(True,))

    @contextmanager
    def with_short_steps(self, tokens: int) -> Iterator[None]:
        """Return a context manager in which vLLM schedules so many tokens a step at most: it cuts prompts itself."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = before

    def count(self) -> dict[str, Any]:
        """Return how many steps were split so far, and why others were not."""
        found = self.llm.collective_rpc("dbo_statistics")[0]
        return {"split": found["split"], "declined": found["declined"]}

    def prefill(self, lengths: Sequence[int], tokens: int = 1) -> None:
        """Answer prompts of these lengths with so many tokens each."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.llm.generate(import_example("compare_modes").make_prompts(self.llm, lengths), sampling, use_tqdm=False)


def make_options(model: str, device: str) -> dict[str, Any]:
    """Return the kit's options for `LLM`."""
    weights = {"load_format": "dummy"} if model in WITHOUT_WEIGHTS else {}
    attention = {"attention_backend": "CPU_MLA"} if (model, device) == ("deepseek", "cpu") else {}
    return {**OPTIONS, **BY_DEVICE[device], **weights, **attention}


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Return options for `LLM` from words such as `enforce_eager=false`."""
    options = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def list_backends(worker: Any) -> list[str]:
    """Return the attention backends that a worker's layers use."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return sorted({layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")})


def use_compiled(worker: Any, is_wanted: bool) -> None:
    """Let a worker's model run what was compiled of it, or its own code."""
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "do_not_compile"):
            module.do_not_compile = not is_wanted


def cut_between_requests(worker: Any) -> None:
    """Let a worker cut each step once, between two requests."""
    worker.dbo_cut_at(None)
    forward = worker._dbo_forward()
    if forward is not None:
        forward.decider.choose_cuts = find_middle


def find_middle(batch: Any) -> list[int]:
    """Return the end of a request of a batch that is nearest to its middle, as a cut; none if it has one request."""
    ends = [end for end in batch.starts[1:-1] if 0 < end < batch.tokens]
    return [min(ends, key=lambda end: abs(2 * end - batch.tokens))] if ends else []


def import_example(name: str) -> Any:
    """Return a module of examples/, which are programs and no package."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def keep(path: Path, name: str) -> None:
    """Let a file come back from the machine, under this name."""
    folder = os.environ.get("GPU_KIT_KEEP")
    if folder is not None:
        shutil.copyfile(path, Path(folder) / name)


def get_work(name: str) -> Path:
    """Return a new folder for files of a part."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))
