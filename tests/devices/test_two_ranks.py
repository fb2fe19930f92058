"""Two ranks that all-reduce through torch_npu's ProcessGroupHCCL, split and unsplit, over the stand-in for CANN."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not installed here: `make test-npu` has it", allow_module_level=True)

from tests.standin.cann import cann
from tests.support.devices import rigs
from tests.support.devices.tensor_parallel import compare_split_and_unsplit, find_streams_of_collectives
from tests.support.standin.npu_ranks import Ranks


def test_split_and_unsplit_agree_at_every_cut_and_compute_is_concurrent_to_the_all_reduce(
    tmp_path: Path, record_property: Any
) -> None:
    record_property("device", "npu")
    rigs.prepare("npu")
    if cann.load() is None:
        pytest.skip("a real CANN is here: it keeps no trace for us")
    with Ranks(2, tmp_path) as ranks:
        streams = ranks.run(find_streams_of_collectives)
        answers = ranks.run(compare_split_and_unsplit, timeout=240)
    assert all(len(set(found)) == 1 for found in streams)  # so lanes that avoid it once avoid it for good
    for answer in answers:
        assert max(answer["relative_error"].values()) < 1e-5, answer["relative_error"]
        assert not set(answer["lanes"]) & set(answer["collectives"])
        assert not [name for name in answer["concurrent"]["unsplit"] if not name.startswith("Memcpy")]
    # Which kernels meet a reduce is the machine's matter; that some do on either rank is ours.
    concurrent = {name for answer in answers for name in answer["concurrent"]["split"] if not name.startswith("Memcpy")}
    assert "Matmul" in concurrent, concurrent
