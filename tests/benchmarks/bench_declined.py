"""What a step that is not split costs: the host time that this package adds to vLLM's own forward.

    python -m pytest tests/benchmarks/bench_declined.py -o python_files='bench_*.py' -q -s [--write-page]

A forward that does nothing is called as vLLM calls a model: bare, and replaced by the one that declines each step for
the reason of the row, with its decision, counts on /metrics, and timer. Attention metadata is that of 64 decodes in 61
layers, built by a builder that is traced as in a server. Steps of the same size repeat the decline of one of them that
was read; to show what reading costs, sizes of two rows change in each step. Each round runs every row once, in random
order. Times are CPU times of the calling thread, which waits for nothing, and figures those of the best round, because
other processes share the machine and its caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.worker.utils import AttentionGroup

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import Device, open_device
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.ir.program import Program
from dbo_runtime.observe.logs import open_log
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.vllm_plugin.api.metadata_source import get_source, trace_builders
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.decline_cache import MAX_REPEATS
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from dbo_runtime.vllm_plugin.telemetry.sampling import Recording
from tests.benchmarks.bench_core import LAYERS, record_decoder
from tests.benchmarks.bench_planner import make_table as make_costs
from tests.benchmarks.rounds import time_in_turns
from tests.support.page import Publish, find_command, make_table
from tests.support.vllm.forwards import ONE_RANK
from tests.support.vllm.split_forwards import assemble
from tests.support.vllm.splitters import CONFIG, UNTRACED, FakeBuilder, build, make_common, make_group

ROUNDS = 40
STEPS = 200  # of each row, in a round
MAX_SECONDS = 20e-6
MAX_STANDING_SECONDS = 0.1e-6  # the same forward is called, so this is noise
BARE, STANDING = "vLLM's own forward", "`no communication to hide`, for every step: vLLM's own forward is back"
AUTO = RuntimeConfig()
NONE, FEW, ALL = "none", f"one of {MAX_REPEATS + 1}", "each"
KINDS = {
    NONE: "Before the batch is read",
    FEW: "In steps of about the same size, of which one in so many is read",
    ALL: "In steps that are all read, because each has another size",
}


class Row(NamedTuple):
    """Settings and costs by which each step is declined for a reason.

    Attributes:
        reads: in which steps the batch is read before, from the attention metadata.
    """

    reason: str
    reads: str
    config: RuntimeConfig = AUTO
    transport: str = "network"
    has_costs: bool = False
    query_lens: tuple[int, ...] = (1,) * 64


ROWS = (
    Row("DBO_MODE is off", NONE, RuntimeConfig(mode="off")),
    Row("no communication to hide", NONE, transport="none"),
    Row("fewer tokens than DBO_MIN_TOKENS", NONE),
    Row("fewer prefill tokens than DBO_MIN_PREFILL_TOKENS", NONE, RuntimeConfig(min_tokens=64)),
    Row("nowhere to cut", FEW, RuntimeConfig(mode="always"), query_lens=(1,)),
    Row("no gain predicted", FEW, has_costs=True),
    Row("nowhere to cut", ALL, RuntimeConfig(mode="always"), query_lens=(1,)),
    Row("no gain predicted", ALL, has_costs=True),
)


class Model(nn.Module):
    """A model whose forward does nothing."""

    def forward(self, input_ids: Any, positions: torch.Tensor, *_: Any) -> torch.Tensor:
        return positions


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Return the CPU, while builders are traced as in a server."""
    monkeypatch.setattr(AttentionGroup, "get_metadata_builder", UNTRACED)
    trace_builders()
    device = open_device("cpu")
    yield device
    device.close()


def make_context(query_lens: tuple[int, ...]) -> ForwardContext:
    """Return the context of a batch whose requests have 500 computed tokens each."""
    group = make_group(FakeBuilder, *(f"layers.{number}" for number in range(LAYERS)))
    metadata = build(group, make_common(query_lens, (500,) * len(query_lens)))
    slots = dict.fromkeys(metadata, torch.arange(sum(query_lens)))
    mode = CUDAGraphMode.NONE
    return ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping=slots, cudagraph_runtime_mode=mode)


