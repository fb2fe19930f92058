"""Settings of vllm-ascend that users meet: each works, or steps run unsplit and the log names the feature."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ascend.engines import OPTIONS, TINY, start
from tests.support.ascend.equivalence import assert_data_parallel_prefills_are_close
from tests.support.ascend.jobs import answer, make_prompts
from tests.support.vllm.engine import Engine, find_difference
from tests.support.vllm.ranks import Ranks

PROMPTS = [make_prompts(60, 40, 25)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_dualbatch_overlap_npu.py"


def test_with_graphs_of_decodes_prefills_are_split() -> None:
    """Captured steps replay without the model's forward; all others run as they do without graphs."""
    fusions = ("fuse_norm_quant", "fuse_qknorm_rope", "fuse_muls_add", "enable_npugraph_ex")  # need more operators
    compiler = {"ascend_compilation_config": dict.fromkeys(fusions, False), **OPTIONS["additional_config"]}
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    for npus in start(1, enforce_eager=False, compilation_config=graphs, additional_config=compiler):
        ((unsplit, _),) = npus.run(answer, PROMPTS, 6)
        ((split, counts),) = npus.run(answer, PROMPTS, 6, [60])
        assert counts == [{"split": 1, "declined": {}}], "a prefill; five decodes are replayed"
        assert find_difference(unsplit, split) == 0.0


def test_shared_experts_on_a_stream_of_their_own_stay_there() -> None:
    options = {"multistream_overlap_shared_expert": True, **OPTIONS["additional_config"]}
    for npus in start(1, additional_config=options):
        ((unsplit, _),) = npus.run(answer, PROMPTS, 3)
        ((split, counts),) = npus.run(answer, PROMPTS, 3, [60])
        assert counts[0]["split"] >= 1
        assert find_difference(unsplit, split) == 0.0
        (kept,) = npus.run(read_additional_config)
        assert kept.items() >= options.items()
        assert "dbo" not in json.dumps(kept).lower(), "vllm-ascend refuses options that it does not know"


