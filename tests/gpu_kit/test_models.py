"""Adapters record models as vLLM makes them for CUDA: other layers and kernels than those of its CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_kit.tiny_models import configure, make_folder, make_model

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("world")]

BACKENDS = {"llama": "FLASH_ATTN", "deepseek": "FLASH_ATTN_MLA"}
ATTENTION = ["attn_norm", "attention", "attn_reduce (comm)", "mlp_norm"]
LATENT = [
    "attn_norm",
    "slots",
    "latent",
    "keys (side)",
    "queries",
    "attention",
    "attn_out",
    "attn_reduce (comm)",
    "mlp_norm",
]
MLP = ["mlp", "mlp_reduce (comm)"]
MOE = ["moe", "mlp_reduce (comm)"]
LAYERS = {
    ("llama", False): [ATTENTION + MLP] * 2,
    ("llama", True): [ATTENTION + MLP] * 2,
    ("deepseek", False): [ATTENTION + MLP, ATTENTION + MOE, ATTENTION + MOE],
    ("deepseek", True): [LATENT + MLP, LATENT + MOE, LATENT + MOE],
}


@pytest.mark.parametrize(("name", "has_side"), LAYERS)
def test_a_model_is_recorded_with_and_without_the_side_lane(name: str, has_side: bool, tmp_path: Path) -> None:
    from dbo_runtime.adapters.contract import record_program
    from dbo_runtime.ir.op import COMPUTE
    from dbo_runtime.ir.program import Program
    from dbo_runtime.vllm_plugin.api.groups import get_groups
    from dbo_runtime.vllm_plugin.api.model_classes import find_adapter
    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    vllm_config = configure(make_folder(name, tmp_path))
    model, platform = make_model(vllm_config), get_platform()
    assert platform.name == "cuda"
    backends = {
        module.get_attn_backend().get_name() for module in model.modules() if hasattr(module, "get_attn_backend")
    }
    assert backends == {BACKENDS[name]}
    adapter = find_adapter(vllm_config.model_config.architecture)
    assert adapter is not None
    assert adapter.decline(model) is None
    platform.prepare_model(model)
    groups = get_groups(vllm_config)
    collectives = ModelCollectives(platform, groups.tensor_parallel, groups.data_parallel)
    program = record_program(adapter, model, collectives, has_side)
    assert isinstance(program, Program), program
    named = [(op.layer, op.name if op.lane == COMPUTE else f"{op.name} ({op.lane})") for op in program.ops]
    layers = [[op for layer, op in named if layer == number] for number in range(len(LAYERS[name, has_side]))]
    assert layers == LAYERS[name, has_side]
    assert [op for layer, op in named if layer is None] == ["final_norm"]