def install(row: Row, program: Program, device: Device, folder: Path) -> tuple[Model, SplitForward]:
    """Return a model whose forward declines each step, and counts that."""
    model, metrics = Model(), Metrics(folder, row.reason, 0)
    runtime = MicroBatchRuntime(program, device, row.config, open_log(quiet=True))
    if row.has_costs:
        runtime.planner = Planner(program, make_costs(program), ServingLimits(tokens=512, requests=64))
        runtime.prepare(row.config)
    agreement = Agreement(ONE_RANK)  # type: ignore[arg-type]
    decider = StepDecider(runtime, ContextSplitter(get_platform("cpu"), CONFIG), agreement, row.transport)
    forward = assemble(model, decider, agreement, recording=Recording(metrics=metrics), metrics=metrics)
    model.forward = forward  # type: ignore[method-assign]
    return model, forward


def make_steps(model: Model, row: Row) -> Callable[[], None]:
    """Return what runs a round's steps, as vLLM's runner does; no two of them of one size if all are to be read."""
    context, ids, positions = make_context(row.query_lens), None, torch.arange(sum(row.query_lens))
    source = get_source(next(iter(context.attn_metadata.values())))
    assert source is not None, "its builder is traced"
    common, growth = source.common, int(row.reads == ALL)

    def run() -> None:
        with override_forward_context(context):
            for _ in range(STEPS):
                common.max_query_len += growth
                model(ids, positions)

    return run


@pytest.mark.filterwarnings("default")
def test_a_declined_step_costs_the_host_little(publish: Publish, device: Device, tmp_path: Path) -> None:
    program = record_decoder(LAYERS)
    installed = {row: install(row, program, device, tmp_path) for row in ROWS}
    modes: dict[Row | str, Callable[[], None]] = {row: make_steps(model, row) for row, (model, _) in installed.items()}
    standing, forward = install(ROWS[1], program, device, tmp_path)
    forward.start_serving(is_final=True)
    modes |= {STANDING: make_steps(standing, ROWS[0]), BARE: make_steps(Model(), ROWS[0])}
    seconds = time_in_turns(modes, ROUNDS, time.thread_time)
    for row, (_, declining) in installed.items():
        assert set(declining.runtime.statistics.declined) == {row.reason}
    best = {name: min(each) / STEPS for name, each in seconds.items()}
    added = {name: each - best[BARE] for name, each in best.items()}
    rows = [
        [
            f"`{row.reason}`" if isinstance(row, Row) else row,
            row.reads if isinstance(row, Row) else NONE,
            f"{added[row] * 1e6:.2f}",
            f"{best[row] / best[BARE]:.1f}x",
        ]
        for row in sorted(added, key=lambda row: added[row])
    ]
    most = {reads: max(added[row] for row in ROWS if row.reads == reads) for reads in (NONE, FEW, ALL)}
    met = [f"{name}: {judge(most[reads] <= MAX_SECONDS)}, {most[reads] * 1e6:.1f} us" for reads, name in KINDS.items()]
    targets = [
        f"- Target: at most {MAX_SECONDS * 1e6:.0f} us. {'. '.join(met)}.",
        f"- Target: 0 where a reason holds for every step. {judge(added[STANDING] <= MAX_STANDING_SECONDS)}: "
        f"{added[STANDING] * 1e6:.2f} us, the noise of calling the same forward.",
        f"- A bare step, of a module of torch's that does nothing, takes {best[BARE] * 1e6:.2f} us here.",
    ]
    header = ["declined because", "batches that are read", "us a step", "by a forward that does nothing"]
    publish("declined", find_command(__file__), [*make_table(header, rows), "", *targets])
    assert max(most.values()) <= MAX_SECONDS
    assert added[STANDING] <= MAX_STANDING_SECONDS


def judge(is_reached: bool) -> str:
    return "Reached" if is_reached else "**Missed**"
