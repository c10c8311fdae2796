"""Which tests run here: those whose needs are there. What was left out is told at the end of the run.

With `PADDOCK_REQUIRE=docker,redis` (or `all`) a missing part fails the run instead.
"""

import os
from collections import defaultdict

import pytest

from tests.needs import PROBES, probe, required

_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def _needs_of(item: pytest.Item) -> frozenset[str]:
    return frozenset(mark.name for mark in item.iter_markers() if mark.name in PROBES)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Last, so that only tests which `-k` and `-m` left in are asked for their needs.
    carried = frozenset[str]().union(*(_needs_of(item) for item in items))
    try:
        asked = required(os.environ.get("PADDOCK_REQUIRE", ""), carried)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if missing := [f"{need}: {why}" for need in sorted(asked) if (why := probe(need))]:
        raise pytest.UsageError("PADDOCK_REQUIRE asks for what is not here.\n" + "\n".join(missing))
    left_out: dict[str, int] = defaultdict(int)
    for item in items:
        absent = sorted(need for need in _needs_of(item) if probe(need))
        for need in absent:
            left_out[need] += 1
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"{absent[0]}: {probe(absent[0])}"))
    config.stash[_LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(_LEFT_OUT, {})
    if not left_out:
        return
    terminalreporter.section("left out here")
    for need, count in sorted(left_out.items()):
        terminalreporter.write_line(f"{need}: {count} test{'' if count == 1 else 's'}. {probe(need)}")
