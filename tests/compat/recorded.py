"""Record each registered adapter on the Python classes of a version of vLLM, for which no compiled code is needed.

    python -m tests.compat.recorded --write       # in an environment, or with a PYTHONPATH, of that version

makes each architecture as a tiny model on the CPU, lets its adapter record, and runs what it has recorded without
attention, once, in pieces; of encoders, too. `make record-adapters VLLM=0.33.0` does that for any version, and
`make docs` writes the table of docs/vllm.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from dbo_runtime.adapters.registry import GROUP

RESULTS = Path(__file__).with_name("recorded.json")
RAN, RECORDED, DECLINED, ABSENT, NOT_MADE, FAILED = "ran", "recorded", "declined", "no class", "not made", "fails"
OUTCOMES: Mapping[str, str] = MappingProxyType(
    {
        RAN: "recorded, and its ops ran, in pieces and without attention",
        RECORDED: "recorded; vLLM's own forward does not run there, so its ops were not run",
        DECLINED: "declined by name",
        ABSENT: "this version has no such class, or transformers no such config",
        NOT_MADE: "vLLM does not make the model without compiled code, or not on a CPU",
        FAILED: "the adapter fails",
    }
)
TOKENS, PIECES = 12, 2
ENVIRONMENT = {
    "VLLM_ASCEND_ENABLE_DBO": "0",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "OMP_NUM_THREADS": "1",
}
ACTIVATIONS = ("gelu", "silu", "swigluoai", "fatrelu")  # operators that layers take hold of when they are made
LIMIT = 240.0  # seconds of one architecture


def main() -> None:
    """Record the adapters, print what came of each, and keep it if asked to."""
    parser = argparse.ArgumentParser(description="Record the registered adapters on this version of vLLM's classes.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="all that are registered here")
    parser.add_argument("--write", action="store_true", help=f"keep the outcomes in {RESULTS.name}")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    vllm = import_vllm()
    from tests.registry.coverage import run_forked

    found = {}
    for architecture in arguments.architectures or list_architectures():
        outcome = run_forked(partial(record, architecture), LIMIT)
        if "error" in outcome:
            print(outcome["log"][-3000:], file=sys.stderr)
            outcome = {"what": FAILED, "detail": outcome["error"]}
        outcome = {name: shorten(str(text)) for name, text in outcome.items() if name != "log"}
        found[architecture] = {name: outcome[name] for name in ("what", "detail", "encoder") if outcome.get(name)}
        print(f"vLLM {vllm}, {architecture}: {found[architecture]}", flush=True)
    if arguments.write:
        write_results(vllm, found)


def shorten(text: str) -> str:
    """Return a text in one line, without folders of this machine."""
    return re.sub(r"/\S*/(\S+\.py)", r"\1", " ".join(text.split()))[:300]


def list_architectures() -> list[str]:
    """Return the architectures that this repository has adapters for."""
    return sorted(entry.name for entry in entry_points(group=GROUP) if "dbo_models" in entry.value)


def import_vllm() -> str:
    """Import vLLM as its CPU build is, also where it has no compiled code, and return its version."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()
    _allow_latent_attention(CpuPlatform)
    _stand_in_for_compiled_code()
    import vllm

    return str(vllm.__version__).partition("+")[0]


def _allow_latent_attention(platform: Any) -> None:
    """Let latent attention be made where this version's CPU build has none; it is not run."""
    original = platform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, *args: Any, **kwargs: Any) -> str:
        try:
            return str(original(cls, *args, **kwargs))
        except NotImplementedError as error:
            name = "flashmla_sparse.FlashMLASparseBackend" if "parse" in str(error) else "triton_mla.TritonMLABackend"
            return f"vllm.v1.attention.backends.mla.{name}"

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    with suppress(ImportError):  # its prefill takes hold of a kernel
        from vllm.v1.attention.backends.mla.prefill import flash_attn

        flash_attn.flash_attn_varlen_func = partial(_miss, "flash_attn_varlen_func")


