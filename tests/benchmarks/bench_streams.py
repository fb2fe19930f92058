"""What a step costs the host on streams, with ops that do nothing: waits, records and switches of the current stream.

    make bench

On the stand-in for CANN the calls into torch_npu are real, and those into the driver are not: an NPU's own are unknown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate
from tests.benchmarks.bench_core import LAYERS, MICRO_BATCHES, record_decoder
from tests.support.devices import rigs

STEPS = 1000
PRESENT = [name for name in rigs.find_present() if name in rigs.STREAMS]
if not PRESENT:
    pytest.skip("no device with streams is here", allow_module_level=True)


@pytest.fixture(params=PRESENT)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    rig = rigs.open_rig(request.param)
    yield rig.device
    rig.close()


def test_the_host_switches_streams_more_seldom_than_it_issues_ops(device: Any) -> None:
    programs = [record_decoder(LAYERS)] * MICRO_BATCHES
    schedule = lower(programs, alternate(programs))
    executor = GeneratedExecutor(schedule, device, EventTable(device))
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        executor.run([(None,)] * MICRO_BATCHES)
        seconds.append(time.perf_counter() - start)
        device.synchronize()  # or the driver's queue fills up, and the host waits for it
    with rigs.count_switches(device) as switches:
        executor.run([(None,)] * MICRO_BATCHES)
    ops = len(schedule.instructions)
    waits = sum(len(step.waits) for step in schedule.instructions) + len(schedule.joins)
    records = sum(step.records for step in schedule.instructions)
    print(
        f"\ndevice {device.name!r}: {median(seconds) * 1e3:.2f} ms of the host a step (median of {STEPS}), "
        f"{median(seconds) / ops * 1e6:.2f} us an op: {ops} ops, {len(switches)} switches of the current stream, "
        f"{records} records, {waits} waits"
    )
    assert len(switches) < ops