def test_logits_that_data_parallel_ranks_share_out_are_those_of_unsplit_steps() -> None:
    """The language model's head comes after the forward, which is split."""
    options = {**OPTIONS["additional_config"], "finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}}
    for npus in start(2, additional_config=options):
        assert_data_parallel_prefills_are_close(npus, 0.0)


def test_a_memory_profile_sees_a_split_step(capfd: pytest.CaptureFixture[str]) -> None:
    """vLLM sizes its KV cache by the profile, in which split steps take memory of their own."""
    environment = {"NPU_STANDIN_MEMORY_MB": "1024"}
    for npus in start(1, environment=environment, kv_cache_memory_bytes=None, gpu_memory_utilization=0.3):
        ((_, counts),) = npus.run(answer, PROMPTS, 1, [60])
        assert counts[0]["split"] == 1
    assert "vLLM's memory profile includes a split step" in capfd.readouterr().err


def read_additional_config(engine: Engine, rank: int) -> dict[str, Any]:
    """Return vllm-ascend's options as the engine has them."""
    found: dict[str, Any] = engine.llm.llm_engine.vllm_config.additional_config
    return found


FEATURES = {
    "eplb_config.expert_map_path": ("map.json", "an expert map (eplb_config)"),
    "enable_force_eplb": (True, "forced expert load balancing"),
    "mix_placement": (True, "shared experts among the routed ones (mix_placement)"),
    "xlite_graph_config.enabled": (True, "xlite graphs"),
    "sparse_kv_offload_config.enabled": (True, "sparse KV offload"),
    "kvpp_config.size": (2, "KV cache pipelines (kvpp_config)"),
    "finegrained_tp_config.oproj_tensor_parallel_size": (2, "a separate tensor parallel group for o_proj"),
    "finegrained_tp_config.mlp_tensor_parallel_size": (2, "a separate tensor parallel group for the MLP"),
}


BALANCED = {  # by why steps are not split
    "not supported yet: redundant experts, whose weights vllm-ascend does not load (num_redundant_experts)": {
        "num_redundant_experts": 16
    },
    "not supported yet: expert load balancing by the load of each step (eplb_policy_type: 3)": {"eplb_policy_type": 3},
}


@pytest.mark.parametrize("reason", [None, *BALANCED])
def test_load_balancing_is_split_but_where_it_was_not_compared(reason: str | None, one_npu: Ranks) -> None:
    options = {"dynamic_eplb": True, **(BALANCED[reason] if reason else {})}
    assert one_npu.run(check_balancing, options) == [reason]


def check_balancing(engine: Engine, rank: int, options: dict[str, Any]) -> str | None:
    """Return why the model would run unsplit with these options of load balancing."""
    from vllm_ascend.ascend_config import get_ascend_config

    from dbo_runtime.vllm_plugin.step.unsupported import check_config

    balancing = copy.copy(get_ascend_config().eplb_config)
    for name, value in options.items():
        object.__setattr__(balancing, name, value)
    with patch.object(get_ascend_config(), "eplb_config", balancing):
        found = check_config(engine.llm.llm_engine.vllm_config)
    return None if found is None else str(found)


def test_features_that_cannot_be_split_are_named(one_npu: Ranks) -> None:
    """On the very configuration object that vllm-ascend has made, one feature after the other."""
    (found,) = one_npu.run(list_unsupported)
    expected = {name: feature for name, (_, feature) in FEATURES.items()}
    assert found == {None: None, **{name: f"not supported yet: {feature}" for name, feature in expected.items()}}


def list_unsupported(engine: Engine, rank: int) -> dict[str | None, str | None]:
    """Return why the model would run unsplit with each of the features on, and with none."""
    from vllm_ascend.ascend_config import get_ascend_config

    from dbo_runtime.vllm_plugin.step.unsupported import check_config

    config = engine.llm.llm_engine.vllm_config
    found = {None: check_config(config)}
    for name, (value, _) in FEATURES.items():
        first, _, last = name.partition(".")
        changed = value
        if last:
            changed = copy.copy(getattr(get_ascend_config(), first))
            object.__setattr__(changed, last, value)  # some are frozen
        with patch.object(get_ascend_config(), first, changed):
            found[name] = check_config(config)
    return {name: None if decline is None else str(decline) for name, decline in found.items()}


def test_only_keys_of_sparse_attention_may_be_shared_out(one_npu: Ranks) -> None:
    """This model's attention is not sparse."""
    assert one_npu.run(check_with_ranks, 2) == ["not supported yet: decode context parallel without sparse attention"]


def check_with_ranks(engine: Engine, rank: int, ranks: int) -> str:
    """Return why the model would run unsplit if so many ranks shared out the keys of a request."""
    from dbo_runtime.vllm_plugin.step.unsupported import check_config

    config = engine.llm.llm_engine.vllm_config
    with patch.object(config.parallel_config, "decode_context_parallel_size", ranks):
        return str(check_config(config))


def test_steps_whose_experts_communicate_otherwise_than_the_program_run_unsplit(one_npu: Ranks) -> None:
    (found,) = one_npu.run(list_step_declines)
    assert found == {
        "ALLGATHER": None,
        "ALLTOALL": None,  # of one tensor parallel rank
        "MC2": "MoE communication is fused into its kernels (MC2)",
        "FUSED_MC2": "MoE communication is fused into its kernels (FUSED_MC2)",
    }
    (found,) = one_npu.run(list_step_declines, "fused")
    assert [name for name, declined in found.items() if declined is None] == ["MC2", "FUSED_MC2"]


def list_step_declines(engine: Engine, rank: int, dispatch: str = "all_gather") -> dict[str, str | None]:
    """Return why a step would run unsplit with each communication of vllm-ascend's experts."""
    from vllm_ascend.ascend_forward_context import MoECommType

    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    context = SimpleNamespace
    declines = {kind.name: get_platform().check_step(context(moe_comm_type=kind), dispatch) for kind in MoECommType}
    return {name: None if decline is None else str(decline) for name, decline in declines.items()}


def test_without_chunked_prefill_requests_are_not_cut_inside(one_npu: Ranks) -> None:
    """A tail attends to what its head has cached, which vllm-ascend prepares for with chunked prefill only."""
    (declined,) = one_npu.run(prefill_unchunked)
    assert declined == {"nowhere to cut": 1}


def prefill_unchunked(engine: Engine, rank: int) -> dict[str, int]:
    """Prefill one prompt as if chunked prefill were off; return the declines."""
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    with patch.object(config, "enable_chunked_prefill", False):
        _, counts = answer(engine, rank, [make_prompts(200)], 1, [])
    found: dict[str, int] = counts[0]["declined"]
    return found


@pytest.mark.parametrize("fault", ["none", "version"])
def test_the_example_runs_with_vllm_ascend(fault: str, tmp_path: Path) -> None:
    """The demo's own command line; with a vllm-ascend that is not known, unsplit, and the log says why."""
    options = {**OPTIONS, "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True}
    for ours in ("dtype", "max_model_len", "attention_backend"):
        del options[ours]
    environment = dict(os.environ)
    environment.pop("DBO_MODE")
    if fault == "version":
        environment["PYTHONPATH"] = str(tmp_path)
        (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    command = [
        sys.executable,
        str(EXAMPLE),
        "--device",
        "npu",
        "--tp",
        "1",
        "--max-model-len",
        "256",
        "--mode",
        "always",
    ]
    command += ["--options", json.dumps(options), "--model", str(TINY), "--max-tokens", "6"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "identical token by token: 32 of 32 answers" in done.stdout
    if fault == "none":
        assert "steps split: " in done.stdout
        assert "no NPU has run this yet, only a stand-in for CANN" in done.stderr
    else:
        assert "reason=this version of vllm-ascend is not known to dbo_runtime  detail=0.31.0;" in done.stderr
        assert "steps: none were split" in done.stdout


OTHER_VERSION = """
import importlib.metadata as metadata
found = metadata.version
metadata.version = lambda name: "0.31.0" if name == "vllm-ascend" else found(name)
"""
