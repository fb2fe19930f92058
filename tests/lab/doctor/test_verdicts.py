"""The doctor's verdict on a serve command is what the log says when that server is ready.

A few real servers show it end to end. The matrix of layouts, features and settings is asked of engines that are started
with the same words as a server's, which takes a tenth of the time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.cost_file import save_costs
from tests.support.ports import find_free_ports
from tests.support.vllm.engines import TINY, Engines, find_transport
from tests.support.vllm.families import find_backend, make_family
from tests.support.vllm.server import OPTIONS, serve
from tests.support.vllm.verdicts import DATA_PARALLEL, examine_here, start_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TENSOR, STAGES = "--tensor-parallel-size=2", "--pipeline-parallel-size=2"
EXPERTS = f"{DATA_PARALLEL} --enable-expert-parallel"
ALWAYS, OFF, MISFIT = "DBO_MODE=always", "DBO_MODE=off", "DBO_COSTS=misfit.json"
DRAFTS = "--speculative-config=" + json.dumps({"method": "ngram", "num_speculative_tokens": 3}, separators=(",", ":"))
RECORDER = {"kv_connector_module_path": "tests.support.vllm.layer_recorder", "kv_role": "kv_both"}
CONNECTOR = "--kv-transfer-config=" + json.dumps({"kv_connector": "LayerRecorder", **RECORDER}, separators=(",", ":"))
UNKNOWN = "the KV connector is not known to dbo_runtime"
MIXTURE = "not supported yet: LoRA with a mixture of experts"
ACTIVE = ""  # instead of a reason: steps are split
ALONE = "no communication to hide"

SERVERS = [(TENSOR, MISFIT), (STAGES, ALWAYS), (EXPERTS, ALWAYS)]
LAYOUTS = ["", TENSOR, STAGES, f"{TENSOR} --enable-expert-parallel", EXPERTS]
SETTINGS = {
    "": ALONE,
    OFF: "DBO_MODE is off",
    ALWAYS: ACTIVE,
    f"{ALWAYS} DBO_SPLIT=nano DBO_MICRO_BATCHES=3": ACTIVE,
    f"{ALWAYS} DBO_SPLIT=micro DBO_POLICY=staggered:1": ACTIVE,
    f"{ALWAYS} DBO_SIDE=on DBO_CHECK=races": ACTIVE,
    f"{ALWAYS} DBO_DISPATCH=all_to_all": ACTIVE,
    f"{ALWAYS} {MISFIT}": ACTIVE,
    MISFIT: ALONE,
}
FEATURES = [
    (f"{TENSOR} --dtype=float16", ALWAYS, "fp16 needs the decoder layer's own scaling"),
    (f"{TENSOR} {DRAFTS}", ALWAYS, ACTIVE),
    (f"{TENSOR} --runner=pooling", ALWAYS, ACTIVE),
    (f"{TENSOR} --enable-lora", ALWAYS, MIXTURE),
    (f"{TENSOR} --enable-return-routed-experts", ALWAYS, "not supported yet: returning the routed experts"),
    (f"{TENSOR} {CONNECTOR}", ALWAYS, ACTIVE),  # in nano-batches
    (f"{TENSOR} {CONNECTOR}", f"{ALWAYS} DBO_SPLIT=micro", UNKNOWN),
    (f"{TENSOR} {CONNECTOR}", f"{ALWAYS} DBO_KV_CONNECTORS=LayerRecorder", ACTIVE),
]
DENSE = [
    ("LlamaForCausalLM", f"{TENSOR} --enable-lora", ALWAYS, ACTIVE),
    ("LlamaForCausalLM", f"{TENSOR} --enable-lora --fully-sharded-loras", ALWAYS, "fully sharded LoRA"),
    ("LlamaForCausalLM", STAGES, ALWAYS, ACTIVE),
    ("GraniteForCausalLM", TENSOR, ALWAYS, "no adapter is registered"),
    ("GraniteForCausalLM", TENSOR, f"{ALWAYS} DBO_GENERIC=1", ACTIVE),
    ("GraniteForCausalLM", STAGES, f"{ALWAYS} DBO_GENERIC=1", "one rank sums nothing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with costs of another machine, `misfit.json`."""
    folder = tmp_path_factory.mktemp("verdicts")
    save_costs(get_case("r1-tp16-941").table, str(folder / "misfit.json"))
    return folder


