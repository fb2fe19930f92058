"""Split dummy steps before serving: as a rehearsal, and to reserve memory next to vLLM's KV cache.

If an op fails then, steps are declined, and no request is lost.

An adapter may record without an error, and still read something that this version of vLLM lacks when its ops run. While
vLLM starts, no request is in flight, so all ranks can tell each other how it went. During a request they could not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.observe.declines import warn_declined
from dbo_runtime.observe.logs import open_log
from dbo_runtime.setting_values import Check
from dbo_runtime.vllm_plugin.api.dummy_batches import run_dummy, run_without_attention
from dbo_runtime.vllm_plugin.step.failures import attempt
from dbo_runtime.vllm_plugin.step.warm_up import Phase

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from dbo_runtime.vllm_plugin.step.forward import SplitForward

REQUESTS, REQUEST_TOKENS = 2, 16  # of a rehearsal: its micro-batches are prefills, and fit any runner


def rehearse(runner: GPUModelRunner, served: SplitForward, group: GroupCoordinator) -> None:
    """Split dummy steps, without attention and with it. If one fails, nothing is split. Collective.

    The step with attention is left out if a KV connector has layer hooks, which vLLM's dummy batches do not call. Ops
    run on one lane. So if an op fails on all ranks alike, no rank is left in a collective that another rank's lane has
    dropped.
    """
    tokens = REQUESTS * REQUEST_TOKENS
    if min(runner.max_num_tokens, runner.max_model_len) < tokens or runner.scheduler_config.max_num_seqs < REQUESTS:
        return
    serial = SerialDevice(served.runtime.device)
    own = copy_for_profile(served, serial, group)
    steps: list[Callable[[], object]] = [partial(run_without_attention, runner, tokens)]
    if not served.runtime.keeps_layers:
        steps.append(partial(run_dummy, runner, REQUESTS, REQUEST_TOKENS, 0))
    for step in steps:
        try_split(runner, served, own, step, group)
        if served.decider.refusal is not None:
            return
        own = _copy_for_batch(served, serial, group)


def profile_split(
    runner: GPUModelRunner, served: SplitForward, group: GroupCoordinator, profile_run: Callable[[], None]
) -> int | None:
    """Run vLLM's memory profile unsplit and then split, and let vLLM see the sum; return the reserved bytes.

    The sum counts, because memory of the other lanes stays allocated while an unsplit step runs. If lanes share their
    memory, or vLLM does not size its KV cache by the profile, only vLLM's own profile runs, and the result is None.
    """
    device = served.runtime.device
    if not isinstance(device, StreamDevice) or runner.vllm_config.cache_config.kv_cache_memory_bytes:
        profile_run()
        return None
    own = copy_for_profile(served, device, group)
    reserved = device.reserve(lambda: run_both(runner, served, own, profile_run, group))
    log, statistics = open_log(quiet=group.rank_in_group > 0), own.runtime.statistics
    if statistics.split:
        log.info("vLLM's memory profile includes a split step", reserved=f"{reserved / 2**20:.0f} MiB")
    else:
        reasons = ", ".join(statistics.declined) or "the model did not run"
        log.warning("no memory is reserved for split steps next to the KV cache", reason=reasons)
    return reserved


def run_both(
    runner: GPUModelRunner,
    served: SplitForward,
    own: SplitForward,
    profile_run: Callable[[], None],
    group: GroupCoordinator,
) -> None:
    """Run the profile as it is, and again with the forward *own*. If that fails, nothing is split."""
    profile_run()
    try_split(runner, served, own, profile_run, group)


def try_split(
    runner: GPUModelRunner,
    served: SplitForward,
    own: SplitForward,
    step: Callable[[], object],
    group: GroupCoordinator,
) -> None:
    """Run a dummy step with a copy of the served forward. If it fails, nothing is split. Collective.

    If the step also fails unsplit, the error is vLLM's, and steps may be split.
    """
    model = runner.get_model()

    def run() -> None:
        step()
        served.runtime.device.synchronize()

    served_forward, model.forward = model.forward, own
    try:
        found = attempt(group, "rehearsal", run)
    finally:
        model.forward = served_forward
    if isinstance(found, Decline) and not isinstance(attempt(group, "unsplit rehearsal", run), Decline):
        served.decider.refusal = found
        warn_declined(open_log(quiet=group.rank_in_group > 0), "every step", found)


def copy_for_profile(served: SplitForward, device: Device, group: GroupCoordinator) -> SplitForward:
    """Return a forward of the same model that splits every step on *device*, and compares none."""
    config = served.runtime.config
    mode = "always" if config.mode == "auto" else config.mode  # dummy batches may be below the thresholds
    config = replace(config, mode=mode, check=Check.OFF)  # without attention metadata, results have no meaning
    own = served.copy_for(device, config, group)
    own.phase = Phase.PROFILING
    return own


def _copy_for_batch(served: SplitForward, device: Device, group: GroupCoordinator) -> SplitForward:
    """Return a forward of the same model that decides as in serving, and cuts between the two requests."""
    own = copy_for_profile(served, device, group)
    own.phase = Phase.SERVING
    own.decider.choose_cuts, own.decider.decode_len = _cut_between, 1
    own.decider.choose_sizes = lambda ranks: ((REQUEST_TOKENS,) * len(ranks),) * REQUESTS
    return own


def _cut_between(batch: Batch) -> list[int]:
    return [REQUEST_TOKENS]
