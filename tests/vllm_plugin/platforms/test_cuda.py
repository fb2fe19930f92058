"""On GPUs steps are split as far as evidence goes: a release of vLLM, a model runner, an attention backend.

Forwards of vision encoders are not, for there is none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.vllm_plugin.encoder.program import EncoderProgram
from dbo_runtime.vllm_plugin.install import model_setup
from dbo_runtime.vllm_plugin.install.model_setup import _make_first_steps
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL
from dbo_runtime.vllm_plugin.platforms import cuda
from dbo_runtime.vllm_plugin.platforms.cuda import Evidence, read_evidence
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

RUN = Evidence("0.30.0", "FLASH_ATTN", "first", "a chip", "2026-12-01", 37)
MLA = RUN._replace(backend="FLASH_ATTN_MLA")
UNSPLIT = "not proven on 'cuda' yet"


class Layer:
    """A layer as far as its attention backend goes."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


def make_config(
    *loaded: str,
    asked: str | None = None,
    second: bool = False,
    graphs: CUDAGraphMode = CUDAGraphMode.NONE,
    overlaps_steps: bool = False,
    multimodal: object | None = None,
) -> Any:
    layers = {f"layers.{number}": Layer(name) for number, name in enumerate(loaded)}
    compilation = {"cudagraph_mode": graphs, "max_cudagraph_capture_size": 512}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={**layers, "experts": object()}, **compilation),
        attention_config=SimpleNamespace(backend=None if asked is None else SimpleNamespace(name=asked)),
        scheduler_config=SimpleNamespace(async_scheduling=overlaps_steps),
        model_config=SimpleNamespace(multimodal_config=multimodal),
        use_v2_model_runner=second,
    )


@pytest.fixture
def _evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "read_evidence", lambda: (RUN, MLA))


def tell(installed: str, monkeypatch: pytest.MonkeyPatch, config: RuntimeConfig | None = None) -> str | None:
    monkeypatch.setattr(cuda, "version", lambda name: installed)
    found = get_platform("cuda").check_support(config or RuntimeConfig(enabled=True))
    return None if found is None else str(found)


@pytest.mark.usefixtures("_evidence")
@pytest.mark.parametrize("installed", ["0.30.0", "0.30.0+cu130"])
def test_a_release_that_a_gpu_has_compared_is_split(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tell(installed, monkeypatch) is None


@pytest.mark.usefixtures("_evidence")
def test_another_release_is_split_where_each_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    said = tell("0.31.0", monkeypatch)
    assert said is not None
    assert said.startswith(f"{UNSPLIT} (vLLM 0.31.0; proven: 0.30.0; with DBO_CHECK=1")
    assert tell("0.31.0", monkeypatch, RuntimeConfig(enabled=True, check=True)) is None


@pytest.mark.parametrize("installed", ["0.30.0", "0.31.0"])
def test_without_evidence_no_release_is_split(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "read_evidence", lambda: ())
    said = tell(installed, monkeypatch)
    assert said is not None
    assert said.startswith(f"{UNSPLIT} (with DBO_CHECK=1")


OTHER_RUNNER = Decline("vLLM's second model runner is not proven on 'cuda' yet", only_micro=True)


@pytest.mark.usefixtures("_evidence")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (make_config("FLASH_ATTN", "FLASH_ATTN_MLA"), []),
        (make_config("FLASH_ATTN", asked="TRITON_ATTN"), []),  # of the layers, which have another than was asked for
        (make_config(), []),  # is not known before the model is loaded
        (
            make_config("FLASH_ATTN", "GDN_ATTN"),
            [Decline("attention backend not proven on 'cuda' yet", "GDN_ATTN; proven: FLASH_ATTN, FLASH_ATTN_MLA")],
        ),
        (
            make_config(asked="FLASHINFER"),
            [Decline("attention backend not proven on 'cuda' yet", "FLASHINFER; proven: FLASH_ATTN, FLASH_ATTN_MLA")],
        ),
        (make_config("FLASH_ATTN", second=True), [OTHER_RUNNER]),
        (
            make_config("GDN_ATTN", second=True),
            [
                OTHER_RUNNER,
                Decline("attention backend not proven on 'cuda' yet", "GDN_ATTN; proven: FLASH_ATTN, FLASH_ATTN_MLA"),
            ],
        ),
    ],
    ids=["proven", "loaded", "unknown", "another backend", "asked for", "another runner", "neither"],
)
def test_a_runner_and_a_backend_are_split_that_a_gpu_has_compared_together(
    config: Any, expected: list[Decline], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "version", lambda name: "0.30.0")
    assert list(get_platform("cuda").list_unproven(config)) == expected


