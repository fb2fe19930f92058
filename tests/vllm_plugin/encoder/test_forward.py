"""Vision encoders with host lengths, split and unsplit: vLLM's very bits, on one rank and on two."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dbo_models import qwen_vl
from dbo_models.qwen_vl_text import Qwen3VLAdapter, _count_levels
from dbo_models.toy import ToyCollectives
from dbo_runtime.adapters.registry import get_encoder_adapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
from dbo_runtime.vllm_plugin.encoder.host_lengths import NAME, install_host_lengths, make_attention_class, make_lengths
from dbo_runtime.vllm_plugin.encoder.program import EncoderProgram, record_encoder
from dbo_runtime.vllm_plugin.platforms.encoder_attention import CpuAttention
from dbo_runtime.vllm_plugin.platforms.platform import Platform
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.failures import FAILED, FAILED_STEP
from tests.support.vllm.engines import Engines

ROOT = Path(__file__).parents[3]
FAMILIES = ("qwen2.5", "qwen3")
CPU = get_platform("cpu")
ALWAYS = RuntimeConfig(enabled=True, mode="always")


def compare_on_ranks(engines: Engines, ranks: int, *arguments: Any) -> list[dict[str, Any]]:
    """Let ranks that share an encoder run batches of images, and return what each of them reports."""
    from tests.support.vllm.encoder_ranks import compare_on_rank  # and with it vLLM's models

    return engines.run(ranks, compare_on_rank, ranks, *arguments)


def count_operations(family: str, ranks: int) -> list[float]:
    """Return what images of 4x4 and of 8x8 patches, and a video of two such, take: four blocks of width 64 and 96."""
    mlp = 3 if family == "qwen2.5" else 2
    linear = 2 * 4 * (4 * 64 * 64 + mlp * 64 * 96) / ranks
    lengths = {16: 4 * 16, 64: 2 * 64 + 2 * 16 if family == "qwen2.5" else 4 * 64}  # over blocks
    return [patches * (linear + 4 * 64 / ranks * lengths[frame]) for patches, frame in ((16, 16), (64, 64), (128, 64))]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ranks", "batches"),
    [(2, 12), pytest.param(1, 200, marks=pytest.mark.slow), pytest.param(2, 200, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_split_or_unsplit_embeddings_are_vllms_own(
    tmp_path: Path, family: str, ranks: int, batches: int, engines: Engines
) -> None:
    found = compare_on_ranks(engines, ranks, tmp_path, family, batches)
    for rank in found:
        assert rank["differing"] == []
        assert rank["runs"]["planned"] == batches
        assert rank["runs"]["cut"] > batches
        assert rank["statistics"] == found[0]["statistics"]
        assert rank["statistics"]["split"] > 2 * batches
        assert set(rank["statistics"]["declined"]) <= {"one image cannot be cut", "images cannot be shared out"}
        assert rank["work"] == count_operations(family, ranks)
        # vLLM's own reads lengths in each of the four blocks. What is left reads what the host has, once a kind.
        assert rank["reads"]["plain"]["tolist"] == 4
        assert "tolist" not in rank["reads"]["planned"]
        assert sum(rank["reads"]["planned"].values()) == (4 if family == "qwen2.5" else 0)


@pytest.mark.slow
@pytest.mark.vllm
def test_lengths_that_the_first_block_left_for_all_are_found_out(tmp_path: Path, engines: Engines) -> None:
    """The mistake of vllm-ascend #6448: blocks that attend within whole images were given windows."""
    (rank,) = compare_on_ranks(engines, 1, tmp_path, "qwen2.5", 6, True)
    assert {line.split()[0] for line in rank["differing"]} == {"planned", "cut", "always"}


