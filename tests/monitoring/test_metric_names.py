"""Names, units and help of what is exported, by the rules of `promtool check metrics`.

No library on PyPI has them: they are those of Prometheus's own `promlint`, in Go. So prometheus_client's parser of
OpenMetrics, which is strict, reads what is exported, and the rules of `promlint` follow, one a test. Where promtool is
on the path, it checks as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dbo_runtime.observe.counts import HELP, PREFIX
from tests.support.monitoring.exported import Family, read_families

PROMTOOL = shutil.which("promtool")
# promlint's: no other unit but the base units, and those never abbreviated.
OTHER_UNITS = "minutes|hours|days|weeks|milliseconds|microseconds|nanoseconds|ms|us|ns|sec|s|kb|mb|gb|kilobytes|percent"
TYPES = "counter|gauge|histogram|summary|untyped"


def test_everything_that_is_declared_is_exported(families: dict[str, Family]) -> None:
    assert set(families) == {PREFIX + name for name in HELP}


def test_every_metric_has_a_help_text_that_is_a_sentence(families: dict[str, Family]) -> None:
    assert [family.name for family in families.values() if not re.fullmatch(r"[A-Z].+\.", family.help)] == []


def test_counters_and_no_others_end_in_total(families: dict[str, Family]) -> None:
    for family in families.values():
        assert (family.kind == "counter") == any(name.endswith("_total") for name in family.samples), family.name


def test_no_metric_ends_as_parts_of_histograms_do(families: dict[str, Family]) -> None:
    assert [name for name in families if re.search(r"_(bucket|count|sum|info|created)$", name)] == []


def test_only_histograms_have_buckets(families: dict[str, Family]) -> None:
    for family in families.values():
        has_buckets = any("le" in labels for labels in family.samples.values())
        assert (family.kind == "histogram") == has_buckets, family.name


def test_units_are_base_units_at_the_end_of_a_name(families: dict[str, Family]) -> None:
    words = {name: name.removeprefix(PREFIX).split("_") for name in families}
    assert [name for name, parts in words.items() if re.search(rf"\b({OTHER_UNITS})\b", " ".join(parts))] == []
    assert [name for name, parts in words.items() if "seconds" in parts[:-1]] == []


def test_names_hold_no_type_and_only_lower_case(families: dict[str, Family]) -> None:
    """The colon is vLLM's: it is in all of vLLM's names, and promtool would keep it for recording rules."""
    for family in families.values():
        assert re.fullmatch(r"vllm:[a-z]+(_[a-z]+)*", family.name)
        assert not re.search(rf"(^|_)({TYPES})(_|$)", family.name)


def test_labels_are_few_words_and_no_reserved_ones(families: dict[str, Family]) -> None:
    labels = {label for family in families.values() for of_sample in family.samples.values() for label in of_sample}
    assert labels == {"model_name", "engine", "mode", "reason", "outcome", "asked", "le"}


@pytest.mark.parametrize(
    "text",
    [
        "# TYPE a counter\na 1\n# EOF\n",  # a counter without _total
        '# TYPE a histogram\na_bucket{le="1"} 2\na_bucket{le="+Inf"} 1\na_count 1\na_sum 1\n# EOF\n',  # shrinks
        "# TYPE a gauge\na 1\n",  # cut off
    ],
)
def test_the_parser_refuses_what_is_malformed(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_families(text)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing_but_the_colon(exposition: str) -> None:
    assert PROMTOOL is not None
    text = exposition.replace("# EOF\n", "")  # promtool reads the older format, in which counters have full names
    text = re.sub(r"^# (HELP|TYPE) (\S+)(?=.*)", _name_counters(text), text, flags=re.MULTILINE)
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "should not contain ':'" not in line]
    assert said == []


def _name_counters(text: str) -> object:
    """Return what names a counter in its head as its samples are named."""
    counters = set(re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE))
    return lambda found: f"# {found[1]} {found[2]}{'_total' if found[2] in counters else ''}"
