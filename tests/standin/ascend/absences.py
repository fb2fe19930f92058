"""Packages and compiled code that vllm-ascend imports and that are not here: in their place stubs that do nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from standin_ascend import (
    block_sparse,
    chunks,
    context_parallel,
    delta_attention,
    earlier_states,
    engram,
    linear_attention,
    pooled_keys,
    state_copies,
    triton_kernels,
)
from standin_ascend.slots import SlotMapping, SlotMappings

CANN = "9.0.0"  # what vllm-ascend 0.23.0 is made for, which asks for a version; torch_npu finds none here
PACKAGES = ("acl", "fla_npu")  # CANN's Python, and kernels of linear attention
OPERATORS = {
    "fla_npu.ops.ascendc": {
        "causal_conv1d_fn": linear_attention.convolve,
        "causal_conv1d_update": linear_attention.convolve_decodes,
        "recurrent_gated_delta_rule": linear_attention.update_states,
        "chunk_kda_fwd": delta_attention.follow_chunks,
        "recurrent_kda": delta_attention.update_states,
    }
}
ABSENT = "chunk_gated_delta_rule_fwd"  # without it, vllm-ascend takes the operator of torch_npu
SLOTS = {  # those of Triton that find cache slots: vllm-ascend's own, or in 0.23.0 the one of vLLM that it imports
    "vllm_ascend.ops.triton.compute_slot_mapping": {
        "_compute_slot_mapping_kernel": SlotMapping(),
        "_compute_slot_mapping_fused_groups_kernel": SlotMappings(),
        "_compute_slot_mapping_fused_groups_adaptive_kernel": SlotMappings(),
    },
    "vllm.v1.worker.block_table": {"_compute_slot_mapping_kernel": SlotMapping()},
}
FUNCTIONS = {  # several kernels of Triton and operators each, which are one kernel here
    "vllm_ascend.ops.triton.fla.chunk": {"chunk_gated_delta_rule_fwd": earlier_states.prefill_chunks},
    "vllm_ascend.ops.triton.glm5_next_kpool_tail_compress": {
        "glm5_next_kpool_tail_compress_and_write_cache_triton": pooled_keys.keep_keys
    },
    "vllm_ascend.ops.triton.glm5_next_lightning_indexer": {
        "glm5_next_lightning_indexer_triton": pooled_keys.choose_pools
    },
    "vllm_ascend.ops.triton.compressor.compressor_triton": {
        "compressor_from_projected": engram.pool_pairs,
        "_cube_core_num": lambda: 1,
    },
}
DEVICE_CHECKS = ("vllm_ascend.utils", "vllm_ascend.device.device_config")  # 0.23.0 has the first only
KERNELS = {
    "vllm_ascend.ops.triton.dcp.dcp_a2a": {
        "_pack_dcp_output_lse_kernel": context_parallel.pack_results,
        "_fused_dcp_lse_combine_kernel": context_parallel.combine_results,
    },
    "vllm_ascend.ops.triton.query_gather_prep": {"_q_gather_prep_head_major_kernel": context_parallel.join_queries},
    "vllm_ascend.ops.triton.mamba.state_index": {
        "_gather_ssm_states_kernel": triton_kernels.gather_states,
        "_scatter_ssm_states_kernel": triton_kernels.scatter_states,
    },
    "vllm_ascend.ops.triton.dsa_cp": {"build_local_metadata_triton": chunks.find_local_lengths},
    "vllm_ascend.ops.triton.batch_memcpy": {"batch_memcpy_kernel": state_copies.copy_bytes},
    "vllm_ascend.ops.triton.mamba.postprocess": {"postprocess_mamba_fused_kernel": state_copies.keep_accepted},
    "vllm_ascend.ops.triton.linearnorm.fused_eh_norm": {"_fused_eh_norm_kernel": pooled_keys.norm_and_join},
    "vllm_ascend.ops.triton.mamba.state_ops": {"_gather_initial_states_kernel": delta_attention.gather_initial_states},
    "vllm_ascend.ops.triton.kda.conv_state": {"_copy_conv_state_kernel": delta_attention.copy_inputs},
    "vllm_ascend.ops.triton.kda.kda": {"layer_norm_gated_fwd_kernel": delta_attention.norm_and_gate},
    "vllm_ascend.ops.triton.kda.output_writeback": {"_write_output": delta_attention.write_results},
    "vllm_ascend.ops.triton.fused_gdn_gating": {"fused_gdn_gating_kernel": triton_kernels.gate_states},
    "vllm_ascend.ops.triton.layernorm_gated": {"_layer_norm_fwd_1pass_kernel_npu": triton_kernels.norm_and_gate},
    "vllm_ascend.ops.triton.fla.fused_qkvzba_split_reshape": {
        "fused_qkvzba_split_reshape_cat_kernel": triton_kernels.split_projections
    },
    "vllm_ascend.ops.triton.linearnorm.split_qkv_tp_rmsnorm_rope": {
        "_split_qkv_and_compute_local_qk_var_kernel": triton_kernels.split_and_square,
        "_apply_global_rmsnorm_kernel": triton_kernels.norm_and_rotate,
    },
    "vllm.third_party.flash_linear_attention.ops.l2norm": {"l2norm_fwd_kernel2": triton_kernels.norm_by_length},
    "vllm.model_executor.layers.fla.ops.l2norm": {"l2norm_fwd_kernel2": triton_kernels.norm_by_length},  # in 0.23.0
    "vllm_ascend.ops.triton.fla.l2norm": {"l2norm_fwd_kernel2_loop": triton_kernels.norm_by_length_in_loop},
    "vllm_ascend.ops.triton.engram_hash": {
        "_engram_req_index_kernel": engram.find_requests,
        "_hash_ids_kernel": engram.hash_tokens,
    },
    "vllm_ascend.ops.triton.engram_lookup": {
        "_engram_int8_gather_dequant_kernel": engram.look_up,
        "_engram_host_uva_gather_dequant_kernel": engram.look_up_on_host,
    },
    "vllm_ascend.ops.triton.quantize_indexer_query": {"_quantize_indexer_query_kernel": engram.quantize_queries},
    "vllm_ascend.ops.triton.prepare_indexer_indices": {"_prepare_indexer_indices_kernel": engram.order_keys},
    "vllm_ascend.ops.triton.fla.utils": {"_clear_ssm_states_kernel": triton_kernels.clear_states},
}


LATE_KERNELS = {  # of modules that are imported with a model
    "_write_hash_cache_kernel": engram.keep_tokens,
    "_prepare_prefill_topk_scores_kernel": block_sparse.prefer_blocks,
    "_mask_prefill_topk_indices_kernel": block_sparse.drop_unseen_blocks,
}


class Stub(ModuleType):
    """A package in which every name is a class of instances that answer anything with None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == ABSENT:
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda self, name: None})


