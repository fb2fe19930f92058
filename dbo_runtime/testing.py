"""For tests of adapters: verify that a program computes what the model does. See docs/write-an-adapter.md.

Importing this module imports vLLM.
"""

from dbo_runtime.vllm_plugin.verify.comparing_forward import Mismatch, Verification
from dbo_runtime.vllm_plugin.verify.verification import verify_adapter

__all__ = ["Mismatch", "Verification", "verify_adapter"]
