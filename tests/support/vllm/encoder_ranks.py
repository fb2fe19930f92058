"""One of the ranks that share a vision encoder: run batches of images in all modes, and compare."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor import custom_op
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer

from dbo_runtime.adapters.registry import get_encoder_adapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
from dbo_runtime.vllm_plugin.encoder.host_lengths import NAME, install_host_lengths
from dbo_runtime.vllm_plugin.encoder.program import EncoderProgram, record_encoder
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms.cpu import capture_thread_state
from dbo_runtime.vllm_plugin.platforms.encoder_attention import CpuAttention
from dbo_runtime.vllm_plugin.platforms.registry import get_platform

ROUNDING = 1e-5  # of the largest value, float32: what matrix products of other sizes may differ by
SIZES = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "in_channels": 3,
    "out_hidden_size": 48,
}
MERGED = {"spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2.5": (
        Qwen2_5_VisionTransformer,
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1, 3], "hidden_act": "silu"},
    ),
    "qwen3": (
        Qwen3_VisionTransformer,
        {
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
}
Grids = list[list[int]]


def make_encoder(family: str, seed: int = 0, **sizes: Any) -> Any:
    """Return an encoder of vLLM's with random weights, the same on all ranks."""
    cls, own = FAMILIES[family]
    vision = SimpleNamespace(**{**SIZES, **MERGED, **own, **sizes})
    encoder = cls(vision)
    generator = torch.Generator().manual_seed(seed)
    for parameter in encoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise / math.sqrt(parameter[0].numel()) if parameter.dim() > 1 else 1 + 0.1 * noise
    for module in encoder.modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    return encoder.eval()


@contextmanager
def join(rank: int, ranks: int, meeting: str) -> Iterator[Any]:
    """Be one of the ranks that share an encoder; the group of all is what they reduce in.

    Args:
        rank: this one.
        ranks: how many there are.
        meeting: where they meet, as torch.distributed has it.
    """
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(ranks, rank, meeting, rank, "gloo")
        parallel_state.initialize_model_parallel(ranks)
        yield parallel_state.get_tp_group()


@contextmanager
def unplanned() -> Iterator[None]:
    """Make encoders as vLLM does without us."""
    with patch.dict(custom_op.op_registry_oot):
        custom_op.op_registry_oot.pop(NAME, None)
        yield


@contextmanager
def split(encoder: Any, group: Any, config: RuntimeConfig, device: Device) -> Iterator[SplitEncoder]:
    """Let an encoder be split as the plugin would."""
    collectives = ModelCollectives(get_platform(), group)
    multimodal = SimpleNamespace(mm_encoder_tp_mode="weights")
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        compilation_config=SimpleNamespace(compile_mm_encoder=False, cudagraph_mm_encoder=False),
        lora_config=None,
    )
    platform = get_platform()
    found = record_encoder(torch.nn.ModuleList([encoder]), vllm_config, platform, collectives)
    assert isinstance(found, EncoderProgram), found
    collectives.connect()
    runtime = MicroBatchRuntime(found.program, device, config, open_log(quiet=True), group.world_size)
    transport = platform.get_transport(Groups(group, None, group), 2)
    SplitEncoder(found.module, found.adapter, runtime, transport, Agreement(group)).install()
    try:
        yield encoder.forward
    finally:
        del encoder.forward


def draw_grids(rng: random.Random, most: int = 5) -> Grids:
    """Return what a batch of images, and now and then a video, is like."""
    return [
        [rng.choice((1, 1, 1, 2)), 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)] for _ in range(rng.randint(1, most))
    ]


def make_pixels(encoder: Any, grids: Grids, seed: int) -> torch.Tensor:
    """Return patches for them [patches, values]."""
    values = encoder.patch_embed.proj.weight[0].numel()
    patches = sum(math.prod(grid) for grid in grids)
    return torch.randn(patches, values, generator=torch.Generator().manual_seed(seed))


