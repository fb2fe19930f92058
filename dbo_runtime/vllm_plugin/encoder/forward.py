"""The forward of a vision encoder: split at the boundaries of images where that pays, vLLM's own otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from dbo_runtime.adapter import EncoderAdapter, get_encoder_adapter, list_encoders, name_adapter, record_program
from dbo_runtime.batch import LEAST_SHARE, Batch, decline_early, share_by_work
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.devices import Device
from dbo_runtime.program import Program
from dbo_runtime.runtime import ExecutionPlan, MicroBatchRuntime
from dbo_runtime.vllm_plugin.api import compat
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.platforms import ascend
from dbo_runtime.vllm_plugin.step.decision import NOTHING_TO_HIDE, list_cuts
from dbo_runtime.vllm_plugin.step.forward import compare_split
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics

ABSENT = "StageMissingLayer"  # what vLLM puts in the place of an encoder that may get no images

Grid = Sequence[int]
"""An image or a video: (time, height, width) in patches."""


class SplitEncoder:
    """Stands in for the `forward` of a loaded encoder instance.

    Each image, or video, is a request whose tokens are its patches, and stays whole. All ranks that share the encoder
    are given the same images, so all come to the same.

    Args:
        encoder: the module.
        adapter: of its class.
        runtime: runs plans.
        transport: how ranks communicate; see `compat.get_transport`.
        agreement: of the ranks that share the encoder, under DBO_CHECK.
        metrics: counts forwards; None where another rank does.

    Attributes:
        serving: nothing is counted before it is set: vLLM profiles and warms up.
        choose_cuts: if set, cut before these images, whatever the settings say.
    """

    def __init__(
        self,
        encoder: Any,
        adapter: EncoderAdapter,
        runtime: MicroBatchRuntime,
        transport: str,
        agreement: Agreement,
        metrics: Metrics | None = None,
    ) -> None:
        self.runtime = runtime
        self.serving = False
        self._agreement = agreement
        self._metrics = metrics
        self.choose_cuts: Callable[[Sequence[Grid]], Sequence[int]] | None = None
        self._encoder = encoder
        self._forward: Callable[..., torch.Tensor] = encoder.forward
        self._adapter = adapter
        self._transport = transport

    def __call__(self, x: torch.Tensor, grid_thw: Any, **kwargs: Any) -> torch.Tensor:
        """Embed images: patches [patches, values], a grid of each [images][3] -> embeddings [tokens, hidden]."""
        whole = partial(self._forward, x, grid_thw, **kwargs)
        grids, plan = self._plan(x, grid_thw, kwargs)
        if self._metrics is not None and self.serving:
            self._metrics.count_encoder(plan)
        if self.runtime.config.check:
            cuts = "" if isinstance(plan, Decline) else f", cuts at {list_cuts(plan)}"
            self._agreement.compare(f"{plan if isinstance(plan, Decline) else plan.digest}{cuts}")
        if isinstance(plan, Decline):
            self.runtime.decline(plan)
            return whole()
        program, given = self.runtime.program, {"pixels": x, "grids": grids}
        inputs = [program.cut_inputs(given, piece.tokens, piece.requests) for piece in plan.slices]
        embeddings = torch.cat([embedded for (embedded,) in self.runtime.run(plan, inputs)])
        if self.runtime.config.check:
            compare_split({"embeddings of images": embeddings}, {"embeddings of images": whole()}, plan)
        return embeddings

    def _plan(
        self, x: torch.Tensor, grid_thw: Any, kwargs: dict[str, Any]
    ) -> tuple[list[Grid], ExecutionPlan | Decline]:
        """Return the grids as the host has them, and how to run them."""
        unexpected = sorted(name for name, value in kwargs.items() if value is not None)
        if unexpected or grid_thw is None:
            return [], Decline("the encoder is given more than images", ", ".join(unexpected))
        grids: list[Grid] = grid_thw.tolist() if isinstance(grid_thw, torch.Tensor) else list(grid_thw)
        patches = tuple(math.prod(map(int, grid)) for grid in grids)
        if sum(patches) != x.shape[0]:
            return grids, Decline("images and their grids do not match", f"{sum(patches)} patches, not {x.shape[0]}")
        early = self._decline_early(patches)
        if early is not None:
            return grids, early
        cuts = self._find_cuts(grids)
        if isinstance(cuts, Decline):
            return grids, cuts
        if not cuts:
            return grids, Decline("images cannot be shared out", f"{len(grids)} of {sum(patches)} patches")
        edges = [0, *accumulate(patches)]
        return grids, self.runtime.plan(Batch(patches, sum(patches), cuttable=False), [edges[cut] for cut in cuts])

    def _find_cuts(self, grids: Sequence[Grid]) -> tuple[int, ...] | Decline:
        """Return before which images to cut."""
        if self.choose_cuts is not None:
            return tuple(self.choose_cuts(grids))
        work = [self._adapter.estimate_flops(self._encoder, grid) for grid in grids]
        cuts = share_by_work(work, self.runtime.config.parts)
        least = min(sum(work[left:right]) for left, right in pairwise([0, *cuts, len(work)]))
        share = least * (len(cuts) + 1) / (sum(work) or 1.0)
        if cuts and self.runtime.config.mode == "auto" and share < LEAST_SHARE:
            return Decline("no balanced cut", f"the least micro-batch would have {share:.0%} of an even one's work")
        return cuts

    def _decline_early(self, patches: Sequence[int]) -> Decline | None:
        if len(patches) < 2:
            return Decline("one image cannot be cut" if patches else "no images")
        if self.choose_cuts is not None:
            return None
        config = self.runtime.config
        if config.mode == "auto" and self._transport in NOTHING_TO_HIDE:
            return Decline("no communication to hide", NOTHING_TO_HIDE[self._transport])
        return decline_early(sum(patches), config)


class FoundEncoder(NamedTuple):
    """An encoder that can be split, its adapter, and the program that this has recorded."""

    module: Any
    adapter: EncoderAdapter
    program: Program

    def attach(
        self, device: Device, config: RuntimeConfig, group: Any, hosts: int, metrics: Metrics | None, log: Any
    ) -> None:
        """Replace the encoder's forward by one that splits, on the ranks of vLLM's *group*, which share it."""
        runtime = MicroBatchRuntime(self.program, device, config, log, group.world_size)
        transport = compat.get_transport(compat.Groups(group, None, group), hosts)
        agreement = Agreement(group)
        self.module.forward = SplitEncoder(self.module, self.adapter, runtime, transport, agreement, metrics)
        log.info(
            "the vision encoder overlaps, too",
            encoder=type(self.module).__name__,
            adapter=name_adapter(self.adapter),
            transport=transport,
        )


def find_encoder(model: Any, vllm_config: Any, collectives: ModelCollectives) -> FoundEncoder | str:
    """Return the encoder of a loaded multimodal *model*, or why it runs whole."""
    names = {type(module).__name__ for module in model.modules()}
    adapters = {name: get_encoder_adapter(name) for name in names & list_encoders()}
    for module in model.modules():
        adapter = adapters.get(type(module).__name__)
        if adapter is None:
            continue
        refusal = _find_hazard(vllm_config) or adapter.decline(module)
        if refusal is not None:
            return refusal
        try:
            return FoundEncoder(module, adapter, record_program(adapter, module, collectives))
        except DeclineError as error:
            return str(error)
    return "its encoder is not loaded" if ABSENT in names else "no adapter is registered for its encoder"


def get_encoder(model: Any) -> SplitEncoder | None:
    """Return the forward of the model's encoder if it is one that splits."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((forward for forward in forwards if isinstance(forward, SplitEncoder)), None)


def _find_hazard(vllm_config: Any) -> str | None:
    if compat.get_device_type() == "npu":  # where a group of its own can reduce an encoder's MLP, too
        hazard = ascend.check_config(vllm_config)
        if hazard is not None:
            return hazard
    compilation, multimodal = vllm_config.compilation_config, vllm_config.model_config.multimodal_config
    hazards = (
        (compilation.compile_mm_encoder, "a compiled encoder"),
        (compilation.cudagraph_mm_encoder, "graphs of the encoder"),
        (vllm_config.lora_config is not None, "LoRA"),
    )
    if multimodal.mm_encoder_tp_mode == "data":
        return "each rank embeds images of its own, so there is no communication to hide"
    return next((f"not supported yet: {what}" for found, what in hazards if found), None)