class StubFinder(MetaPathFinder, Loader):
    """Finds every module of the packages that are not here."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the stub's specification."""
        package, *_, name = fullname.split(".") if "." in fullname else (fullname, "")
        return ModuleSpec(fullname, self, is_package=True) if package in PACKAGES and name != ABSENT else None

    def create_module(self, spec: ModuleSpec) -> Stub:
        """Return an empty stub."""
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put the operators in that are here."""
        vars(module).update(OPERATORS.get(module.__name__, {}))


def fill() -> None:
    """Put stubs in place; again has no effect."""
    if any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(StubFinder())
    import torch_npu
    import vllm_ascend
    from torch_npu.op_plugin.atb import _atb_ops

    name = "vllm_ascend.vllm_ascend_C"
    sys.modules[name] = vllm_ascend.vllm_ascend_C = ModuleType(name)
    # The stand-in is called by another chip's name: under a 910B's an operator that is missing would fail too late.
    if chip := os.environ.get("STANDIN_ASCEND_CHIP"):  # else what the package was installed for
        set_chip(chip)
    if os.environ.get("STANDIN_ASCEND_TRITON"):  # for a configuration only: vLLM's second model runner asks for it
        import_module("vllm.config.vllm").HAS_TRITON = True
    torch.version.cann = CANN
    for module in find_modules(DEVICE_CHECKS):
        module.check_ascend_device_type = lambda: None
    _atb_ops._register_atb_extensions = lambda: None
    torch_npu._npu_matmul_add_fp32 = lambda *arguments: None
    for module in find_modules(SLOTS):
        vars(module).update(SLOTS[module.__name__])
    for module in find_modules(FUNCTIONS):
        vars(module).update(FUNCTIONS[module.__name__])
    replace_kernels()


def set_chip(name: str) -> None:
    """Let vllm-ascend take the chip for this one."""
    if not is_there("vllm_ascend.device.device_config"):  # 0.23.0
        from vllm_ascend import utils

        utils._ascend_device_type = utils.AscendDeviceType[name]
        return
    from vllm_ascend.device import device_config, hardware_profile

    kind = device_config.AscendDeviceType[name]
    device_config.get_device_config = lambda: device_config.DeviceConfig(_device_type=kind)
    hardware_profile._CURRENT_HARDWARE_PROFILE = hardware_profile.get_hardware_profile(kind)


def find_modules(names: Iterable[str]) -> list[ModuleType]:
    """Import those modules that this release of vllm-ascend, or its vLLM, has."""
    return [import_module(name) for name in names if is_there(name)]


def is_there(name: str) -> bool:
    """Return whether a module can be imported; its package may be missing, too."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def replace_kernels() -> None:
    """Put kernels of Python in the place of those of Triton, with what their callers ask Triton and the chip for."""
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2
    from vllm_ascend.ops.triton import triton_utils

    triton.next_power_of_2 = next_power_of_2
    triton.jit = compile_late
    triton_utils._NUM_VECTORCORE = 1
    for module in find_modules(KERNELS):
        for name, compute in KERNELS[module.__name__].items():
            setattr(module, name, triton_kernels.TritonKernel(name, compute))


def compile_late(function: Any = None, **options: Any) -> Any:
    """Return a kernel of Python in the place of a late one of Triton, and others as they are: `triton.jit`."""
    if function is None:
        return compile_late
    compute = LATE_KERNELS.get(function.__name__)
    return function if compute is None else triton_kernels.TritonKernel(function.__name__, compute)
