"""Operators are queued: they compute when their stream comes to them, and again in replays of graphs."""

from __future__ import annotations

import pytest
import torch
from standin_ascend.kernels import view_on_host

from tests.standin.cann.cann import StandIn
from tests.standin.cann.gate import StreamGate
from tests.support.ascend.operators.cases import CASES, DECODE, Case, decode_into, name_case
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    HALF,
    assert_equal,
    assert_near,
    make_generator,
    put,
)
from tests.support.ascend.operators.decodes import make_decode
from tests.support.standin.streams import make_streams, run_script

pytestmark = ANY_FORMAT

REGISTER = "import sys\nsys.stderr = sys.stdout\nfrom standin_ascend import operators\noperators.register()\n"
NORM = "torch.ops._C_ascend.npu_add_rms_norm_bias(x, x, torch.ones(4, device='npu'))"


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_an_operator_computes_when_its_stream_comes_to_it(gate: StreamGate, case: Case) -> None:
    early, late = (case.make(make_generator(seed)) for seed in (1, 2))
    tensors, stream = put(*early), torch.npu.current_stream()
    torch.npu.synchronize()
    gate.hold(stream)
    found = case.run(tensors)
    assert not stream.query()
    for tensor, value in zip(tensors, late, strict=True):
        view_on_host(tensor).copy_(value)  # the host reaches what on an NPU it would not
    gate.open()
    torch.npu.synchronize()
    assert_equal(found, case.run(put(*late)))


def test_a_result_is_not_there_before_its_stream_goes_on(gate: StreamGate) -> None:
    """A reader that does not wait reads what was there before."""
    stream, waiting, hasty = make_streams(3)
    *tensors, out = put(*DECODE.list_tensors(), torch.full((4, 2, 1, 16), ABSENT, dtype=HALF))
    torch.npu.synchronize()
    gate.hold(stream)
    with torch.npu.stream(stream):
        decode_into(*tensors, out)
    waiting.wait_stream(stream)
    with torch.npu.stream(waiting):
        late = out.clone()
    with torch.npu.stream(hasty):
        early = out.clone()
    hasty.synchronize()
    assert not waiting.query()
    assert (view_on_host(out) == ABSENT).all()
    gate.open()
    torch.npu.synchronize()
    assert (early == ABSENT).all()
    assert_near(late, DECODE.expect())


@pytest.mark.parametrize("case", CASES, ids=name_case)
def test_a_replay_computes_from_the_inputs_of_its_time(standin: StandIn, case: Case) -> None:
    tensors = put(*case.make(make_generator(0)))
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        found = case.run(tensors)
    for seed in (1, 2, 1):
        fresh = case.make(make_generator(seed))
        for tensor, value in zip(tensors, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.npu.synchronize()
        assert_equal(found, case.run(put(*fresh)))


def test_an_update_gives_later_replays_other_lengths(standin: StandIn) -> None:
    """As vllm-ascend's decodes have it: their lengths are not tensors."""
    longest, (stream, updater) = make_decode(1, [15, 9]), make_streams(2)
    tensors = put(*longest.list_tensors(), torch.empty(4, 2, 1, 16, dtype=HALF))
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        torch.npu.graph_task_group_begin(stream)
        out = decode_into(*tensors, actual_seq_kvlen=[1, 1])
        group = torch.npu.graph_task_group_end(stream)
    for lengths in ((15, 9), (4, 8), (0, 5)):
        with torch.npu.stream(updater):
            torch.npu.graph_task_update_begin(updater, group)
            decode_into(*tensors, actual_seq_kvlen=list(lengths))
            torch.npu.graph_task_update_end(updater)
        updater.synchronize()
        graph.replay()
        torch.npu.synchronize()
        latents, ropes = (
            [part[:length] for part, length in zip(parts, lengths, strict=True)]
            for parts in (longest.latents, longest.ropes)
        )
        assert_near(out, longest._replace(latents=latents, ropes=ropes).expect())


@pytest.mark.parametrize("case", [case for case in CASES if case.is_described], ids=name_case)
def test_results_have_the_shapes_and_types_that_torch_npu_foresees(standin: StandIn, case: Case) -> None:
    made = case.make(make_generator(0))
    expected = case.run([tensor.to("meta") for tensor in made])
    found = case.run(put(*made))
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]


def test_a_kernel_that_fails_shows_when_its_stream_is_synchronized(standin: StandIn) -> None:
    told = run_script(
        REGISTER + "cache = torch.ones(2, 4, 1, 8, device='npu')\n"
        "table = torch.full((1, 1), 9, dtype=torch.int32, device='npu')\n"
        "lengths = torch.full((1,), 3, dtype=torch.int32, device='npu')\n"
        "out = torch.empty(3, 1, 8, device='npu')\n"
        "torch_npu.npu_gather_pa_kv_cache(cache, cache, table, lengths, out, out)\n"
        "print('queued')\n"
        "try:\n"
        "    torch.npu.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print('raised', error)\n"
        "x = torch.ones(2, 4, device='npu')\n"
        f"print('and then', {NORM}[2].sum().item())\n",  # all is well again
        STANDIN_ASCEND="",
    )
    assert "queued" in told
    assert "kernel GatherPaKvCache failed" in told.partition("raised")[2]
    assert "IndexError" in told  # of the kernel, with a traceback that says where
    assert told.endswith("and then 16.0\n")


def test_a_process_ends_well_while_kernels_are_queued(standin: StandIn) -> None:
    told = run_script(
        REGISTER + "x = torch.ones(2, 4, device='npu')\n"
        "standin.delay('AddRmsNormBias', 0.1)\n"
        "with torch.npu.stream(torch.npu.Stream()):\n"
        f"    kept = [{NORM} for _ in range(3)]\n"
        f"kept += [{NORM} for _ in range(3)]\n"
        "print('end')\n"
    )
    assert told.endswith("end\n")
