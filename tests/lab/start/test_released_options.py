"""Which releases of vLLM know an option."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from dbo_runtime.lab.start.released_options import DATA, compare_releases, find_releases, list_options


@pytest.mark.parametrize(
    ("name", "releases"),
    [
        ("--max-long-partial-prefills", ("0.23.0",)),
        ("max_long_partial_prefills", ("0.23.0",)),
        ("scheduler_config.max_long_partial_prefills", ("0.23.0",)),
        ("--seed", ()),  # known to all
        ("--known-to-none", ()),
    ],
)
def test_an_option_that_came_or_went_has_its_releases(name: str, releases: tuple[str, ...]) -> None:
    assert find_releases(name) == releases


def test_options_are_read_from_the_source(tmp_path: Path) -> None:
    for name, text in {
        "config/cache.py": "class CacheConfig:\n    size: int = 1\n    def f(self): x: int = 2",
        "engine/arg_utils.py": "class EngineArgs:\n    block_size: int = 1\nadd('--written', help='--no option')",
        "entrypoints/common/cli_args.py": "class FrontendArgs:\n    port: int = 1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert list_options(tmp_path) == {"size", "--block-size", "--written", "--port"}


def test_only_what_some_releases_lack_is_kept() -> None:
    assert compare_releases({"1": {"a", "b"}, "2": {"b", "c"}}) == {"a": ["1"], "c": ["2"]}


@pytest.mark.vllm
def test_the_stored_options_are_those_of_the_installed_release() -> None:
    import vllm

    stored = json.loads(DATA.read_text(encoding="utf-8"))
    release = version("vllm").partition("+")[0]
    assert release in stored["releases"]
    has = list_options(Path(vllm.__file__).parent)
    assert {name for name, releases in stored["options"].items() if release in releases} == stored[
        "options"
    ].keys() & has
