"""Files and documents on deploying: YAML that parses and names our settings, and Dockerfiles that a linter accepts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dbo_runtime.config import list_settings
from tools.write_docs import list_documents

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
HADOLINT = Path(sys.executable).with_name("hadolint")
VARIABLES = {setting.variable for setting in list_settings()}


def list_blocks() -> Iterator[Any]:
    """Yield each block of YAML in the documents, with where it is."""
    for document in list_documents():
        blocks = re.findall(r"^```yaml\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
        yield from (pytest.param(block, id=f"{document.name} {number}") for number, block in enumerate(blocks))
    yield pytest.param((DEPLOY / "values.yaml").read_text(), id="values.yaml")


def find_variables(node: Any) -> Iterator[tuple[str, object]]:
    """Yield names and values of all environment variables in a manifest."""
    if isinstance(node, list):
        for each in node:
            yield from find_variables(each)
    elif isinstance(node, dict):
        yield from ((each["name"], each["value"]) for each in node.get("env", []))
        yield from find_variables(list(node.values()))


@pytest.mark.parametrize("block", list(list_blocks()))
def test_yaml_parses_and_sets_variables_of_ours_to_text(block: str) -> None:
    variables = dict(find_variables(yaml.safe_load(block)))
    assert {name for name in variables if "DBO" in name} <= VARIABLES
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes text only"


def test_the_page_and_the_file_set_the_two_variables() -> None:
    blocks = {each.id: dict(find_variables(yaml.safe_load(each.values[0]))) for each in list_blocks()}
    assert blocks["values.yaml"] == {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_COSTS": "/costs/costs.json"}
    assert blocks["deploy.md 0"] == blocks["values.yaml"]


def test_volumes_that_are_mounted_are_there() -> None:
    (model,) = yaml.safe_load((DEPLOY / "values.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    volumes = {volume["name"] for volume in model["extraVolumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in model["extraVolumeMounts"]}
    assert set(mounts) == volumes
    environment = dict(find_variables(model))
    assert str(environment["DBO_COSTS"]).startswith(f"{mounts['costs']}/")
    assert model["modelURL"].startswith(f"{mounts['models']}/")


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda file: file.name)
def test_a_linter_finds_nothing_in_dockerfiles(file: Path) -> None:
    done = subprocess.run([str(HADOLINT), str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("Dockerfile.*")), ids=lambda file: file.name)
def test_what_dockerfiles_copy_is_there(file: Path) -> None:
    copied = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", file.read_text(), re.MULTILINE)
    assert copied
    assert all((ROOT / name).exists() for names in copied for name in names.split())


def test_the_linter_finds_mistakes(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp\n")
    done = subprocess.run([str(HADOLINT), str(tmp_path / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode != 0
