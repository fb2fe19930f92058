"""The GPU kit's parts of the device, from `run.sh` on, over the stand-in for CANN."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rehearsals import check_devices, find_failures, read
from tools.gpu_kit.rehearse import rehearse

ON_DEVICES = ("smoke", "core/measured", "core/races", "frees")  # the other tests of devices run by themselves


@pytest.mark.slow
def test_parts_of_the_device_run_over_the_stand_in(tmp_path: Path) -> None:
    status = rehearse(tmp_path, "npu", list(ON_DEVICES))
    content = read(tmp_path)
    assert find_failures(content) == {}
    assert status == 0
    assert content["machine"]["chip"] == "stand-in for CANN"
    parts = {name: part["results"] for name, part in content["parts"].items()}
    check_devices(parts)
    assert parts["core"]["measured"]["graph"]["equal"] is True
    assert parts["core"]["measured"]["us an instruction of empty ops"]["stream switches"] > 0
    assert parts["core"]["races"]["tests"]["passed"] > 0
