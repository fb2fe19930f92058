"""What a step costs the host where it is replayed, compared with the same step issued op by op.

    make bench

On the stand-in for CANN the calls into torch_npu are real, and those into the driver are not: an NPU's own are unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from dbo_runtime.events import EventTable
from dbo_runtime.executor import Executor
from dbo_runtime.graphs import Graphs
from dbo_runtime.lowering import lower
from dbo_runtime.observe.logs import open_log
from dbo_runtime.policies import alternate
from dbo_runtime.program import Program, ProgramBuilder
from tests.devices import rigs

STEPS = 50
MICRO_BATCHES = 2
BUCKET, TOKENS, WIDTH = 64, 50, 16
PRESENT = [name for name in rigs.find_present() if name in rigs.STREAMS]
if not PRESENT:
    pytest.skip("no device with streams is here", allow_module_level=True)

import torch  # noqa: E402 - only where there is a device with streams


@pytest.fixture(params=PRESENT)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    rig = rigs.open_rig(request.param)
    yield rig.device
    rig.close()


def record_decoder(layers: int) -> Program:
    """Return layers of four small ops, two of which are concurrent with those of `compute`."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attention", lambda x: x * 2, x)
            x = p.comm("attn_reduce", lambda x: x.add_(1), x, overwrites=(x,))
            x = p.compute("mlp", lambda x: x * 0.5, x)
            x = p.comm("mlp_reduce", lambda x: x.sub_(1), x, overwrites=(x,))
    return p.build(x)


def measure_host(device: Any, run: Callable[[], Any]) -> float:
    """Return the median of what a call takes, in seconds, on a device with nothing to do."""
    seconds = []
    for _ in range(STEPS):
        device.synchronize()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    device.synchronize()
    return median(seconds)


@pytest.mark.parametrize("layers", [4, 16, 61])
def test_a_replay_costs_the_host_less_than_issuing(device: Any, layers: int) -> None:
    programs = [record_decoder(layers)] * MICRO_BATCHES
    executor = Executor(lower(programs, alternate(programs)), device, EventTable(device))
    graphs = Graphs(device, open_log(quiet=True), (BUCKET,))
    inputs = [(torch.ones(TOKENS, WIDTH, device=device.name),) for _ in range(MICRO_BATCHES)]
    eager = measure_host(device, lambda: executor.run(inputs))
    graphs.run(executor, inputs)
    replayed = measure_host(device, lambda: graphs.run(executor, inputs))
    assert (graphs.captured, graphs.replayed) == (1, STEPS)
    graphs.close()
    print(
        f"\ndevice {device.name!r}, {len(executor.schedule.instructions)} ops: a step costs the host "
        f"{eager * 1e3:.2f} ms eagerly and {replayed * 1e3:.3f} ms replayed, copies in and out "
        f"included (medians of {STEPS}): {eager / replayed:.1f} times less"
    )
    assert replayed < eager
