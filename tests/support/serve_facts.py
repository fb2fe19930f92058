"""What the doctor's process reports of a serve command that nothing prevents from being split."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

FACTS: Mapping[str, Any] = MappingProxyType(
    {
        "vllm": "0.30.0",
        "unknown_arguments": [],
        "architecture": "SomeForCausalLM",
        "platform": "npu",
        "parallel": {"tensor": 2, "pipeline": 1, "data": 1, "expert": 1},
        "declines": [],
        "compared": [],
        "no_micro_batches": [],
        "transport": "device",
        "hides_nothing": None,
        "misfit": None,
        "outlooks": [],
        "is_derived": False,
        "unknown_experts": None,
        "hazards": [],
        "takes_host_lengths": False,
        "notes": [],
    }
)