@contextmanager
def forget_roles() -> Iterator[None]:
    """Let the first block's lengths serve all, as vllm-ascend #6448 did."""
    kept: dict[int, Sequence[int]] = {}
    right = CpuAttention.attend

    def attend(self: CpuAttention, *tensors: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return right(self, *tensors, kept.setdefault(sum(counts), counts))

    with patch.object(CpuAttention, "attend", lambda self, q, k, v, counts: attend(self, q, k, v, counts=counts)):
        yield


def count_host_reads(run: Callable[[], Any]) -> Counter[str]:
    """Return how often tensors were turned into what the host reads: on a device, each is a copy and a wait."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def count(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return method(self, *args, **kwargs)

        return count

    with ExitStack() as stack:
        for name in ("tolist", "item", "cpu", "numpy"):
            stack.enter_context(patch.object(torch.Tensor, name, counting(name)))
        run()
    return counted


@contextmanager
def kept_plans(runtime: MicroBatchRuntime) -> Iterator[list[ExecutionPlan | Decline]]:
    """Keep what a runtime decides meanwhile."""
    plans: list[ExecutionPlan | Decline] = []
    decide = runtime.plan

    def keep(*args: Any, **kwargs: Any) -> ExecutionPlan | Decline:
        plans.append(decide(*args, **kwargs))
        return plans[-1]

    with patch.object(runtime, "plan", keep):
        yield plans


def compare(family: str, group: Any, seeds: Sequence[int]) -> dict[str, Any]:
    """Run batches in all modes; return how many runs there were of each, and those that are not vLLM's bits.

    What is split must be the bits of vLLM's own forward of each micro-batch's images by themselves, and of all images
    together but for rounding: on some CPUs the result of a row depends on how many rows a matrix product has.
    """
    with unplanned():
        plain = make_encoder(family)
    install_host_lengths()
    planned = make_encoder(family)
    device = CpuDevice(capture_state=capture_thread_state)
    runs: Counter[str] = Counter()
    differing: list[str] = []

    with torch.inference_mode(), split(planned, group, RuntimeConfig(enabled=True, mode="always"), device) as forward:

        def check(mode: str, pixels: torch.Tensor, grids: Grids, unsplit: torch.Tensor) -> None:
            """Note a run whose embeddings are not those of vLLM's own forward."""
            with kept_plans(forward.runtime) as plans:
                actual = planned(pixels, grids)
            runs[mode] += 1
            slices = [piece for plan in plans if isinstance(plan, ExecutionPlan) for piece in plan.slices]
            parts = [plain(pixels[piece.tokens], grids[piece.requests]) for piece in slices]
            if not torch.equal(torch.cat(parts) if parts else unsplit, actual):
                differing.append(f"{mode} {grids}: not the bits of its parts")
            if not torch.allclose(unsplit, actual, rtol=0, atol=ROUNDING * unsplit.abs().max().item()):
                differing.append(f"{mode} {grids}: {(unsplit - actual).abs().max().item():.1e}")

        for seed in seeds:
            grids = draw_grids(random.Random(seed))
            pixels = make_pixels(plain, grids, seed)
            unsplit = plain(pixels, grids)
            forward.choose_cuts = lambda grids: []
            check("planned", pixels, grids, unsplit)
            for cut in range(1, len(grids)):
                forward.choose_cuts = lambda grids, cut=cut: [cut]  # type: ignore[misc]
                check("cut", pixels, grids, unsplit)
            forward.choose_cuts = None
            for count in (2, 3):
                forward.runtime.config = RuntimeConfig(enabled=True, mode="always", micro_batches=count)
                check(f"always {count}", pixels, grids, unsplit)
        statistics = forward.runtime.statistics.as_dict()
        grids = [[1, 8, 8], [1, 4, 12], [2, 4, 4]]
        pixels = make_pixels(plain, grids, 0)
        forward.choose_cuts = lambda grids: []
        reads = {
            "plain": count_host_reads(lambda: plain(pixels, grids)),
            "planned": count_host_reads(lambda: planned(pixels, grids)),
        }
    device.close()
    adapter = get_encoder_adapter(type(plain).__name__)
    assert adapter is not None
    work = [adapter.estimate_flops(plain, grid) for grid in ([1, 4, 4], [1, 8, 8], [2, 8, 8])]
    return {"work": work, "runs": runs, "differing": differing, "statistics": statistics, "reads": reads}


def compare_on_rank(
    rank: int, ranks: int, folder: Path, family: str, batches: int, is_forgetful: bool = False
) -> dict[str, Any]:
    """Be one of the ranks that share an encoder; return what `compare` does, as JSON would have it."""
    os.environ.update(VLLM_DIST_IDENT=f"{folder.parent.name}-{folder.name}")  # no other session's
    with ExitStack() as stack:
        group = stack.enter_context(join(rank, ranks, f"file://{folder}/rendezvous"))
        if is_forgetful:
            stack.enter_context(forget_roles())
        return compare(family, group, range(batches))