@pytest.mark.usefixtures("_evidence")
def test_what_nvidias_gpus_have_shown_says_nothing_of_amds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM both are `cuda`, and AITER's backend is called FLASH_ATTN."""
    monkeypatch.setattr(cuda, "version", lambda name: "0.30.0")
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    assert list(get_platform("cuda").list_unproven(make_config("FLASH_ATTN"))) == [
        Decline("not proven on AMD's GPUs yet")
    ]


@pytest.mark.usefixtures("_evidence")
@pytest.mark.parametrize(
    ("platform", "check", "declined"),
    [("cuda", False, "Qwen3_VisionTransformer; with DBO_CHECK=1 "), ("cuda", True, None), ("cpu", False, None)],
)
def test_evidence_of_a_model_says_nothing_of_its_vision_encoder(
    platform: str, check: bool, declined: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "version", lambda name: "0.30.0")
    encoder = record(platform, RuntimeConfig(enabled=True, check=check), monkeypatch)
    if declined is None:
        assert encoder is RECORDED
    else:
        assert isinstance(encoder, Decline)
        assert (encoder.reason, encoder.detail[: len(declined)]) == (
            "vision encoder not proven on 'cuda' yet",
            declined,
        )


@pytest.mark.usefixtures("_evidence")
def test_what_comparing_does_not_help_against_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Decline("no adapter is registered for the encoder")
    monkeypatch.setattr(cuda, "version", lambda name: "0.30.0")
    assert record("cuda", RuntimeConfig(enabled=True), monkeypatch, unknown) == unknown


class Qwen3_VisionTransformer:
    """An encoder as far as its name goes."""


RECORDED: Any = EncoderProgram(Qwen3_VisionTransformer(), None, None)  # type: ignore[arg-type]


def record(
    platform: str, config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch, recorded: Any = RECORDED
) -> EncoderProgram | Decline | None:
    """Return what is made of the encoder of a multimodal model where *recorded* is its program, or none."""
    monkeypatch.setattr(model_setup, "record_encoder", lambda *_: recorded)
    served = make_config("FLASH_ATTN", multimodal=object())
    rank: Any = SimpleNamespace(vllm_config=served, stage=WHOLE_MODEL, platform=get_platform(platform), config=config)
    return model_setup._record_encoder(rank, rank, rank)


@pytest.mark.usefixtures("_evidence")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (make_config("FLASH_ATTN"), []),
        (make_config("FLASH_ATTN", second=True), ["vLLM serves with its second model runner (V2); VLLM_USE_V2"]),
        (
            make_config("FLASH_ATTN", graphs=CUDAGraphMode.FULL_AND_PIECEWISE),
            ["graphs (FULL_AND_PIECEWISE): steps that vLLM replays as a whole stay unsplit, as decodes do; a split"],
        ),
        (make_config("FLASH_ATTN", overlaps_steps=True), ["asynchronous scheduling: steps are split as without it"]),
        (make_config(), ["vLLM chooses the attention backend when it loads the model; those that are split: FLASH_"]),
        (make_config("FLASH_ATTN", multimodal=object()), ["vision encoders are split with DBO_CHECK=1 only: no GPU"]),
    ],
    ids=["eager", "second runner", "graphs", "asynchronous", "backend", "images"],
)
def test_the_doctor_says_what_vllms_defaults_mean(config: Any, expected: list[str]) -> None:
    said = list(get_platform("cuda").describe(config))
    assert [text[: len(start)] for text, start in zip(said, expected, strict=True)] == expected


@pytest.mark.parametrize(("platform", "compared"), [("cuda", True), ("cpu", False)])
def test_first_steps_are_compared_on_a_gpu_with_tested_versions_too(
    platform: str, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dbo_runtime.vllm_plugin.install.model_setup.is_tested", lambda: True)
    rank: Any = SimpleNamespace(platform=get_platform(platform), unproven=(), log=None)
    assert (_make_first_steps(rank) is not None) == compared


def test_evidence_is_from_gpus() -> None:
    """The file comes with the package. What is in it was not run on a CPU, nor over a stand-in."""
    for each in read_evidence():
        assert "NVIDIA" in each.chip
        assert each.steps > 0