class Doubling(torch.nn.Module):
    """An encoder that doubles patches, and remembers the grids it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.unsplit: list[Any] = []
        self.statements: list[str] = []

    def forward(self, x: torch.Tensor, grid_thw: Any, *, encoder_metadata: Any = None) -> torch.Tensor:
        self.unsplit.append(grid_thw)
        return x * 2


class DoublingAdapter:
    """Splits it, and remembers the grids, too."""

    def __init__(self, factor: float = 2.0, refusal: Decline | None = None) -> None:
        self.split: list[Any] = []
        self.factor, self.refusal = factor, refusal

    def decline(self, encoder: Any) -> Decline | None:
        return self.refusal

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        return float(grid[0] * grid[1] * grid[2])

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Any, pixels: Value, grids: Value) -> Value:
        def double(pixels: torch.Tensor, grids: Any) -> torch.Tensor:
            self.split.append(grids)
            return pixels * self.factor

        doubled: Value = p.compute("double", double, pixels, grids)
        return doubled


def make_split(
    adapter: DoublingAdapter, config: RuntimeConfig = ALWAYS, transport: str = "network", group: Any = None
) -> Any:
    encoder = Doubling()
    p = ProgramBuilder()
    pixels, grids = p.input("pixels"), p.input("grids", token_dim=None, request_dim=0)
    program = p.build(adapter.record(p, encoder, ToyCollectives(), pixels, grids))
    runtime = MicroBatchRuntime(program, CpuDevice(), config, open_log(quiet=True), 1 if transport == "none" else 2)
    agreement: Any = SimpleNamespace(compare=encoder.statements.append, find_first=str)  # one rank
    SplitEncoder(encoder, adapter, runtime, transport, agreement, group=group).install()
    return encoder


GRIDS = [[1, 2, 2], [1, 4, 4], [2, 2, 2], [1, 2, 4]]  # 4, 16, 8, 8 patches


def make_patches(grids: Sequence[Sequence[int]] = GRIDS) -> torch.Tensor:
    return torch.arange(float(sum(t * h * w for t, h, w in grids)))[:, None]


@pytest.mark.parametrize(
    ("parts", "shares"),
    [(2, [GRIDS[:2], GRIDS[2:]]), (3, [GRIDS[:1], GRIDS[1:2], GRIDS[2:]])],
)
def test_images_are_shared_out_by_work_and_not_cut_inside(parts: int, shares: list[Any]) -> None:
    adapter = DoublingAdapter()
    encoder = make_split(adapter, RuntimeConfig(enabled=True, mode="always", micro_batches=parts))
    for given in (GRIDS, torch.tensor(GRIDS)):
        adapter.split.clear()
        assert torch.equal(encoder(make_patches(), given), make_patches() * 2)
        assert adapter.split == shares
    assert encoder.unsplit == []


@pytest.mark.parametrize(
    ("grids", "patches", "given", "reason"),
    [
        (GRIDS[:1], 4, {}, "one image cannot be cut"),
        ([], 0, {}, "no images"),
        (GRIDS, 35, {}, "images and their grids do not match (36 patches, not 35)"),
        (None, 36, {"encoder_metadata": {}}, "the encoder is given more than images (encoder_metadata)"),
        ([[1, 2, 2], [0, 2, 2]], 4, {}, "images cannot be shared out (2 of 4 patches)"),
    ],
)
def test_what_cannot_be_cut_is_handed_to_vllm_as_it_came(
    grids: Any, patches: int, given: dict[str, Any], reason: str
) -> None:
    adapter = DoublingAdapter()
    encoder = make_split(adapter)
    declined: list[Decline] = []
    encoder.forward.runtime.decline = declined.append
    x = torch.ones(patches, 1)
    assert torch.equal(encoder(x, grids, **given), x * 2)
    assert (encoder.unsplit, adapter.split) == ([grids], [])
    assert list(map(str, declined)) == [reason]


@pytest.mark.parametrize(
    ("settings", "transport", "reason"),
    [
        ({"mode": "off"}, "network", "DBO_MODE is off"),
        ({"mode": "auto"}, "none", "no communication to hide"),
        ({"mode": "auto"}, "shared memory", "no communication to hide"),
        ({"mode": "auto"}, "network", "fewer tokens than DBO_MIN_TOKENS"),
        ({"mode": "auto", "min_tokens": 36}, "network", None),
        ({"mode": "auto", "min_tokens": 36, "micro_batches": 4}, "network", None),
        ({"mode": "always"}, "none", None),
    ],
)
def test_the_settings_decide(settings: dict[str, Any], transport: str, reason: str | None) -> None:
    encoder = make_split(DoublingAdapter(), RuntimeConfig(enabled=True, **settings), transport)
    encoder(make_patches(), GRIDS)
    assert list(encoder.forward.runtime.statistics.declined) == ([] if reason is None else [reason])
    assert encoder.forward.runtime.statistics.split == (reason is None)


def test_a_wrong_program_is_found_out_by_a_check() -> None:
    encoder = make_split(DoublingAdapter(factor=2.1), RuntimeConfig(enabled=True, mode="always", check=True))
    with pytest.raises(SplitError, match=r"split and unsplit embeddings of images differ by .* cuts at \[20\]"):
        encoder(make_patches(), GRIDS)
    encoder(make_patches(GRIDS[:1]), GRIDS[:1])
    split, unsplit = encoder.statements  # which all ranks compare
    assert split.endswith(", cuts at [20]")
    assert unsplit == "one image cannot be cut"


def test_a_thumbnail_and_a_page_are_not_worth_splitting() -> None:
    grids = [[1, 40, 40], [1, 2, 2]]
    encoder = make_split(DoublingAdapter(), RuntimeConfig(enabled=True, mode="auto"))
    encoder(make_patches(grids), grids)
    assert list(encoder.forward.runtime.statistics.declined) == ["no balanced cut"]


class Failing(DoublingAdapter):
    """One that fails with another version of vLLM: in its op, or in what it estimates."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        if self.where == "estimate":
            raise AttributeError("no attribute 'window_size'")
        return super().estimate_flops(encoder, grid)

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Any, pixels: Value, grids: Value) -> Value:
        def fail(pixels: torch.Tensor, grids: Any) -> torch.Tensor:
            raise AttributeError("no attribute 'input_norm'")

        op = fail if self.where == "op" else torch.add
        embedded: Value = p.compute("embed", op, pixels, grids)
        return embedded


