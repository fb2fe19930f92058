"""Names of vLLM and vllm-ascend that change from version to version. Read against vLLM 0.30.0."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

from dbo_runtime.batch import BatchSlice
from dbo_runtime.config import ENABLE, PREFIX
from dbo_runtime.decline import DeclineError
from dbo_runtime.vllm_plugin.api.groups import Groups

KNOWN_VERSIONS = ("0.30.",)
RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def check_version() -> str | None:
    """Return why this vLLM cannot be served, or None if it is one we know."""
    import vllm

    if vllm.__version__.startswith(KNOWN_VERSIONS):
        return None
    return (
        f"vLLM {vllm.__version__} is not one that this dbo_runtime knows ({', '.join(v + 'x' for v in KNOWN_VERSIONS)})"
    )


def announce_variable() -> None:
    """Make our variable known to vLLM, which otherwise warns of it, or refuses it with --fail-on-environ-validation."""
    from vllm import envs

    envs.environment_variables.setdefault(ENABLE, lambda: os.environ.get(ENABLE, "0"))


def pass_settings_on() -> None:
    """Let Ray hand our settings to its workers: vLLM has it copy only variables with prefixes it knows."""
    prefixes = [part for part in os.environ.get(RAY_PREFIXES, "").split(",") if part]
    if PREFIX not in prefixes:
        os.environ[RAY_PREFIXES] = ",".join([*prefixes, PREFIX])


def get_transport(groups: Groups, hosts: int) -> str:
    """Return how the ranks on *hosts* hosts communicate: `none`, `device`, `shared memory`, `one host` or `network`.

    NPUs and GPUs have links and engines of their own for it, also within a host.
    vLLM's CPU build reduces over shared memory if all ranks of a tensor parallel group are on one host: that spins on
    the cores that compute, and there is nothing to hide.
    """
    if groups.all_ranks.world_size == 1:
        return "none"
    if get_device_type() != "cpu":
        return "device"
    if groups.data_parallel is not None:
        return "one host" if hosts == 1 else "network"
    module = getattr(groups.tensor_parallel.device_communicator, "dist_module", None)
    return "shared memory" if type(module).__name__ == "_CPUSHMDistributed" else "network"


def describe_versions() -> str:
    """Return the versions that ranks must share to decide alike."""
    return f"dbo_runtime {version('dbo-runtime')}, vllm {_find_version()}"


def describe_packages() -> dict[str, str]:
    """Return the versions that costs were measured with."""
    return {name: version(name) for name in ("dbo-runtime", "torch")} | {"vllm": _find_version()}


def describe_machine() -> dict[str, str]:
    """Return what identifies this kind of machine: two of a kind cost alike."""
    import torch
    from vllm.platforms import current_platform

    kind = get_device_type()
    chip = str(current_platform.get_device_name()) if kind != "cpu" else _find_processor()
    return {"platform": kind, "chip": chip, "threads": str(torch.get_num_threads())}


def describe_model(vllm_config: Any) -> dict[str, str]:
    """Return what of a model its costs depend on. Two with the same shapes cost alike."""
    config = vllm_config.model_config
    text = config.hf_text_config
    shapes = ("hidden_size", "num_hidden_layers", "n_routed_experts", "moe_intermediate_size", "intermediate_size")
    return {
        "architecture": str(config.architecture),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": str(config.quantization),
        **{name: str(getattr(text, name)) for name in shapes if hasattr(text, name)},
    }


def describe_parallel(vllm_config: Any, hosts: int) -> dict[str, int]:
    """Return over how many ranks and hosts a model is spread."""
    parallel = vllm_config.parallel_config
    return {
        "tensor": parallel.tensor_parallel_size,
        "data": parallel.data_parallel_size,
        "experts": int(parallel.enable_expert_parallel),
        "hosts": hosts,
    }


def get_device_type() -> str:
    """Return vLLM's device type, such as `cpu`, `cuda` or `npu`."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _find_version() -> str:
    import vllm

    return str(vllm.__version__)


