"""Print facts that need an import of torch, torch_npu or vLLM. Run it in a separate process: an import may crash.

    python -m dbo_runtime.lab.doctor.probe torch

prints the facts as JSON, in one line that begins with `MARK`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dbo_runtime.errors import ConfigError, DeviceError

MARK = "dbo_runtime.doctor:"
SUBJECTS = ("torch", "torch_npu", "vllm", "classes", "serve")


def probe_torch() -> dict[str, Any]:
    """Return torch's version and its number of GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"version": torch.__version__, "gpus": [torch.cuda.get_device_name(gpu) for gpu in range(count)]}


def probe_torch_npu() -> dict[str, Any]:
    """Return the NPUs that torch_npu finds, or why there are none and whether it can be imported."""
    from dbo_runtime.devices.npu import REMEDY, import_npu

    try:
        npu = import_npu()
    except DeviceError as error:
        why = f"{error.__cause__ or error}".removesuffix(f"; {REMEDY}.")
        return {"error": why, "remedy": REMEDY, "imported": "torch_npu" in sys.modules}
    return {"npus": [npu.get_device_name(number) for number in range(npu.device_count())]}


def probe_vllm() -> dict[str, Any]:
    """Return the platform that vLLM serves on, and why steps of this vLLM version are not split, if so."""
    from dbo_runtime.vllm_plugin.api.identity import get_device_type
    from dbo_runtime.vllm_plugin.api.versions import check_version

    decline = check_version()
    return {"platform": get_device_type(), "unknown": None if decline is None else str(decline)}


def probe_classes(architecture: str) -> dict[str, Any]:
    """Return the names of the vLLM class that serves an architecture, and of its base classes."""
    from dbo_runtime.vllm_plugin.api.model_classes import list_classes

    return {"classes": list_classes(architecture)}


def probe_serve(*arguments: str) -> dict[str, Any]:
    """Return how vLLM interprets these arguments of `vllm serve`, and all reasons against splitting steps."""
    from dbo_runtime.config import read_environment
    from dbo_runtime.lab.doctor.expectation import (
        check_costs,
        find_unknown_experts,
        list_outlooks,
        predict_decline,
        predict_transport,
    )
    from dbo_runtime.lab.start.arguments import make_known_config
    from dbo_runtime.lab.start.released_options import find_releases
    from dbo_runtime.vllm_plugin.api.features import takes_host_lengths
    from dbo_runtime.vllm_plugin.api.identity import get_device_type, list_parallel_sizes
    from dbo_runtime.vllm_plugin.api.model_classes import is_derived
    from dbo_runtime.vllm_plugin.api.versions import get_version
    from dbo_runtime.vllm_plugin.install.config_checks import choose_adapter, find_decline, list_declines
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    vllm_config, unknown = make_known_config(arguments)
    config = read_environment(os.environ)
    found = list(list_declines(vllm_config, config, choose_adapter(vllm_config)))
    # A model that is declined anyway is told all reasons; otherwise those against micro-batches leave nano-batches.
    declines = [] if find_decline(found, config) is None else found
    hides_nothing = None if declines else predict_decline(vllm_config, config)
    has_file = bool(config.costs) and not config.calibrate
    misfit = check_costs(vllm_config, config) if has_file else None
    platform = get_platform()
    is_planned = has_file and misfit is None and not declines and hides_nothing is None
    return {
        "vllm": get_version(),
        "unknown_arguments": [(name, find_releases(name)) for name in unknown],
        "architecture": vllm_config.model_config.architecture,
        "platform": get_device_type(),
        "parallel": list_parallel_sizes(vllm_config),
        "declines": [str(decline) for decline in declines],
        "compared": [] if declines or config.check else list(platform.list_compared(vllm_config)),
        "no_micro_batches": [] if declines else [str(decline) for decline in found],
        "transport": predict_transport(vllm_config),
        "hides_nothing": None if hides_nothing is None else str(hides_nothing),
        "misfit": misfit,
        "outlooks": list_outlooks(vllm_config, config) if is_planned else [],
        "is_derived": not declines and is_derived(vllm_config.model_config.architecture),
        "unknown_experts": None if declines else find_unknown_experts(vllm_config),
        "hazards": list(platform.list_hazards(vllm_config)),
        "takes_host_lengths": takes_host_lengths(vllm_config) and platform.get_encoder_attention() is not None,
        "notes": list(platform.describe(vllm_config)),
    }


_PROBES: Mapping[str, Callable[..., dict[str, Any]]] = MappingProxyType(
    dict(zip(SUBJECTS, (probe_torch, probe_torch_npu, probe_vllm, probe_classes, probe_serve), strict=True))
)


def find_facts(subject: str, *arguments: str) -> dict[str, Any]:
    """Return the facts about a subject, or as `error` what was raised instead. Never raises."""
    try:
        return _PROBES[subject](*arguments)
    except ConfigError as error:
        return {"error": str(error)}
    except ModuleNotFoundError as error:
        return {"error": f"{type(error).__name__}: {error}", "missing": error.name}
    except BaseException as error:  # noqa: BLE001 - any error is a fact, too
        return {"error": f"{type(error).__name__}: {error}"}


def main(subject: str, *arguments: str) -> None:
    """Print the facts about a subject, or the error raised instead."""
    sys.stdout.write(f"\n{MARK}{json.dumps(find_facts(subject, *arguments))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
