"""Upstream bugs of vLLM's CPU build: each is still there, and gone once patched.

If a test here fails because vLLM has closed a gap, remove it from `dbo_runtime.vllm_plugin.install.cpu_patches`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from dbo_runtime.vllm_plugin.install.cpu_patches import UPSTREAM_BUGS

ROOT = Path(__file__).parents[3]
VERSION = vllm.__version__.partition("+")[0]

SCRIPT = """
from types import SimpleNamespace
import torch, torch.distributed as dist
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner
from dbo_runtime.vllm_plugin.install.cpu_patches import UPSTREAM_BUGS, apply_patches

class Bare(Experts):
    w1_bias = w2_bias = None
    def __init__(self): self._use_zentorch = False

torch.manual_seed(0)
x, w1, w2 = torch.randn(4, 32), torch.randn(2, 64, 32), torch.randn(2, 32, 32)
w1, w2 = (cpu_prepack_moe_weight(w, "vec") for w in (w1, w2))
def run(ids, expert_map):
    out = torch.empty_like(x)
    Bare().apply(
        output=out, hidden_states=x, w1=w1, w2=w2, topk_weights=torch.ones(4, 1), topk_ids=ids,
        activation=MoEActivation.SILU, global_num_experts=2, expert_map=expert_map, a1q_scale=None, a2_scale=None,
        workspace13=None, workspace2=None, expert_tokens_meta=None, apply_router_weight_on_input=False,
    )
    return out
first, second = (torch.full((4, 1), expert, dtype=torch.int32) for expert in (0, 1))
swapped, elsewhere = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32)

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
handed = make_empty_intermediate_tensors_factory(["hidden_states", "residual"], 4)
off = SimpleNamespace(enable_sp=False)
config = SimpleNamespace(
    parallel_config=SimpleNamespace(tensor_parallel_size=1), compilation_config=SimpleNamespace(pass_config=off)
)
stage = SimpleNamespace(
    intermediate_tensors=None, vllm_config=config, model=SimpleNamespace(make_empty_intermediate_tensors=handed),
    max_num_tokens=8, model_config=SimpleNamespace(dtype=torch.float32), device=torch.device("cpu"),
)
communicator = CpuCommunicator.__new__(CpuCommunicator)
communicator.world_size, communicator.device_group = 1, dist.group.WORLD
def refuses(method, *arguments, **options):
    try:
        method(*arguments, **options)
    except (NotImplementedError, AssertionError) as error:
        return str(error) or True
    return False

# As vLLM is: all gaps are found, and their symptoms are there.
assert [bug.is_present() for bug in UPSTREAM_BUGS] == [True] * len(UPSTREAM_BUGS), "vLLM has fixed one: remove it"
plain, other = run(first, None), run(second, None)
assert not torch.equal(plain, other)
assert torch.equal(run(first, swapped), plain), "vLLM reads expert_map now: remove this gap"
assert refuses(communicator.all_gatherv, x, dim=0, sizes=[4]), "vLLM has all_gatherv now: remove this gap"
assert refuses(communicator.reduce_scatterv, x, dim=0, sizes=[4]), "vLLM has reduce_scatterv now: remove this gap"

assert refuses(Runner.sync_and_gather_intermediate_tensors, stage, 2, None, False), "vLLM makes buffers: remove this"

# Patched, once.
assert apply_patches() == [bug.symptom for bug in UPSTREAM_BUGS]
assert [bug.is_present() for bug in UPSTREAM_BUGS] == [False] * len(UPSTREAM_BUGS)
assert apply_patches() == []
assert torch.equal(run(first, swapped), other)
assert torch.equal(run(first, None), plain)
assert torch.equal(run(first, elsewhere), torch.zeros_like(x)), "an expert on another rank gives nothing here"
assert torch.equal(run(second, elsewhere), plain)
one, two = communicator.all_gatherv([x, x + 1], dim=0, sizes=[4])
assert torch.equal(one, x) and torch.equal(two, x + 1)
assert torch.equal(communicator.all_gatherv(x), x)
assert torch.equal(communicator.reduce_scatterv(x, dim=0), x)
received = Runner.sync_and_gather_intermediate_tensors(stage, 2, None, False)
assert received["residual"].shape == (2, 4) and received["residual"].dtype == torch.float32
assert stage.intermediate_tensors["residual"].shape == (8, 4), "as large as any step, and made once"
assert "along dimension 0 only" in refuses(communicator.all_gatherv, x, dim=1)
"""


FIND_AND_PATCH = """
import sys
from dbo_runtime.vllm_plugin.install.cpu_patches import UPSTREAM_BUGS, apply_patches

version = sys.argv[1]
present = [bug.symptom for bug in UPSTREAM_BUGS if bug.is_present()]
known = [bug.symptom for bug in UPSTREAM_BUGS if version in bug.versions]
assert present == known, (present, known)
assert apply_patches() == present
assert apply_patches() == []
"""


def run_script(script: str, *arguments: str) -> None:
    """In a process of its own: patches change vLLM's classes for good."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.vllm
@pytest.mark.skipif(
    any(VERSION not in bug.versions for bug in UPSTREAM_BUGS), reason="bugs of a kernel that this vLLM does not have"
)
def test_each_bug_is_there_and_is_gone_once_patched() -> None:
    run_script(SCRIPT)


@pytest.mark.vllm
def test_the_bugs_that_are_found_are_those_that_were_seen_in_this_version() -> None:
    run_script(FIND_AND_PATCH, VERSION)
