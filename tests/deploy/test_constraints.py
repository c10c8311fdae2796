"""`constraints.txt` pins all that is installed, so that every machine, image and CI run has the same."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

TREE = Path(__file__).parents[2]
LINES = (TREE / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}


def _asked() -> dict[NormalizedName, list[Requirement]]:
    """Everything that the project with its test tools leads to on this machine: by name, who asks for what."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    open_ends = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["test"]]
    asked: dict[NormalizedName, list[Requirement]] = {}
    seen = set()
    while open_ends:
        requirement = open_ends.pop()
        asked.setdefault(canonicalize_name(requirement.name), []).append(requirement)
        if (end := (requirement.name, frozenset(requirement.extras))) not in seen:
            seen.add(end)
            open_ends += _asked_by(*end)
    return asked


def _asked_by(name: str, extras: frozenset[str]) -> list[Requirement]:
    found = [Requirement(text) for text in requires(name) or []]
    return [
        requirement
        for requirement in found
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""})
    ]


def test_every_line_is_one_exact_pin_in_order() -> None:
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    assert [line.lower() for line in LINES] == sorted(line.lower() for line in LINES)


def test_what_is_pinned_is_what_the_project_leads_to() -> None:
    asked = _asked()
    assert sorted(asked.keys() - PINS.keys()) == [], "not pinned"
    assert sorted(PINS.keys() - asked.keys()) == [], "pinned, but nothing asks for it"


def test_every_pin_fits_whoever_asks_for_it() -> None:
    unfit = [str(item) for name, items in _asked().items() for item in items if not item.specifier.contains(PINS[name])]
    assert unfit == []
