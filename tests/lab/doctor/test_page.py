"""What docs/settings.md shows of the doctor is what it prints."""

from __future__ import annotations

import re

import pytest

from tests.support.surroundings import ROOT, Surroundings

MODEL = str(ROOT / "examples" / "tiny-deepseek")
MISSING = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    """Return the doctor's reports on the page."""
    page = (ROOT / "docs" / "settings.md").read_text().partition("`dbo doctor`\n")[2]
    return re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_report_on_the_page_is_what_doctor_prints(blocks: list[str], serving: Surroundings) -> None:
    command, *shown = blocks[0].splitlines()
    assert command.startswith("$ VLLM_ASCEND_ENABLE_DBO=1 DBO_MARGN=0.05 VLLM_PLUGINS=ascend dbo doctor ")
    printed = serving.run(MODEL, DBO_MARGN="0.05", VLLM_PLUGINS="ascend").stdout.splitlines()
    assert drop_machine(shown) == shorten(drop_machine(printed))


def test_the_lines_on_an_npu_are_what_doctor_prints(blocks: list[str], serving: Surroundings) -> None:
    serving.add("torch_npu", "2.13.0", MISSING)
    assert blocks[1] in serving.run().stdout


def drop_machine(lines: list[str]) -> list[str]:
    """Return the lines from vLLM on: those before have versions and paths of the machine."""
    (first,) = (number for number, line in enumerate(lines) if line.startswith("ok    vLLM "))
    return lines[first:]


def shorten(lines: list[str]) -> list[str]:
    """Return the lines with the first two settings only."""
    settings = [number for number, line in enumerate(lines) if line.endswith(("(environment)", "(default)"))]
    indent = " " * (len(lines[settings[0]]) - len(lines[settings[0]].lstrip()))
    return [*lines[: settings[2]], f"{indent}...", *lines[settings[-1] + 1 :]]
