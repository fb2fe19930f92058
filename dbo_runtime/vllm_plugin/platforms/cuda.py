"""The platform of NVIDIA GPUs. Steps are split where runs on a GPU have shown them to be equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.platforms.platform import Platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

EVIDENCE_FILE = "cuda_evidence.json"
FIRST, SECOND = "first", "second"
"""vLLM's model runners, V1 and V2."""


class Evidence(NamedTuple):
    """Split steps that equalled unsplit ones on a GPU.

    Attributes:
        vllm: the release of vLLM.
        backend: name of the attention backend, such as FLASH_ATTN.
        runner: `FIRST` or `SECOND`.
        chip: name of the GPU.
        date: day of the run, as YYYY-MM-DD.
        steps: number of split steps compared.
    """

    vllm: str
    backend: str
    runner: str
    chip: str
    date: str
    steps: int


@cache
def read_evidence() -> tuple[Evidence, ...]:
    """Return all evidence in this release of the package; empty if no GPU has run the kit.

    `make hardware` writes the file from runs of the kit.
    """
    text = files(__package__).joinpath(EVIDENCE_FILE).read_text(encoding="utf-8")
    return tuple(Evidence(**entry) for entry in json.loads(text)["evidence"])


class CudaPlatform(Platform):
    """NVIDIA GPUs. What is proven is a combination of vLLM release, model runner and attention backend.

    Other properties of a model, such as drafts or quantized weights, are covered by comparing each kind's first steps.
    """

    has_device = True
    is_proven = True
    compares_first_steps = True  # driver, chip or kernel may differ from the evidence
    pads_batches = True  # pads to the size of a CUDA graph

    def check_version(self) -> Decline | None:
        """Return why steps of this vLLM are only split when compared, or None if a GPU has compared its steps."""
        proven = sorted({each.vllm for each in read_evidence()})
        actual = _find_release()
        if actual in proven:
            return None
        detail = f"vLLM {actual}; proven: {', '.join(proven)}" if proven else ""
        return Decline("not proven on 'cuda' yet", detail)

    def list_unproven(self, vllm_config: VllmConfig) -> Iterator[Decline]:
        """Yield the model runner or the attention backends whose steps no GPU has compared.

        Attention that is not cut does not meet what differs between the runners, so there nano-batches need the
        evidence of either runner only.

        AMD GPUs also have vLLM's device type `cuda`, and some of their backends have the same names but other kernels.
        """
        from vllm.platforms import current_platform

        from dbo_runtime.vllm_plugin.api.features import uses_second_runner

        if current_platform.is_rocm():
            yield Decline("not proven on AMD's GPUs yet")
            return
        runner, other = (SECOND, FIRST) if uses_second_runner(vllm_config) else (FIRST, SECOND)
        proven, of_other = _list_backends(runner), _list_backends(other)
        if not proven:
            yield Decline(f"vLLM's {runner} model runner is not proven on 'cuda' yet", only_micro=bool(of_other))
            proven = of_other
        if not proven:
            return
        for backend in sorted(_name_backends(vllm_config) - proven):
            yield Decline(
                "attention backend not proven on 'cuda' yet", f"{backend}; proven: {', '.join(sorted(proven))}"
            )

    def check_encoder(self, encoder: str) -> Decline | None:
        """Always decline: a model's attention backend says nothing about its encoder, and no GPU has run one yet.

        Once the GPU kit covers an encoder, the evidence should name it.
        """
        return Decline("vision encoder not proven on 'cuda' yet", encoder)

    def describe(self, vllm_config: VllmConfig) -> Iterator[str]:
        """Yield how vLLM's defaults on CUDA affect split steps: runner, CUDA graphs and asynchronous scheduling."""
        from dbo_runtime.vllm_plugin.api.features import uses_second_runner

        if uses_second_runner(vllm_config):
            yield "vLLM serves with its second model runner (V2); VLLM_USE_V2_MODEL_RUNNER=0 serves with the first"
        mode = vllm_config.compilation_config.cudagraph_mode
        if mode is not None and mode.name != "NONE":
            largest = vllm_config.compilation_config.max_cudagraph_capture_size
            yield (
                f"graphs ({mode.name}): steps that vLLM replays as a whole stay unsplit, as decodes do; a split step "
                f"runs eagerly, also where vLLM has graphs of its pieces (up to {largest} tokens)"
            )
        if vllm_config.scheduler_config.async_scheduling:
            yield "asynchronous scheduling: steps are split as without it"
        if not _name_backends(vllm_config):
            names = ", ".join(sorted({each.backend for each in read_evidence()})) or "none without DBO_CHECK=1"
            yield f"vLLM chooses the attention backend when it loads the model; those that are split: {names}"
        if vllm_config.model_config.multimodal_config is not None:
            yield "vision encoders are split with DBO_CHECK=1 only: no GPU has run one yet"


def _list_backends(runner: str) -> set[str]:
    """Return the attention backends that a GPU has compared with this model runner of the installed vLLM."""
    return {each.backend for each in read_evidence() if (each.vllm, each.runner) == (_find_release(), runner)}


def _find_release() -> str | None:
    """Return the installed vLLM release without the build's suffix; None if there is none."""
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:
        return None


def _name_backends(vllm_config: VllmConfig) -> set[str]:
    """Return the names of the attention backends of a model's layers, such as FLASH_ATTN.

    Before the model is loaded, this is the backend requested by the user; empty if vLLM is to choose.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    asked = getattr(vllm_config.attention_config, "backend", None)
    return found or ({asked.name} if asked is not None else set())
