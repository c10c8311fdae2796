"""The dashboard, the rules and the scrape example ask only for metrics and labels that there are."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from shared.metric_families import Entry
from shared.metrics import Metrics
from shared.settings import SERVICE_NAMES, Settings

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
ENTRIES = {entry.name: entry for entry in Metrics().entries}
PANELS: list[dict[str, Any]] = orjson.loads((FOLDER / "dashboard.json").read_bytes())["panels"]
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
SCRAPE = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))

# Of the scrape, not of the process.
TARGET_LABELS = {"job", "instance"}
FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile"}
WORDS = {"by", "on", "and", "unless", "le", "inf"}
NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


EXPRESSIONS = [pytest.param(expression, id=title) for title, expression in expressions()]


def entry_of(series: str) -> Entry:
    """The metric that a series belongs to."""
    found = ENTRIES.get(series)
    if found is None:
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        found = ENTRIES.get(base)
        assert found is not None, f"{series} is in no vocabulary"
        assert found.type == "histogram", f"{base} is no histogram"
    else:
        assert found.type != "histogram", f"{series} is a histogram: ask for its _bucket, _sum or _count"
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_metrics_and_labels_that_there_are(expression: str) -> None:
    selectors = re.findall(rf"\b(up|paddock_{NAME})\b(?:\{{(.*?)\}})?", expression)
    assert selectors
    labels = set(TARGET_LABELS)
    for series, matchers in selectors:
        if series == "up":
            continue
        entry = entry_of(series)
        labels |= set(entry.labels)
        matched = set(re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)\s*\"", matchers))
        assert matched <= set(entry.labels) | TARGET_LABELS, f"{series} has no labels {matched}"
    grouped = {name for group in re.findall(r"\b(?:by|on) \((.*?)\)", expression) for name in re.findall(NAME, group)}
    assert grouped <= labels | {"le"}, f"nobody has the labels {grouped}"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_of_the_few_forms_that_are_used_here(expression: str) -> None:
    """Counters are asked for their rise, quantiles keep `le`, and every word is known."""
    bare = re.sub(r"\"[^\"]*\"|\{.*?\}|\[.*?\]", "", expression)
    assert expression.count("(") == expression.count(")")
    known = FUNCTIONS | WORDS | {label for entry in ENTRIES.values() for label in entry.labels} | TARGET_LABELS
    words = {word for word in re.findall(rf"\b{NAME}\b", bare) if not word.startswith("paddock_") and word != "up"}
    assert words <= known
    for counter in re.findall(rf"\b(paddock_{NAME}_(?:total|bucket|count|sum))\b", expression):
        assert re.search(rf"(?:rate|increase)\({counter}[{{\[]", expression), f"{counter} only ever rises"
    if "histogram_quantile" in expression:
        assert re.search(r"sum by \(le[,)]", expression)


@pytest.mark.parametrize(("right", "wrong"), [("paddock_episodes_total", "paddock_episode_total")])
def test_a_name_that_is_not_there_is_found(right: str, wrong: str) -> None:
    assert entry_of(right).name == right
    with pytest.raises(AssertionError, match="no vocabulary"):
        entry_of(wrong)
    with pytest.raises(AssertionError, match="is a histogram"):
        entry_of("paddock_stage_seconds")
    with pytest.raises(AssertionError, match="no histogram"):
        entry_of("paddock_episodes_queued_count")


def test_the_dashboard_can_be_imported_and_its_panels_do_not_overlap() -> None:
    dashboard = orjson.loads((FOLDER / "dashboard.json").read_bytes())
    assert dashboard["title"] == "Paddock"
    assert dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "environment", "model"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert [target["refId"] for target in panel["targets"]] == [*"ABCDEF"][: len(panel["targets"])]


def test_the_dashboard_answers_what_an_operator_asks() -> None:
    asked = " ".join(expression for _, expression in expressions())
    for metric in ENTRIES.values():
        assert re.search(rf"\b{metric.name}(?:_bucket|_sum|_count)?\b", asked), f"nobody looks at {metric.name}"


def test_every_rule_says_what_happened_and_where_to_look() -> None:
    names = [rule["alert"] for group in RULES["groups"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert set(rule["annotations"]) == {"summary", "description"}
            assert rule["annotations"]["summary"].endswith(".")


def test_every_service_is_scraped_on_its_port_under_the_job_that_the_rules_know() -> None:
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in SCRAPE["scrape_configs"]}
    services = Settings().services
    for name in SERVICE_NAMES:
        host = name.replace("_", "-")
        assert jobs[f"paddock-{host}"]["names"] == [host]
        assert jobs[f"paddock-{host}"]["port"] == getattr(services, name).port
    assert len(jobs) == len(SERVICE_NAMES)
    assert SCRAPE["rule_files"] == ["alerts.yml"]
