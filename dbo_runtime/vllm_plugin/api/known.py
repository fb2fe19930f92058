"""What is known and proven: plain constants, which the doctor reads without vLLM and without torch."""

from __future__ import annotations

KNOWN_VLLM_VERSIONS = ("0.30.",)
"""Beginnings of vLLM's versions that this package was read against and tested with."""

KNOWN_ASCEND_VERSIONS = ("0.30.0rc2",)
"""Versions of vllm-ascend of which split steps have been compared with unsplit ones."""

KNOWN_ASCEND_MODELS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Models of which split steps have been compared with unsplit ones on vllm-ascend."""

MOE_METHODS = ("UnquantizedFusedMoEMethod",)
"""Classes of vLLM's that apply the weights of experts by calling the kernel, and do nothing else."""
