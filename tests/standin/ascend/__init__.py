"""What the Python of vllm-ascend needs besides the real torch_npu, for tests without an NPU.

vLLM loads it as a plugin in each of its processes. It does nothing unless STANDIN_ASCEND is set.
"""

from __future__ import annotations

import os


def register() -> None:
    """Put stubs and operators in place; once for each process."""
    if os.environ.get("STANDIN_ASCEND"):
        from standin_ascend import absences, operators

        absences.fill()
        operators.register()
