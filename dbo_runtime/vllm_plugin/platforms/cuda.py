"""The platform of NVIDIA GPUs: the defaults, on which no split step of vLLM has been compared yet."""

from __future__ import annotations

from dbo_runtime.vllm_plugin.platforms.platform import Platform


class CudaPlatform(Platform):
    """NVIDIA GPUs."""

    has_device = True