@pytest.mark.parametrize(
    ("where", "reason", "says"),
    [
        ("op", FAILED_STEP, "AttributeError: no attribute 'input_norm'; while running op 'embed'"),
        ("estimate", FAILED, "Failing: AttributeError: no attribute 'window_size', at tests/vllm_plugin/encoder/test_"),
    ],
)
def test_an_encoder_whose_adapter_fails_runs_unsplit_from_then_on(where: str, reason: str, says: str) -> None:
    group: Any = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
    encoder = make_split(Failing(where), group=group)
    declined: list[Decline] = []
    encoder.forward.runtime.decline = declined.append
    for _ in range(3):
        assert torch.equal(encoder(make_patches(), GRIDS), make_patches() * 2)
    assert [decline.reason for decline in declined] == [reason] * 3
    assert says in declined[-1].detail


class Reducing(DoublingAdapter):
    """One that communicates after it has doubled, and remembers on which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Any, pixels: Value, grids: Value) -> Value:
        def reduce(partial: torch.Tensor) -> torch.Tensor:
            self.threads.append(threading.current_thread())
            return partial

        doubled = super().record(p, encoder, collectives, pixels, grids)
        reduced: Value = p.comm("reduce", reduce, doubled, overwrites=(doubled,))
        return reduced


def test_the_first_split_forward_leaves_no_collective_to_a_lane_that_an_error_would_end() -> None:
    """Ranks whose op fails alike would wait for each other in what only some of them had begun."""
    group: Any = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
    adapter = Reducing()
    encoder = make_split(adapter, group=group)
    for _ in range(2):
        assert torch.equal(encoder(make_patches(), GRIDS), make_patches() * 2)
    here = [thread is threading.current_thread() for thread in adapter.threads]
    assert here == [True, True, False, False]
    assert encoder.forward.runtime.statistics.split == 2


def test_qwens_pixels_are_normed_where_this_version_of_vllm_does_that_in_the_encoder() -> None:
    """vLLM 0.23 does it in the processor, and its encoder has no `input_norm`."""
    meta = {"window_index": torch.tensor([1, 0])}
    shape: Any = {"patch_embed": lambda x: x, "device": "cpu", "dtype": torch.float64, "spatial_merge_unit": 4}
    pixels = torch.arange(8.0)[:, None]
    encoder: Any = SimpleNamespace(**shape)
    plain = qwen_vl._embed_in_windows(encoder, pixels, meta)
    assert (plain.dtype, plain.flatten().tolist()) == (torch.float64, [4, 5, 6, 7, 0, 1, 2, 3])
    encoder = SimpleNamespace(**shape, input_norm=lambda x, dtype: (x / 2).to(dtype))
    assert torch.equal(qwen_vl._embed_in_windows(encoder, pixels, meta), plain / 2)


def make_config(**changes: Any) -> Any:
    settings = {"compile_mm_encoder": False, "cudagraph_mm_encoder": False, "lora": None, "mode": "weights", **changes}
    multimodal = SimpleNamespace(mm_encoder_tp_mode=settings["mode"])
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        compilation_config=SimpleNamespace(**{name: settings[name] for name in list(settings)[:2]}),
        lora_config=settings["lora"],
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compile_mm_encoder": True}, "not supported yet: a compiled encoder"),
        ({"cudagraph_mm_encoder": True}, "not supported yet: graphs of the encoder"),
        ({"lora": object()}, "not supported yet: LoRA"),
        ({"mode": "data"}, "each rank embeds different images, so there is no communication to hide"),
        ({}, "on a whim"),
    ],
)
def test_an_encoder_that_cannot_be_split_says_why(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    adapter = DoublingAdapter(refusal=Decline("on a whim"))
    monkeypatch.setattr("dbo_runtime.vllm_plugin.encoder.program.get_encoder_adapter", lambda name: adapter)
    monkeypatch.setattr("dbo_runtime.vllm_plugin.encoder.program.list_encoders", lambda: {"Doubling"})
    collectives: Any = ToyCollectives()
    assert record_encoder(torch.nn.ModuleList([Doubling()]), make_config(**changes), CPU, collectives) == Decline(
        reason
    )


def test_a_feature_of_vllm_ascend_that_splitting_does_not_support_speaks_against_encoders_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives: Any = ToyCollectives()
    monkeypatch.setattr("dbo_runtime.vllm_plugin.encoder.program.get_encoder_adapter", lambda name: DoublingAdapter())
    monkeypatch.setattr("dbo_runtime.vllm_plugin.encoder.program.list_encoders", lambda: {"Doubling"})
    platform, unsupported = Platform("npu"), Decline("not supported yet: its own MLP group")
    monkeypatch.setattr(platform, "list_unsupported", lambda config: iter([unsupported]))
    model = torch.nn.ModuleList([Doubling()])
    assert record_encoder(model, make_config(), platform, collectives) == unsupported
    monkeypatch.setattr(platform, "list_unsupported", lambda config: iter(()))
    assert isinstance(record_encoder(model, make_config(), platform, collectives), EncoderProgram)


def test_an_encoder_of_a_class_that_is_not_registered_runs_unsplit() -> None:
    collectives: Any = ToyCollectives()
    found = record_encoder(torch.nn.ModuleList([Doubling()]), make_config(), CPU, collectives)
    assert found == Decline("no adapter is registered for the encoder")
    assert get_encoder_adapter("Doubling") is None


class StageMissingLayer(torch.nn.Module):
    """What vLLM puts in the place of an encoder that may get no images."""


def test_an_encoder_that_vllm_left_out_is_told_of() -> None:
    collectives: Any = ToyCollectives()
    found = record_encoder(torch.nn.ModuleList([StageMissingLayer()]), make_config(), CPU, collectives)
    assert found == Decline("the encoder is not loaded")


def test_parts_that_are_not_known_are_declined() -> None:
    adapter: Any = get_encoder_adapter("Qwen3_VisionTransformer")
    attn = SimpleNamespace(attn=SimpleNamespace(fp8_enabled=False))
    block = SimpleNamespace(attn=attn, mlp=SimpleNamespace())
    encoder = SimpleNamespace(merger=SimpleNamespace(), blocks=[block])
    assert adapter.decline(encoder) == Decline("its encoder's parts are not known", "SimpleNamespace")


class OwnAttention:
    """Encoder attention of somebody else, which keeps what it was given."""

    name = "mm_encoder_attn"

    def __init__(self, factor: float = 1.0) -> None:
        self.num_heads = self.num_kv_heads = 2
        self.head_size, self.scale = 4, 0.5
        self.factor = factor
        self.given: list[tuple[Any, ...]] = []

    def forward_cpu(self, query: torch.Tensor, *others: Any) -> torch.Tensor:
        self.given.append(others)
        if query.dim() == 3 or query.shape[0] > 1 or others[2] is None:
            return query
        attention = CpuAttention(2, 2, 4, 0.5)
        ends = others[2].tolist()
        counts = [right - left for left, right in pairwise(ends)]
        return attention.attend(query[0], others[0][0], others[1][0], counts)[None] * self.factor

    forward_oot = forward_cpu


def make_attention(check: bool = False, factor: float = 1.0) -> Any:
    return make_attention_class(OwnAttention, CpuAttention, check)(factor)


PACKED = torch.randn(1, 12, 2, 4, generator=torch.Generator().manual_seed(0))
ENDS = np.array([0, 4, 8, 12], dtype=np.int32)


def test_lengths_are_computed_on_the_host_from_where_sequences_end() -> None:
    attention: Any = make_attention_class(OwnAttention, CpuAttention)
    ends: Any = ENDS.astype(np.int64)[[0, 1, 3]]
    lengths = attention.maybe_compute_seq_lens(None, ends, "npu")
    assert lengths.counts == (4, 8)
    assert (lengths.tolist(), lengths.dtype, lengths.device.type) == ([4, 8], torch.int32, "cpu")
    kept = attention.maybe_recompute_cu_seqlens(None, ends, 64, 4, 2, "npu")
    assert (kept.tolist(), kept.dtype, kept.device.type) == ([0, 4, 12], torch.int32, "cpu")


@pytest.mark.parametrize("forward", ["forward_cpu", "forward_oot"])
@pytest.mark.parametrize(
    ("shape", "lengths", "passed"),
    [
        ((1, 12, 8), make_lengths(ENDS), False),  # a shape of which host lengths were not made
        ((2, 6, 2, 4), make_lengths(ENDS), False),
        ((1, 12, 2, 4), None, True),
        ((1, 12, 2, 4), torch.tensor([4, 4, 4]), True),  # lengths of vLLM's
    ],
)
def test_attention_that_was_not_planned_is_left_to_vllm(
    shape: tuple[int, ...], lengths: torch.Tensor | None, passed: bool, forward: str
) -> None:
    attention, query = make_attention(), torch.ones(shape)
    assert getattr(attention, forward)(query, query, query, None, None, lengths) is query
    (given,) = attention.given
    assert given[-1] is (lengths if passed else None)


def test_attention_of_another_platform_takes_host_lengths_too() -> None:
    given = (PACKED, PACKED, PACKED, None, None, make_lengths(ENDS))
    attention = make_attention()
    assert torch.equal(attention.forward_oot(*given), attention.forward_cpu(*given))
    assert attention.given == []


def test_a_plan_for_other_images_is_refused() -> None:
    with pytest.raises(SplitError, match="got 12 patches, but sequence lengths of 8"):
        make_attention().forward_cpu(PACKED, PACKED, PACKED, None, None, make_lengths(ENDS[:3]))


def test_under_a_check_both_ways_are_computed_and_compared() -> None:
    given = (PACKED, PACKED, PACKED, torch.from_numpy(ENDS), None, make_lengths(ENDS))
    planned, checked = make_attention(), make_attention(check=True)
    assert torch.equal(planned.forward_cpu(*given), checked.forward_cpu(*given))
    assert (len(planned.given), len(checked.given)) == (0, 1)
    with pytest.raises(SplitError, match=r"images' attention with host lengths and without differ by .* lengths"):
        make_attention(check=True, factor=1.1).forward_cpu(*given)


def test_the_plan_lies_once_on_top_of_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor import custom_op

    monkeypatch.setitem(custom_op.op_registry_oot, NAME, OwnAttention)
    for _ in range(2):
        install_host_lengths()
    planned = custom_op.op_registry_oot[NAME]
    assert planned.__mro__[1] is OwnAttention
    assert planned.__name__ == NAME


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_features_of_images_are_left_out_where_the_language_model_is_served_alone(device: str) -> None:
    """There vLLM 0.23 has Qwen3-Omni's buffers on the meta device, and its own forward does not read them."""
    buffers = [torch.ones(8, 4, device=device) for _ in range(2)]
    features = SimpleNamespace(tensors={str(level): buffer[:3] for level, buffer in enumerate(buffers)})
    model: Any = SimpleNamespace(
        deepstack_input_embeds=buffers,
        deepstack_num_level=2,
        _get_deepstack_input_embeds=lambda tokens: features,
        _clear_deepstack_input_embeds=lambda tokens: None,
    )
    x = torch.zeros(3, 4)
    wide = Qwen3VLAdapter().take_inputs(model, x, False)
    assert wide.shape == ((3, 12) if device == "cpu" else (3, 4))
    assert wide.device.type == "cpu"
    assert _count_levels(model) == (2 if device == "cpu" else 0)