def _stand_in_for_compiled_code() -> None:
    """Let layers take hold of operators that are not compiled here: they fail when they are called."""
    from torch._ops import _OpNamespace

    original = _OpNamespace.__getattr__

    def get_operator(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if self.name != "_C" or not name.startswith(ACTIVATIONS):  # others are asked whether they are there
                raise
            return partial(_miss, f"{self.name}.{name}")

    _OpNamespace.__getattr__ = get_operator


def _miss(name: str, *_: object, **__: object) -> None:
    raise NotImplementedError(f"{name} is not compiled here")


def write_results(vllm: str, found: dict[str, Any]) -> None:
    """Keep the outcomes of a version; those of other versions, and of architectures that were not tried, stay."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    kept = results.get(vllm, {}).get("architectures", {})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    results[vllm] = {"date": today, "architectures": dict(sorted({**kept, **found}.items()))}
    ordered = dict(sorted(results.items(), key=lambda item: [int(part) for part in item[0].split(".")]))
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def record(architecture: str) -> dict[str, str]:
    """Return what comes of one architecture."""
    import torch
    from vllm.model_executor.models.registry import ModelRegistry

    if architecture not in ModelRegistry.models:
        return {"what": ABSENT, "detail": "vLLM"}
    with TemporaryDirectory() as folder:
        try:
            path = make_folder(architecture, Path(folder, "model"))
        except (KeyError, ValueError, ImportError, AttributeError) as error:
            return {"what": ABSENT, "detail": f"transformers: {type(error).__name__}: {error}"}
        try:
            vllm_config = make_config(path, architecture)
        except Exception as error:  # noqa: BLE001 - whatever this version lacks here
            return {"what": NOT_MADE, "detail": f"{type(error).__name__}: {error}"}
        torch.set_grad_enabled(False)
        with joined(vllm_config):
            return record_in(architecture, vllm_config)


def record_in(architecture: str, vllm_config: Any) -> dict[str, str]:
    """Return what comes of one architecture in a world of one rank."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model

    from dbo_runtime.decline import Decline
    from dbo_runtime.lab.verify.verification import fill_weights
    from dbo_runtime.vllm_plugin.api.model_classes import find_adapter

    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        model: Any = initialize_model(vllm_config)
    except Exception as error:  # noqa: BLE001 - whatever this version lacks here
        return {"what": NOT_MADE, "detail": f"{type(error).__name__}: {error}"}
    fill_weights(model)
    for module in model.modules():
        with suppress(Exception):  # of compiled code that is not there: vLLM's own forward will not run, either
            module.quant_method.process_weights_after_loading(module)
    adapter = find_adapter(architecture)
    assert adapter is not None, "it is registered"
    collectives = make_collectives(vllm_config)
    declined = adapter.decline(model)
    found = declined or run_program(adapter, model, collectives, vllm_config)
    encoder = record_encoder_of(model, vllm_config, collectives)
    if isinstance(found, Decline):
        return {"what": DECLINED, "detail": str(found), "encoder": encoder}
    return {"what": RECORDED if found else RAN, "detail": found, "encoder": encoder}


def make_collectives(vllm_config: Any) -> Any:
    """Return the communication of the one rank."""
    from dbo_runtime.vllm_plugin.api.groups import get_groups
    from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    groups = get_groups(vllm_config)
    return ModelCollectives(get_platform("cpu"), groups.tensor_parallel, groups.data_parallel)


def run_program(adapter: Any, model: Any, collectives: Any, vllm_config: Any) -> Any:
    """Record a model's program, and run it without attention; return a decline, or what `run_in_pieces` does."""
    import torch
    from vllm.forward_context import set_forward_context

    from dbo_runtime.adapters.contract import INPUT_IDS, POSITIONS, InputAdapter, X, record_program
    from dbo_runtime.decline import Decline

    program = record_program(adapter, model, collectives)
    if isinstance(program, Decline):
        return program
    positions = torch.arange(TOKENS)
    positions = positions.expand(3, -1) if vllm_config.model_config.uses_mrope else positions
    given = {POSITIONS: positions, INPUT_IDS: torch.arange(TOKENS)}
    inputs = {value.name: given[value.name] for value in program.inputs if value.name in given}
    with set_forward_context(None, vllm_config, num_tokens=TOKENS):
        x = model.embed_input_ids(torch.arange(TOKENS))
        inputs[X] = adapter.take_inputs(model, x, False) if isinstance(adapter, InputAdapter) else x
        own = partial(model.forward, torch.arange(TOKENS), positions, None, x.clone())
        return run_in_pieces(program, inputs, own, [slice(0, 5), slice(5, TOKENS)])


def record_encoder_of(model: Any, vllm_config: Any, collectives: Any) -> str:
    """Return what comes of the vision encoder of a model; empty if it has none."""
    import torch
    from vllm.forward_context import set_forward_context

    from dbo_runtime.decline import Decline
    from dbo_runtime.vllm_plugin.encoder.program import record_encoder
    from dbo_runtime.vllm_plugin.platforms.registry import get_platform

    if vllm_config.model_config.multimodal_config is None:
        return ""
    found = record_encoder(model, vllm_config, get_platform("cpu"), collectives)
    if isinstance(found, Decline):
        return f"{DECLINED}: {found}"
    values = found.module.patch_embed.proj.weight[0].numel()
    pixels, grids = torch.randn(32, values), [[1, 4, 4], [1, 4, 4]]
    pieces, images = [slice(0, 16), slice(16, 32)], [slice(0, 1), slice(1, 2)]
    own = partial(found.module.forward, pixels.clone(), grids)
    with set_forward_context(None, vllm_config):
        needs = run_in_pieces(found.program, {"pixels": pixels, "grids": grids}, own, pieces, images)
    return f"{RECORDED}: {needs}" if needs else RAN


def run_in_pieces(
    program: Any,
    inputs: dict[str, Any],
    own: Callable[[], object],
    pieces: Sequence[slice],
    requests: Sequence[slice] | None = None,
) -> str:
    """Run a program on pieces of inputs; return why vLLM's *own* forward does not run here either, empty if it does."""
    from dbo_runtime.lab.verify.watched_run import run_ops

    try:
        own()
    except Exception as error:  # noqa: BLE001 - whatever this build of vLLM lacks
        return f"{type(error).__name__}: {error}"[:200]
    for number, piece in enumerate(pieces):
        run_ops(program, program.cut_inputs(inputs, piece, piece if requests is None else requests[number]))
    return ""


def make_folder(architecture: str, folder: Path) -> Path:
    """Write the config of a tiny model, and what vLLM wants to have besides."""
    from tests.registry.tiny_configs import make_config as make_text
    from tests.support.ascend import deepseek_v4, deepseek_v41, glm5_next, kimi_k3, minimax
    from tests.support.vllm import multimodal_families, vision_families

    makers = {
        vision_families.KIMI: vision_families.make_kimi,
        multimodal_families.INTERNVL: partial(multimodal_families.make_internvl, language="Qwen2ForCausalLM"),
        multimodal_families.OMNI: multimodal_families.make_omni,
        **{name: partial(vision_families.make_vision_family, name) for name in VISION},
    }
    if architecture in makers:
        return Path(makers[architecture](folder))
    own = {
        "MiniMaxM3SparseForConditionalGeneration": minimax.CONFIG,
        "DeepseekV4ForCausalLM": deepseek_v4.CONFIG,
        "DeepseekV4ForConditionalGeneration": {**deepseek_v4.CONFIG, **deepseek_v4.VISION},
        "DeepseekV41ForCausalLM": deepseek_v41.CONFIG,
        "Glm5NextForCausalLM": glm5_next.CONFIG,
        "Glm5NextForConditionalGeneration": glm5_next.CONFIG,
        "KimiK3ForConditionalGeneration": kimi_k3.CONFIG,
    }
    folder.mkdir()
    content = own[architecture] if architecture in own else make_text(architecture)
    if architecture.startswith("Cohere"):
        content = {**content, "tie_word_embeddings": True}  # which vLLM 0.23 insists on
    (folder / "config.json").write_text(json.dumps({**content, "architectures": [architecture]}), encoding="utf-8")
    return folder


VISION = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def make_config(folder: Path, architecture: str) -> Any:
    """Return vLLM's configuration of the model in *folder*, without custom kernels."""
    from unittest.mock import patch

    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    options: dict[str, Any] = {"compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    if architecture == "InternVLChatModel":
        options["trust_remote_code"] = True
    arguments = EngineArgs(
        str(folder),
        skip_tokenizer_init=not any(folder.glob("tokenizer*")),
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 26,
        **options,
    )
    with patch.object(registry, "_run_in_subprocess", lambda job: job()):
        return arguments.create_engine_config()


@contextmanager
def joined(vllm_config: Any) -> Iterator[None]:
    """Be the only rank of vLLM's world."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with TemporaryDirectory() as folder, set_current_vllm_config(vllm_config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        with suppress(ImportError):  # which 0.23 does not have
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("cpu"))
        yield


if __name__ == "__main__":
    main()
