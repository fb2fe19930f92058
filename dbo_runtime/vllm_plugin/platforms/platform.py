"""Differences between the platforms that vLLM serves on. Defaults are here; each platform's file overrides them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device, open_device
from dbo_runtime.vllm_plugin.api.fields import FIELDS, SLICED_CONTEXT_TENSORS, Fields
from dbo_runtime.vllm_plugin.api.known import COMPARED_DRAFTERS

if TYPE_CHECKING:  # the doctor imports platforms without torch and vLLM
    import torch
    import torch.distributed as dist
    from structlog.typing import FilteringBoundLogger
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

    from dbo_runtime.batch import BatchSlice
    from dbo_runtime.config import RuntimeConfig
    from dbo_runtime.vllm_plugin.api.groups import Groups
    from dbo_runtime.vllm_plugin.api.latent_attention import LatentParts
    from dbo_runtime.vllm_plugin.api.moe import MoeLayer
    from dbo_runtime.vllm_plugin.platforms.encoder_attention import EncoderAttention
    from dbo_runtime.vllm_plugin.platforms.npu_flashcomm import FlashComm

COMPARE = "with DBO_CHECK=1 steps are split, and each is compared with the unsplit one"


def tell_to_compare(unproven: Decline) -> Decline:
    """Return a decline that also tells how to split anyway, by comparing every step."""
    return replace(unproven, detail=f"{unproven.detail}; {COMPARE}" if unproven.detail else COMPARE)


class StageBuffers(NamedTuple):
    """Buffers of a model whose first rows stages of a pipeline hand on, besides the results of the forward.

    Attributes:
        received: buffers that hold rows of the stage before when a step begins, by name.
        sent: buffers whose rows go to the next stage when a step ends, by name.
    """

    received: Mapping[str, torch.Tensor] = MappingProxyType({})
    sent: Mapping[str, torch.Tensor] = MappingProxyType({})


NO_BUFFERS = StageBuffers()


class Platform:
    """A platform that vLLM serves on. Platform modules import torch and vLLM only inside calls.

    Args:
        name: vLLM's device type.

    Attributes:
        has_device: whether `dbo_runtime.devices` has a device of this name.
        is_proven: whether split steps of vLLM on it have been compared with unsplit ones.
        compares_first_steps: whether the first steps of each kind are compared with every vLLM version, including
            tested ones.
        notice: text to log at start about this platform; empty if none.
        has_side_lane: whether a second compute lane is opened with DBO_SIDE=auto.
        exchanges_sizes_separately: whether `all_to_all` exchanges sizes in a separate op. With streams, the host issues
            other ops meanwhile. On the CPU the lane itself waits, and tokens leave earlier without a separate op.
        host_computes: whether the threads that issue ops also compute them.
        compiles_ops: whether ops may be compiled one by one.
        needs_cpu_patches: whether vLLM's CPU build serves it, whose upstream bugs are patched here.
        copying_modules: classes of modules that end in one all-reduce and return a copy of its result.
        fields: rules for slicing the fields of the common attention metadata.
        sliced_tensors: names of the forward context's tensors that are sliced by token.
        pads_batches: whether a batch may have more tokens than its attention metadata. The excess at the end is
            padding.
        cuts_decodes: whether its attention backends were shown to accept parts of a decode with drafts.
        drafts_from_states: whether models with linear attention verify drafts on it, and split steps that do were
            compared with unsplit ones. vLLM 0.30's own such steps fail on CPU.
        supports_dcp: whether split steps with decode context parallelism, where ranks shard the KV cache, were
            compared with unsplit ones.
        splits_lora: whether its LoRA mapping is known, and split steps with LoRA were compared with unsplit ones.
    """

    has_device = False
    is_proven = False
    compares_first_steps = False
    notice = ""
    has_side_lane = True
    exchanges_sizes_separately = True
    host_computes = False
    compiles_ops = False
    needs_cpu_patches = False
    copying_modules: tuple[str, ...] = ()
    fields: Fields = FIELDS
    sliced_tensors: tuple[str, ...] = SLICED_CONTEXT_TENSORS
    pads_batches = False
    cuts_decodes = False
    drafts_from_states = False
    supports_dcp = False
    splits_lora = False

    def __init__(self, name: str) -> None:
        self.name = name

    def check_support(self, config: RuntimeConfig) -> Decline | None:
        """Return why no model is split on this platform, or None. With DBO_CHECK=1 unproven platforms are compared."""
        if not self.has_device:
            return Decline(f"there is no device for {self.name!r}")
        unproven = self.check_version() if self.is_proven else Decline(f"not proven on {self.name!r} yet")
        return None if unproven is None or config.check else tell_to_compare(unproven)

    def opens_side_lane(self, config: RuntimeConfig) -> bool:
        """Return whether a server that starts with these settings opens a second compute lane."""
        return config.side == "on" or (config.side == "auto" and self.has_side_lane)

    def check_version(self) -> Decline | None:
        """Return why steps with the installed version of the platform's plugin are not split, or None."""
        return None

    def list_unproven(self, vllm_config: VllmConfig) -> Iterator[Decline]:
        """Yield properties of a model that are not proven on this platform, because no steps were compared.

        With DBO_CHECK=1 such models are split, and every step is compared.
        """
        from dbo_runtime.vllm_plugin.api.features import uses_second_runner

        if uses_second_runner(vllm_config):
            yield Decline("not proven with vLLM's second model runner yet", only_micro=True)

    def list_compared(self, vllm_config: VllmConfig) -> Iterator[str]:
        """Yield properties of a model that are not proven on this platform, and that are split.

        The first steps of each kind are compared with unsplit ones. A drafter is such a property, because it reads what
        the model's step leaves behind.
        """
        from dbo_runtime.vllm_plugin.api.speculation import name_drafter

        drafter = name_drafter(vllm_config)
        if drafter not in (None, *COMPARED_DRAFTERS):
            yield f"drafter {drafter}"

    def cuts_ops(self, vllm_config: VllmConfig) -> bool:
        """Return whether ops of a model can be cut into nano-batches, as far as that is known before it is loaded."""
        return True

    def check_encoder(self, encoder: str) -> Decline | None:
        """Return why a vision encoder of this class is not split on this platform unless compared, or None."""
        return None

    def list_unsupported(self, vllm_config: VllmConfig) -> Iterator[Decline]:
        """Yield each platform feature in use that splitting does not support."""
        return iter(())

    def describe(self, vllm_config: VllmConfig) -> Iterator[str]:
        """Yield notes on this platform's defaults that a user of split steps should know before a start."""
        return iter(())

    def list_hazards(self, vllm_config: VllmConfig) -> Iterator[tuple[str, str]]:
        """Yield what may go wrong with split steps in this environment, each with its remedy."""
        return iter(())

    def drafts_in_pipeline(self, vllm_config: VllmConfig) -> bool:
        """Return whether a pipeline's last stage drafts on this platform, and split steps that do were compared."""
        return False

    def choose_dispatch(self, vllm_config: VllmConfig) -> str:
        """Return how tokens reach experts on other ranks with DBO_DISPATCH=auto, as in vLLM's own steps."""
        return "all_gather"

    def check_step(self, context: ForwardContext, dispatch: str = "all_gather") -> Decline | None:
        """Return why a step with this forward context is not split, or None. Uses only data that all ranks share.

        *dispatch* is the way that the model's program sends tokens to experts.
        """
        return None

    def prepare_model(self, model: torch.nn.Module) -> None:
        """Divide among micro-batches the data that a loaded model's layers share outside of their arguments.

        The model's results do not change. Idempotent.
        """

    def find_stage_buffers(self, model: torch.nn.Module) -> StageBuffers:
        """Return the buffers of a loaded model whose rows stages of its pipeline hand on."""
        return NO_BUFFERS

    def get_unreduced(self, module: Callable[..., Any], parts: Iterable[torch.nn.Module]) -> Callable[..., Any] | None:
        """Return a *module* of these *parts* without its final reduce, if only the platform knows how.

        None if the module ends in a plain all-reduce, which can be left out.
        """
        return None

    def open_device(
        self, process_groups: Sequence[dist.ProcessGroup], config: RuntimeConfig, log: FilteringBoundLogger
    ) -> Device:
        """Open the device that vLLM serves on. *process_groups* are the communicators that ops use on it."""
        self._warn_of_side_cores(config, log)
        return open_device(self.name)

    def get_transport(self, groups: Groups, hosts: int) -> str:
        """Return the transport of ranks on *hosts* hosts: `none`, `device`, `shared memory`, `one host` or `network`.

        NPUs and GPUs have links and copy engines for communication, also within a host.
        """
        return "none" if groups.all_ranks.world_size == 1 else "device"

    def predict_transport(self, ranks: int, dispatches: bool, hosts: int | None) -> str | None:
        """Return the transport that `get_transport` will find; None if that is not known before the start.

        Args:
            ranks: number of ranks that communicate in a step.
            dispatches: whether they send tokens to experts on other ranks.
            hosts: number of hosts that they will be on; None if that is not known.
        """
        return "none" if ranks == 1 else "device"

    def describe_machine(self) -> dict[str, str]:
        """Return the properties that identify this kind of machine. Machines of one kind have the same costs."""
        import torch

        return {"platform": self.name, "chip": self.get_chip_name(), "threads": str(torch.get_num_threads())}

    def get_chip_name(self) -> str:
        """Return the name of the chip."""
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())

    def get_encoder_attention(self) -> type[EncoderAttention] | None:
        """Return the encoder attention that takes lengths from the host, or None to use vLLM's own."""
        return None

    def get_moe_layer(self, runner: MoERunner) -> MoeLayer:
        """Return the operations of this platform's MoE layer, which may be decomposed.

        Raises:
            DeclineError: its class is not known.
        """
        from dbo_runtime.vllm_plugin.api.moe import make_moe_layer

        return make_moe_layer(runner)

    def split_latent_attention(self, module: torch.nn.Module) -> LatentParts | Decline:
        """Return a latent attention module in parts, or the reason why it stays one op."""
        from dbo_runtime.vllm_plugin.api.latent_attention import SplitLatentAttention, check_attention

        declined = check_attention(module)
        return SplitLatentAttention(module) if declined is None else declined

    def complete_context(self, part: ForwardContext, piece: BatchSlice, sizes: Sequence[int]) -> None:
        """Set this platform's data in a slice's forward context. *sizes* are the tokens of all ranks."""

    def return_context(self, part: ForwardContext, step: ForwardContext) -> None:
        """Undo changes in a slice's forward context that only split steps need, to run the model's own forward."""

    def find_flashcomm(self, context: ForwardContext) -> FlashComm | None:
        """Return how layers hand on chunks of tokens in a step with this forward context; None if they do not."""
        return None

    def complete_metadata(self, part: CommonAttentionMetadata, tokens: int) -> CommonAttentionMetadata:
        """Return a slice's common metadata with the fields that this platform derives from the others.

        *tokens* is the slice's number of tokens including padding, which is not in the metadata.
        """
        return part

    def get_build_arguments(self, metadata: AttentionMetadata) -> dict[str, Any]:
        """Return extra build arguments for slices of this *metadata*."""
        return {}

    def can_cut_requests(self, common: CommonAttentionMetadata, vllm_config: VllmConfig) -> bool:
        """Return whether a request may be cut, so that its tail attends to keys its head cached in the same step."""
        return common.causal is True

    def building_metadata(self) -> AbstractContextManager[None]:
        """Return a context manager in which the attention metadata of slices is built."""
        return nullcontext()

    def repeating_step(self) -> AbstractContextManager[None]:
        """Return a context manager in which a step runs a second time, without counting anything twice."""
        return nullcontext()

    def _warn_of_side_cores(self, config: RuntimeConfig, log: FilteringBoundLogger) -> None:
        if config.side_cores:
            message = "DBO_SIDE_CORES has no effect: only an NPU can keep a lane to some of its cores"
            log.warning(message, device=self.name)