def _find_processor() -> str:
    """Return the name of this host's processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = [line.partition(":")[2].strip() for line in info if line.startswith(("model name", "Processor"))]
    return names[0] if names else platform.machine()


def slice_common_metadata(common: Any, slices: Sequence[BatchSlice]) -> list[Any]:
    """Return vLLM's own split of the common metadata: what `fields` calls split is right, other fields are dropped."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    return list(split_attn_metadata([UBatchSlice(piece.requests, piece.tokens) for piece in slices], common))


def read_block_table(runner: Any, layer_names: Sequence[str]) -> Any:
    """Return the host's copy of the KV blocks of each request [requests, blocks], or None if we know of none."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        return None
    groups = runner.kv_cache_config.kv_cache_groups
    index = next(i for i, group in enumerate(groups) if layer_names[0] in group.layer_names)
    return runner.input_batch.block_table[index].get_numpy_array()


class Limits(NamedTuple):
    """How large a batch may be: new tokens, tokens of one request, requests, and blocks of the KV cache."""

    tokens: int
    length: int
    requests: int
    blocks: int
    block_size: int


def get_limits(runner: Any) -> Limits:
    """Return the limits of a model runner's dummy batches.

    Raises:
        DeclineError: if it is another model runner than the one whose dummy batches we know.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner):
        raise DeclineError("the dummy batches of vLLM's second model runner are not known")
    return Limits(
        runner.max_num_tokens,
        runner.max_model_len,
        runner.scheduler_config.max_num_seqs,
        runner.kv_cache_config.num_blocks - 1,  # without block 0, which stands for none
        min(table.kv_cache_block_size for table in runner.input_batch.block_table.block_tables),
    )


def run_dummy(runner: Any, requests: int, tokens: int, context: int) -> None:
    """Run the model on a batch of vLLM's making: equal requests with *tokens* new tokens after *context* cached ones.

    vLLM's dummy batches write nothing to the KV cache. By themselves all their requests read one block, which is faster
    than blocks of their own and looks as if they shared a prefix; so each is given its own for the time of the run. As
    a decode of that many tokens, because only of these does vLLM let its caller choose the length.
    """
    from vllm.config import CUDAGraphMode

    tables = runner.input_batch.block_table.block_tables
    kept = [(t.block_table.np[:requests].copy(), t.num_blocks_per_row[:requests].copy()) for t in tables]
    decode_len = runner.uniform_decode_query_len
    try:
        for table in tables:
            blocks = -(-(context + tokens) // table.kv_cache_block_size)
            for request in range(requests):
                table.add_row([1 + request * blocks + block for block in range(blocks)], request)
        runner.uniform_decode_query_len = tokens
        runner._dummy_run(
            requests * tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            force_attention=True,
            uniform_decode=True,
            allow_microbatching=False,
            skip_eplb=True,
            profile_seq_lens=context + tokens,
        )
    finally:
        runner.uniform_decode_query_len = decode_len
        for table, (rows, counts) in zip(tables, kept, strict=True):
            table.block_table.np[:requests], table.num_blocks_per_row[:requests] = rows, counts


def get_weight_and_reduce(kernel: Any) -> Any:
    """Return what sums a token's experts on this rank; kernels that leave the choice open get vLLM's default."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )

    reduce = kernel.fused_experts.finalize_weight_and_reduce_impl()
    return TopKWeightAndReduceContiguous() if isinstance(reduce, TopKWeightAndReduceDelegate) else reduce


MOE_RUNNERS = ("MoERunner",)
"""What runs an MoE layer. Classes are known by their exact names: one derived from them may do something else."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""What applies a layer's weights by calling the kernel, and does nothing else."""

GATHERING_DISPATCH = ("MoEPrepareAndFinalizeNaiveDPEPModular",)
"""Kernels' prepare and finalize that gather tokens and scatter results, and do nothing else in between."""

ROUTERS_WITH_OUTPUT = ("ZeroExpertRouter",)
"""Routers that add to the layer's result themselves."""
