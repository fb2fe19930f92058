"""What a process on the stand-in is given when it starts, and how it ends."""

from __future__ import annotations

from pathlib import Path

from tests.support.standin.streams import run_script


def test_devices_are_as_many_as_asked_for(standin_folder: Path) -> None:
    told = run_script(
        "streams = [torch.npu.Stream(device=0), torch.npu.Stream(device=1)]\n"
        "tensors = [torch.full((1 << 20,), 1.0 + i, device=f'npu:{i}') for i in range(2)]\n"
        "print(torch.npu.device_count(), [tensor.sum().item() for tensor in tensors])\n"
        "print([torch.npu.memory_allocated(i) >> 20 for i in range(2)], [s.device.index for s in streams])\n",
        NPU_STANDIN_DEVICES="2",
    )
    assert told.splitlines()[-2:] == [
        f"2 [{float(1 << 20)}, {float(2 << 20)}]",
        "[4, 4] [0, 1]",
    ]


def test_a_process_ends_well_while_a_stream_still_works(standin_folder: Path) -> None:
    told = run_script(
        "value = torch.ones(4, device='npu')\n"
        "standin.delay('Adds', 0.2)\n"
        "with torch.npu.stream(torch.npu.Stream()):\n"
        "    others = [value + 1 for _ in range(3)]\n"
        "print('end')\n"
    )
    assert told.endswith("end\n")


def test_a_stream_that_is_never_released_fails_in_time(standin_folder: Path) -> None:
    told = run_script(
        "from tests.standin.cann.gate import StreamGate\n"
        "stream = torch.npu.Stream()\n"
        "StreamGate().hold(stream)\n"
        "try:\n"
        "    stream.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "StreamGate().hold(stream)\n",  # and so does the one that is held when the process ends
        NPU_STANDIN_WAIT_SECONDS="0.5",
    )
    assert "the value was not written within NPU_STANDIN_WAIT_SECONDS" in told
