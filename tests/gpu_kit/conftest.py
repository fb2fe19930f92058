"""vLLM's CUDA build from the GPU kit, on a machine that it takes for one with an H100."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.gpu_kit import fake_gpu
from tests.support.vllm.process_groups import destroy_groups, make_groups

RUN = Path(__file__).parents[2] / "tools" / "gpu_kit" / "run.sh"
EXPORTED = re.compile(r"^export .*", re.MULTILINE)
CONSTANT = re.compile(r"([A-Z0-9_]+)=(\w+)(?= |$)")
SETTINGS = {  # what the kit sets there, but for its log and its plugin
    **dict(CONSTANT.findall(" ".join(EXPORTED.findall(RUN.read_text())))),
    "VLLM_PLUGINS": "dbo_runtime",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.fixture(scope="session")
def cuda_build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let vLLM's CUDA build be imported from here on, and find an H100."""
    spec = find_spec("vllm")
    if spec is None or not (Path(str(spec.origin)).parent / "_C_stable_libtorch.abi3.so").is_file():
        pytest.fail(
            "there is no CUDA build of vLLM here: `make test-gpu-kit` has an environment with it", pytrace=False
        )
    assert "vllm" not in sys.modules
    fake_gpu.load_libcuda(tmp_path_factory.mktemp("libcuda"))
    patcher = fake_gpu.Patcher()
    sys.meta_path.insert(0, patcher)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        import torch

        patch.setattr(torch.cuda, "Stream", fake_gpu.FakeStream)
        patch.setattr(torch.cuda, "Event", fake_gpu.FakeStream)
        patch.setattr(torch.cuda, "get_device_properties", fake_gpu.get_device_properties)
        yield
    sys.meta_path.remove(patcher)


@pytest.fixture(scope="session")
def world(cuda_build: None) -> Iterator[None]:
    """Be the only rank of vLLM's world, in which nothing is sent to anyone."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "dist_backend", "gloo")
        make_groups()
        init_workspace_manager(torch.device("cpu"))
        yield
        destroy_groups()
