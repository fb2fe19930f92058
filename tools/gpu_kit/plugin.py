"""A plugin of vLLM's for measurements of the kit, never for serving: it is not installed with this package.

GPU_KIT_PROVEN=1   splits on CUDA without DBO_CHECK, with either model runner, whatever is still to be proven.
GPU_KIT_LINK=SHARE lets each all-reduce of a dense model on one rank send SHARE times its tensor to the host and back,
                   in unsplit steps as in split ones: a link that takes no multiprocessor in place of a second GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dbo_runtime.setting_sources import is_enabled

PROVEN, LINK = "GPU_KIT_PROVEN", "GPU_KIT_LINK"


def register() -> None:
    """Do what the variables say; vLLM calls it in each of its processes, also more than once."""
    if not is_enabled(os.environ):
        return
    if os.environ.get(PROVEN) == "1":
        call_proven()
    if LINK in os.environ:
        put_link(Link(float(os.environ[LINK])))


def call_proven() -> None:
    """Let the platform split all that it supports, and compare nothing by itself: parts of the kit compare, or time."""
    from dbo_runtime.vllm_plugin.platforms.cuda import CudaPlatform

    replace(CudaPlatform, "check_version", lambda self: None)
    replace(CudaPlatform, "list_unproven", lambda self, vllm_config: iter(()))
    replace(CudaPlatform, "check_encoder", lambda self, encoder: None)
    replace(CudaPlatform, "compares_first_steps", False)


class Link:
    """Sends a tensor to the host and back on the current stream, in order; its values stay.

    Args:
        share: of the tensor's rows that are sent; with more than 1, some are sent again.

    Attributes:
        is_held: whether what would reduce is called without its reduce.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.is_held = False
        self._hosts: dict[int, Any] = {}

    def send(self, x: Any) -> Any:
        """Send *x* [tokens, hidden], and return it."""
        rows = int(x.shape[0] * self.share)
        while rows > 0:
            part = x[: min(rows, x.shape[0])]
            rows -= part.shape[0]
            there = self._get_host(part)
            there.copy_(part, non_blocking=True)
            part.copy_(there, non_blocking=True)
        return x

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Return a context manager in which nothing is sent by what would reduce."""
        before, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = before

    def _get_host(self, part: Any) -> Any:
        """Return memory of the host for a tensor: each stream has its own, which its copies use in order."""
        import torch

        stream = torch.cuda.current_stream().stream_id if part.is_cuda else 0
        host = self._hosts.get(stream)
        if host is None or host.dtype != part.dtype or host.numel() < part.numel():
            host = self._hosts[stream] = torch.empty(part.numel(), dtype=part.dtype, pin_memory=part.is_cuda)
        return host[: part.numel()].view(part.shape)


def put_link(link: Link) -> None:
    """Let all that reduces over ranks send over a link instead. The model has one rank, so there is nothing to sum."""
    from vllm.model_executor.layers.linear import RowParallelLinear

    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    if getattr(RowParallelLinear.forward, "is_linked", False):
        return
    forward = RowParallelLinear.forward

    def forward_and_send(self: Any, *arguments: Any, **options: Any) -> Any:
        out = forward(self, *arguments, **options)
        if self.reduce_results and not link.is_held:
            link.send(out[0] if isinstance(out, tuple) else out)
        return out

    def without_reduce(self: Any, module: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with link.hold():
                return module(*arguments)

        return run

    forward_and_send.is_linked = True  # type: ignore[attr-defined]
    replace(RowParallelLinear, "forward", forward_and_send)
    replace(ModelCollectives, "without_reduce", without_reduce)
    replace(ModelCollectives, "all_reduce", lambda self, partial: link.send(partial.contiguous()))
    replace(type(get_platform()), "get_transport", lambda self, groups, hosts: "device")


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace what *owner* has under a name: that there is such a name is checked, or a change of vLLM would be silent.

    Raises:
        AttributeError: if there is none.
    """
    getattr(owner, name)
    setattr(owner, name, value)
