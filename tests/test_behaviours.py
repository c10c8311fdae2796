"""Every behaviour that is claimed to hold is linked by a test, and no test links one that is not listed."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
LIST = "tests/behaviours.toml"
ID = re.compile(r"[A-Z]{2}-[1-9][0-9]*")


def _listed() -> dict[str, Any]:
    return tomllib.loads((TESTS / "behaviours.toml").read_text(encoding="utf-8"))


def _statuses(listed: dict[str, Any]) -> list[tuple[str, str]]:
    """Each id with its status; an id that stands twice comes twice."""
    pairs = [(name, "held") for name in listed["held"]]
    pairs += [(name, "later") for group in listed["later"] for name in group["ids"]]
    return pairs + [(name, "diverges") for name in listed["diverges"]]


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.behaviour"


def links(source: str, name: str) -> Iterator[tuple[str, str]]:
    """Each id that the file's marks name, with `file:line`; what is not a plain string comes as its source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_mark(node):
            for argument in node.args:
                text = argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument)
                yield str(text), f"{name}:{argument.lineno}"


def _all_links() -> list[tuple[str, str]]:
    return [
        link
        for path in sorted(TESTS.rglob("test_*.py"))
        for link in links(path.read_text(encoding="utf-8"), str(path.relative_to(TESTS.parent)))
    ]


def test_every_behaviour_stands_in_the_list_once() -> None:
    names = [name for name, _ in _statuses(_listed())]
    assert [name for name in names if not ID.fullmatch(name)] == []
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert len(names) > 0


def test_every_behaviour_that_does_not_hold_has_a_reason() -> None:
    listed = _listed()
    reasons = [(group["ids"], group["reason"]) for group in listed["later"]] + list(listed["diverges"].items())
    assert [names for names, reason in reasons if not re.fullmatch(r".{15,}\.", reason)] == []


def test_every_behaviour_that_holds_is_linked_by_a_test() -> None:
    linked = {name for name, _ in _all_links()}
    unproven = [name for name, status in _statuses(_listed()) if status == "held" and name not in linked]
    claims = f"{LIST} claims these, but no test is marked with them: write one, or move them to `later`."
    assert unproven == [], f"{claims} {' '.join(unproven)}"


def test_no_test_links_a_behaviour_that_is_not_listed() -> None:
    known = {name for name, _ in _statuses(_listed())}
    strangers = [f"{where} names {name}" for name, where in _all_links() if name not in known]
    assert strangers == [], f"{LIST} does not know these; a mark takes plain strings only."


@pytest.mark.parametrize(
    "source",
    [
        '@pytest.mark.behaviour("ES-10", "ES-17")\ndef test_a() -> None: ...',
        'pytestmark = [pytest.mark.docker, pytest.mark.behaviour("ES-10", "ES-17")]',
        'CASE = pytest.param(1, marks=pytest.mark.behaviour("ES-10", "ES-17"))',
    ],
)
def test_a_link_is_found_wherever_a_mark_may_stand(source: str) -> None:
    assert [name for name, _ in links(source, "x.py")] == ["ES-10", "ES-17"]


def test_a_mark_that_is_not_a_plain_string_is_found_out() -> None:
    assert list(links("pytest.mark.behaviour(*IDS)", "x.py")) == [("*IDS", "x.py:1")]