@pytest.mark.parametrize(("layout", "setting"), SERVERS)
def test_a_servers_log_says_what_the_doctor_has_said(layout: str, setting: str, folder: Path) -> None:
    settings = list_settings(setting, folder)
    told = ask_doctor(layout.split(), settings)
    with serve(TINY, folder / "log", *layout.split(), **settings) as server:
        log = server.log.read_text()
    compare("FAIL" in told, told, log, lines=2 if layout == STAGES else 1)
    assert ("the costs do not fit this server" in log) is (setting == MISFIT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("setting", "reason"), SETTINGS.items())
def test_an_engines_log_says_what_the_doctor_has_said_in_every_layout(
    layout: str, setting: str, reason: str, engines: Engines, folder: Path, tmp_path: Path
) -> None:
    compare_engine(engines, TINY, layout.split(), setting, reason, folder, tmp_path / "log")


@pytest.mark.parametrize(("layout", "setting", "reason"), FEATURES)
def test_so_it_does_with_other_features_of_vllm(
    layout: str, setting: str, reason: str, engines: Engines, folder: Path, tmp_path: Path
) -> None:
    compare_engine(engines, TINY, layout.split(), setting, reason, folder, tmp_path / "log")


@pytest.mark.parametrize(("architecture", "layout", "setting", "reason"), DENSE)
def test_so_does_that_of_other_models(
    architecture: str, layout: str, setting: str, reason: str, engines: Engines, folder: Path, tmp_path: Path
) -> None:
    model = folder / architecture
    if not model.exists():
        make_family(architecture, model)
    compare_engine(engines, model, layout.split(), setting, reason, folder, tmp_path / "log")


def test_costs_that_an_engine_has_measured_are_used_in_its_own_layout_alone(
    engines: Engines, folder: Path, tmp_path: Path
) -> None:
    measured = f"DBO_COSTS={tmp_path / 'costs.json'}"
    by_costs = ACTIVE if find_transport() == "one host" else ALONE  # over shared memory, costs do not count
    rows = [(TENSOR, f"DBO_CALIBRATE=1 {measured}", by_costs), (TENSOR, measured, by_costs), ("", measured, ALONE)]
    for number, (layout, setting, reason) in enumerate(rows):
        log = tmp_path / f"log{number}"
        compare_engine(engines, TINY, layout.split(), setting, reason, folder, log)
        assert ("the costs do not fit this server: parallel.tensor is 2" in log.read_text()) is (layout != TENSOR)


def compare_engine(
    engines: Engines, model: Path, layout: list[str], setting: str, reason: str, folder: Path, log: Path
) -> None:
    """Compare what the doctor says with what engines log, of which *reason* is a part; it is ACTIVE for none."""
    settings = list_settings(setting, folder)
    backend = "CPU_MLA" if model == TINY else find_backend(model.name)
    words = (str(model), *OPTIONS, f"--attention-backend={backend}", *layout)
    (found,) = engines.run(1, examine_here, words, settings)
    ranks = 2 if DATA_PARALLEL in layout else 1
    engines.run(ranks, start_engine, words, settings, find_free_ports(), log)
    told = "\n".join(text for _, text in found)
    has_failed = any(state == "fail" for state, _ in found)
    assert has_failed is (reason != ACTIVE), told
    compare(has_failed, told, log.read_text(), lines=2 if STAGES in layout else 1)
    assert reason in told


def compare(has_failed: bool, told: str, log: str, lines: int) -> None:
    """Compare the doctor's words with as many lines of the log as there are stages."""
    active, unsplit = log.count("dual-batch overlap is active"), re.findall(r"every step runs unsplit +(.*)", log)
    assert sorted([active, len(unsplit)]) == [0, lines], log
    assert has_failed is bool(unsplit), told
    told = re.sub(r"\s+", " ", told)
    for line in unsplit:
        assert re.sub(r"stage=\w+ +|reason=| +(detail|model)=.*", "", line) in told
    misfit = "the costs do not fit this server"
    assert (misfit in told) is (misfit in log)


def list_settings(setting: str, folder: Path) -> dict[str, str]:
    """Return the variables of a server with settings such as `NAME=VALUE NAME=VALUE`."""
    chosen = dict(each.split("=", 1) for each in setting.split())
    if "DBO_COSTS" in chosen:
        chosen["DBO_COSTS"] = str(folder / chosen["DBO_COSTS"])
    return {
        "VLLM_ASCEND_ENABLE_DBO": "1",
        "DBO_MODE": "auto",  # the engines of other tests have another one
        "DBO_SPLIT": "auto",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **chosen,
    }


def ask_doctor(layout: Sequence[str], settings: dict[str, str]) -> str:
    words = [sys.executable, "-m", "dbo_runtime", "doctor", "--", "vllm", "serve", str(TINY), *OPTIONS, *layout]
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout
