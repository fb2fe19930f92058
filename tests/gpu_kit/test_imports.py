"""All that vLLM's GPU worker needs loads from the GPU kit, with no package but those of the machine that it is for."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points, version

import pytest

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_build")]

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.mla.flashattn_mla",
    "vllm.v1.attention.backends.mla.flashmla",
    "vllm.v1.attention.backends.mla.triton_mla",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization.online.base",  # by its loader, whatever the model
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.distributed.device_communicators.pynccl",
)
OPERATORS = {  # library, as a module -> some of its operators
    "vllm._C_stable_libtorch": ("_C.rms_norm", "_C.silu_and_mul", "_C_cache_ops.reshape_and_cache_flash"),
    "vllm._moe_C_stable_libtorch": ("_moe_C.topk_softmax", "_moe_C.moe_align_block_size"),
    "vllm.vllm_flash_attn._vllm_fa3_C": ("_vllm_fa3_C.fwd", "_vllm_fa3_C.get_scheduler_metadata"),
    "vllm._flashmla_C": ("_flashmla_C.dense_decode_fwd",),
    "vllm._flashmla_extension_C": ("_flashmla_extension_C.fwd_kvcache_mla_fp8",),
}


def test_this_is_the_python_and_torch_of_that_machine() -> None:
    import torch

    assert sys.version_info[:2] == (3, 12)
    assert torch.__version__ == "2.11.0+cu130"
    assert version("vllm") == "0.30.0"


def test_vllm_takes_this_machine_for_one_with_a_gpu_of_the_kits_architecture() -> None:
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    assert current_platform.get_device_capability() == (9, 0)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_serves_is_imported(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_library_that_was_cut_loads_and_registers_its_operators(name: str) -> None:
    import torch

    import_module(name)
    for operator in OPERATORS[name]:
        space, _, own = operator.partition(".")
        assert callable(getattr(getattr(torch.ops, space), own))


def test_vllms_sampler_is_made_without_packages_that_the_kit_lacks() -> None:
    from vllm.v1.sample.sampler import Sampler

    Sampler()


def test_vllm_finds_flash_attention_3_and_no_other() -> None:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    assert get_flash_attn_version() == 3


def test_entry_points_are_found() -> None:
    plugins = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    assert plugins["dbo_runtime"] == "dbo_runtime.vllm_plugin.register:register"
    assert plugins["gpu_kit"] == "tools.gpu_kit.plugin:register"
    adapters = {point.name: point for point in entry_points(group="dbo_runtime.adapters")}
    assert adapters["LlamaForCausalLM"].load().__module__ == "dbo_models.dense"
