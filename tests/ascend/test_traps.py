"""What splitting on vllm-ascend has to take care of: without each remedy answers must be wrong.

All prompts are cut between requests, so that with every remedy in place answers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.ascend.jobs import cut_at_boundaries, find_decider, generate, make_prompts
from tests.support.ascend.traps import PLATFORM, PROMPTS, keep_rotary_tables
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.ranks import Ranks

CUT_INSIDE = [make_prompts(400)]
TOKENS = 4


def keep_positions() -> AbstractContextManager[Any]:
    """Give each slice the full buffer of positions."""
    return change_fields(per_token=())


def keep_lengths() -> AbstractContextManager[Any]:
    """Give each slice the full lengths of its requests, as if nothing of them were in later slices."""

    def complete(self: Any, part: Any, tokens: int) -> Any:
        done = original(self, part, tokens)
        whole = {"_seq_lens_cpu": steps[-1]._seq_lens_cpu[: part.num_reqs]}
        return replace(done, **whole)

    from dataclasses import replace

    from dbo_runtime.vllm_plugin.context import splitter
    from dbo_runtime.vllm_plugin.platforms.npu import NpuPlatform

    original, slice_common, steps = NpuPlatform.complete_metadata, splitter.slice_common, list[Any]()

    def remember(common: Any, slices: Any, sliced: Any) -> Any:
        steps.append(common)
        return slice_common(common, slices, sliced)

    stack = ExitStack()
    stack.enter_context(patch.object(NpuPlatform, "complete_metadata", complete))
    stack.enter_context(patch.object(splitter, "slice_common", remember))
    return stack


def keep_context() -> AbstractContextManager[Any]:
    """Leave what vllm-ascend adds to forward contexts as it is for the unsplit step."""
    return patch(f"{PLATFORM}.complete_context", lambda *arguments: None)


def change_fields(**changed: Any) -> AbstractContextManager[Any]:
    """Change how fields of the common metadata are sliced."""
    from dbo_runtime.vllm_plugin.platforms.npu import ASCEND_FIELDS

    return patch(f"{PLATFORM}.fields", ASCEND_FIELDS._replace(**changed))


def run_without(
    engine: Engine,
    rank: int,
    remedy: Callable[[], AbstractContextManager[Any]] | None,
    cuts: Sequence[int] | None,
    prompts: Any,
) -> list[Answer] | str:
    """Return answers without a remedy, or what went wrong; with *cuts* of each step, or else between requests."""
    engine.configure(DBO_MODE="always")
    with ExitStack() as stack:
        if remedy is not None:
            stack.enter_context(remedy())
        if cuts is None:
            cut_at_boundaries(engine, rank)
        else:
            engine.cut_at(*cuts)
        try:
            return generate(engine, rank, prompts, TOKENS)[0]
        except Exception as error:  # noqa: BLE001 - what goes wrong without a remedy may be anything
            engine.abort_all()
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("remedy", "cuts", "prompts"),
    [
        (keep_rotary_tables, None, PROMPTS),
        (keep_positions, None, PROMPTS),
        (keep_context, None, PROMPTS),
        (keep_lengths, (200,), CUT_INSIDE),
    ],
    ids=[
        "tables of decodes are one buffer",
        "positions are the full buffer",
        "contexts say tokens",
        "lengths are those of full requests",
    ],
)
def test_without_its_remedy_answers_go_wrong(one_npu: Ranks, remedy: Any, cuts: Any, prompts: Any) -> None:
    (right,) = one_npu.run(run_without, None, cuts, prompts)
    (wrong,) = one_npu.run(run_without, remedy, cuts, prompts)
    (again,) = one_npu.run(run_without, None, cuts, prompts)
    assert find_difference(right, again) == 0.0
    assert isinstance(wrong, str) or find_difference(right, wrong) > 0.5, "the remedy is not needed, or not tested"


def test_attention_ends_in_a_reduce_of_which_it_returns_a_copy(two_npus: Ranks) -> None:
    """MLA's o_proj is inside of vllm-ascend's operator: the reduce is left out there, and made on the other lane."""
    ((_, counts),) = two_npus.run(run_counted, PROMPTS)
    assert counts[0]["split"] >= 1
    (failure,) = two_npus.run(fail_with_distrust)
    assert "must end in one all-reduce" in failure


def run_counted(engine: Engine, rank: int, prompts: Any) -> Any:
    """Answer with cuts between requests."""
    cut_at_boundaries(engine, rank)
    return generate(engine, rank, prompts, 1)


def fail_with_distrust(engine: Engine, rank: int) -> str:
    """Run attention without its reduce as a module that returns what it reduces; return the error."""
    (found, _) = engine.llm.collective_rpc(_fail_with_distrust)
    return str(found)


def _fail_with_distrust(worker: Any) -> str:
    import torch
    from vllm.distributed import get_tp_group

    from dbo_runtime.errors import ProgramError
    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    group = get_tp_group()

    def attend(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[...] = group.all_reduce(x)  # as vllm-ascend's MLA does
        return out

    try:
        ModelCollectives(get_platform(), group).without_reduce(attend)(torch.ones(2, 4, device="npu"))
    except ProgramError as error:
        return str(error)
    return "no error"


def test_micro_batches_gather_whatever_the_unsplit_step_does(one_npu: Ranks) -> None:
    """vllm-ascend chooses by the number of tokens: all-to-all in the whole step here, and MC2 for a part of it."""
    (kinds,) = one_npu.run(record_communication)
    assert kinds == {"ALLGATHER"}


def record_communication(engine: Engine, rank: int) -> set[str]:
    """Split a step where fewer tokens would communicate otherwise; return the communication of its parts."""
    from vllm_ascend import ascend_forward_context as contexts

    from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter

    kinds = set()

    def choose(tokens: int, *rest: Any, **options: Any) -> Any:
        return contexts.MoECommType.ALLTOALL if tokens > 100 else contexts.MoECommType.MC2

    def split(self: Any, context: Any, *arguments: Any) -> Any:
        assert context.moe_comm_type.name == "ALLTOALL"
        parts = original(self, context, *arguments)
        kinds.update(part.moe_comm_type.name for part in parts)
        return parts

    original = ContextSplitter.split
    engine.configure(DBO_MODE="always")
    engine.cut_at(60)
    with patch.object(contexts, "select_moe_comm_method", choose), patch.object(ContextSplitter, "split", split):
        engine.generate(make_prompts(60, 60), 1)
    return kinds


def test_tokens_are_dispatched_without_the_objects_that_keep_state(expert_npus: Ranks) -> None:
    """Prepare and finalize are one object for all layers; micro-batches in turn would take each other's sizes."""
    calls = expert_npus.run(count_preparations)
    assert calls == [(0, 1), (0, 1)], "(calls of prepare, split steps)"


