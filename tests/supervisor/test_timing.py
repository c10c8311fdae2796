"""How long a launch and a stop take beside the call's own cost; the figures are printed."""

import statistics
import time
from collections.abc import Callable

from tests.supervisor.conftest import MakeActivation
from tests.supervisor.rig import Activation

TIMES = 40
AT_MOST_S = 0.5
"""Ten times what an idle machine needs at the 95th percentile: this guards against waits, not against load."""


def _taken_s(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _figures(name: str, taken_s: list[float]) -> float:
    """The median, in seconds."""
    cuts = statistics.quantiles(taken_s, n=20)
    print(f"{name}: p50 {cuts[9] * 1000:.1f} ms, p95 {cuts[18] * 1000:.1f} ms")  # noqa: T201
    return cuts[9]


def test_launch_and_stop_wait_for_nothing(activations: MakeActivation) -> None:
    calls, launches, stops = [], [], []
    for _ in range(TIMES):
        activation: Activation = activations()
        activation.prepare()
        request = activation.request("sleep", "60")
        calls.append(_taken_s(activation.status))
        launches.append(_taken_s(lambda run=activation.run, request=request: run(request)))  # type: ignore[misc]
        stops.append(_taken_s(activation.stop))
    own_s = _figures("\na call that only looks", calls)
    assert _figures("launch", launches) - own_s < AT_MOST_S
    assert _figures("stop to receipt", stops) - own_s < AT_MOST_S
