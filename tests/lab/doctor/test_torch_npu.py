"""What doctor says of the real torch_npu where its libraries are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.support.surroundings import ROOT

ON = {"VLLM_ASCEND_ENABLE_DBO": "1"}


@pytest.mark.skipif(find_spec("torch_npu") is None or "ASCEND_HOME_PATH" in os.environ, reason="torch_npu without CANN")
def test_the_real_torch_npu_without_cann_is_a_finding() -> None:
    words = [sys.executable, "-m", "dbo_runtime", "doctor"]
    env = {name: text for name, text in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(words, env={**env, **ON}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "FAIL  torch_npu" in done.stdout
    assert "cannot open shared object file" in " ".join(done.stdout.split())