def count_preparations(engine: Engine, rank: int) -> tuple[int, int]:
    """Split a step; return how often vllm-ascend's own prepare was called, and how many steps were split."""
    from vllm_ascend.ops.fused_moe.prepare_finalize import PrepareAndFinalizeWithAllGather as Own

    engine.configure(DBO_MODE="always")
    engine.cut_at([30], [30])
    before = engine.count_split()
    with patch.object(Own, "prepare", autospec=True, side_effect=Own.prepare) as prepare:
        engine.generate(make_prompts(30, 30), 1)
    return prepare.call_count, engine.count_split() - before


def test_an_unknown_field_of_the_metadata_declines(one_npu: Ranks) -> None:
    """Fields change from release to release."""
    (declined,) = one_npu.run(add_field)
    assert declined == {"unknown per-request or per-token attention metadata": 1}


def add_field(engine: Engine, rank: int) -> dict[str, int]:
    """Run a step whose metadata has a field for each request that is not known; return the declines."""
    import torch
    from vllm_ascend.attention.utils import AscendCommonAttentionMetadata as Common

    engine.configure(DBO_MODE="always")
    engine.cut_by_settings()
    before = engine.statistics()[0]["declined"]
    made = Common.__init__

    def make(self: Any, *arguments: Any, **fields: Any) -> None:
        made(self, *arguments, **fields)
        self.decode_token_per_req = torch.zeros(self.num_reqs)  # read for graphs only

    with patch.object(Common, "__init__", make):
        engine.generate(make_prompts(30, 30), 1)
    after = engine.statistics()[0]["declined"]
    return {why: n - before.get(why, 0) for why, n in after.items() if n > before.get(why, 0)}


def test_no_model_that_has_an_adapter_reads_the_rotary_slices_of_the_unsplit_step() -> None:
    """GQA once took cos and sin from slices that were set before the model; in this release MiniMax and 310P do."""
    import vllm_ascend

    folder = Path(vllm_ascend.__file__).parent
    readers = {
        str(file.relative_to(folder)) for file in folder.rglob("*.py") if "get_cos_and_sin_slice" in file.read_text()
    }
    assert readers == {
        "ops/rotary_embedding.py",
        "patch/worker/patch_minimax_m2.py",
        "_310p/ops/rotary_embedding.py",
    }


def test_the_device_is_the_npu_whatever_the_runner_makes_of_cuda_names(one_npu: Ranks) -> None:
    """vllm-ascend binds names of torch.cuda anew; nothing here may go by them."""
    (found,) = one_npu.run(name_device)
    assert found == ("NpuDevice", "npu")


def name_device(engine: Engine, rank: int) -> tuple[str, str]:
    """Return the class of the device on which steps are split, and where its lanes' streams are."""
    runtime = find_decider(engine.llm.llm_engine.model_executor.driver_worker.worker).runtime
    lanes = runtime.device.open_lanes(("compute", "comm"))
    return type(runtime.device).__name__, lanes[1].stream.device.type
