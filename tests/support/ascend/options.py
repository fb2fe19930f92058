"""Options of engines inside vllm-ascend that several suites serve with."""

from __future__ import annotations

from typing import Any

from tests.support.ascend.engines import OPTIONS

FLASHCOMM: dict[str, Any] = {"additional_config": {**OPTIONS["additional_config"], "enable_flashcomm1": True}}
REPLICATED = {"additional_config": {**FLASHCOMM["additional_config"], "enable_shared_expert_dp": True}}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
A3 = {"STANDIN_ASCEND_CHIP": "A3", "NPU_STANDIN_HCCL_TIMEOUT": "30"}
FUSED: dict[str, Any] = {"enable_fused_mc2": 1}
FUSIONS = ("fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add", "enable_npugraph_ex")  # need more operators
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
    "additional_config": {"ascend_compilation_config": dict.fromkeys(FUSIONS, False), **OPTIONS["additional_config"]},
}
RECORDER: dict[str, Any] = {  # a KV connector that notes which hooks are called
    "kv_transfer_config": {
        "kv_connector": "HookRecorder",
        "kv_connector_module_path": "tests.support.ascend.hook_recorder",
        "kv_role": "kv_both",
    },
    "worker_extension_cls": "tests.support.vllm.layer_recorder.Extension",
}
