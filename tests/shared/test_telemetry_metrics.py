"""The vocabulary of metrics: closed, documented, and counted where things happen."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import httpx
import pytest
from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.agent.record import State as AgentSessionState
from services.resources.records import State as ResourcesSessionState
from shared.contracts.failure import FailureKind, Stage
from shared.errors import BadRowError
from shared.http.service import Mesh, Service, create_service, json_reply
from shared.metric_families import OTHER
from shared.metrics import FAST_S as STORE_BUCKETS
from shared.metrics import STORE_OPERATIONS, AgentState, Metrics, Names, ResourcesState, table
from shared.ports.store import Store
from shared.settings import LoadedSettings, Settings
from tests.serving import serving
from tests.store.conftest import redis_server as redis_server
from tests.store.conftest import running_redis as running_redis
from tests.store.contract import SOON_S

ROOT = Path(__file__).parents[2]
NAMES = Names(
    environments=frozenset({"math"}), agents=frozenset({"loop"}), resources=frozenset({"r"}), models=frozenset({"m"})
)


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one series, 0 while it is not there."""
    metrics.flush()
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_the_documented_table_is_the_vocabulary() -> None:
    documented = (ROOT / "deploy" / "observability" / "metrics.md").read_text(encoding="utf-8").splitlines()
    assert documented == list(table()), "run: python -m shared.metrics > deploy/observability/metrics.md"


def test_names_follow_the_conventions() -> None:
    entries = Metrics().entries
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"paddock_[a-z_]+", entry.name)
        assert entry.name.endswith("_total") == (entry.type == "counter")
        assert entry.name.endswith(("_seconds", "_size")) == (entry.type == "histogram")
        assert entry.meaning.endswith(".")


def test_only_the_vocabulary_is_exposed_and_nothing_tells_when_a_series_began() -> None:
    metrics = Metrics(NAMES)
    metrics.episodes.labels("math", "result", "none").inc()
    metrics.stage_seconds.labels("math", "seed").observe(1.0)
    text = _text(metrics)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert sorted(families) == sorted(entry.name.removesuffix("_total") for entry in metrics.entries)
    assert "_created" not in text


def test_a_value_that_is_not_known_counts_as_other_and_makes_no_series_of_its_own() -> None:
    metrics = Metrics(NAMES)
    before = _text(metrics).count("_total{")
    for n in range(1000):
        metrics.episodes.labels(f"invented-{n}", f"x{n}", f"y{n}").inc()
        metrics.tokens.labels(f"model-{n}", "input").inc(2)
        metrics.upstream_statuses.labels("m", str(1000 + n)).inc()
    assert value(metrics, "paddock_episodes_total", environment=OTHER, outcome=OTHER, kind=OTHER) == 1000
    assert value(metrics, "paddock_tokens_total", model=OTHER, direction="input") == 2000
    assert value(metrics, "paddock_upstream_statuses_total", model="m", status=OTHER) == 1000
    assert _text(metrics).count("_total{") == before + 3


def test_what_alerts_watch_is_there_before_its_first_event() -> None:
    metrics = Metrics(NAMES)
    for series in (
        'paddock_leases_lost_total{what="episode"} 0.0',
        'paddock_taken_over_total{service="environment"} 0.0',
        'paddock_agent_closes_total{agent="loop",outcome="failed"} 0.0',
        'paddock_episodes_total{environment="math",kind="cleanup_unproven",outcome="failure"} 0.0',
    ):
        assert series in _text(metrics)


def test_a_service_exposes_its_own_metrics_and_those_of_all() -> None:
    for service in ("environment", "agent", "resources", "model_proxy"):
        metrics = Metrics(NAMES, service)
        names = {family.name for family in text_string_to_metric_families(_text(metrics))}
        expected = {entry.name.removesuffix("_total") for entry in metrics.entries if entry.service in {service, "all"}}
        assert names == expected
        metrics.episodes.labels("math", "result", "none").inc()
        assert ("paddock_episodes_total" in _text(metrics)) == (service == "environment")


def _text(metrics: Metrics) -> str:
    metrics.flush()
    return generate_latest(metrics.registry).decode()


def test_every_failure_kind_and_stage_is_in_the_vocabulary() -> None:
    metrics = Metrics(NAMES)
    for kind in FailureKind:
        metrics.episodes.labels("math", "failure", kind).inc()
        assert value(metrics, "paddock_episodes_total", environment="math", outcome="failure", kind=kind.value) == 1
    for stage in Stage:
        metrics.stage_seconds.labels("math", stage).observe(1)
        assert value(metrics, "paddock_stage_seconds_count", environment="math", stage=stage.value) == 1


def test_what_is_noted_in_between_is_told_as_the_library_itself_would_have() -> None:
    """Counters add up over flushes, gauges are what they were last, histograms fall into the same buckets."""
    metrics, theirs = Metrics(NAMES), CollectorRegistry()
    plain = Histogram("paddock_store_seconds", "x", ["op", "outcome"], registry=theirs, buckets=STORE_BUCKETS)
    amounts = [0.0, 0.0005, 0.00051, 0.3, *STORE_BUCKETS, 10.1, 1e9]
    for turn in range(3):
        for amount in amounts[turn:]:
            metrics.store_seconds.labels("get", "ok").observe(amount)
            plain.labels("get", "ok").observe(amount)
        metrics.tokens.labels("m", "input").inc(turn)
        metrics.leases_held.labels("episode").inc()
        metrics.flush()
        metrics.flush()
    metrics.leases_held.labels("episode").dec(2)
    (family,) = theirs.collect()
    assert len(family.samples) == len(STORE_BUCKETS) + 3
    for sample in family.samples:
        assert value(metrics, sample.name, **sample.labels) == pytest.approx(sample.value), sample
    assert value(metrics, "paddock_tokens_total", model="m", direction="input") == 3
    assert value(metrics, "paddock_leases_held", what="episode") == 1


def test_a_wrong_number_of_labels_is_an_error() -> None:
    with pytest.raises(ValueError, match="argument"):
        Metrics().episodes.labels("math")


def test_states_and_operations_are_those_of_the_services_and_the_port() -> None:
    assert set(get_args(AgentState)) == {state.value for state in AgentSessionState}
    # One with a verdict is open again, until it is closed.
    assert set(get_args(ResourcesState)) == {*get_args(ResourcesSessionState), "graded"}
    operations = {name for name, member in vars(Store).items() if callable(member) and not name.startswith("_")}
    assert set(STORE_OPERATIONS) == operations - {"ping", "close"}


@asynccontextmanager
async def _nothing(_mesh: Mesh) -> AsyncIterator[None]:
    yield


def _service(entered: asyncio.Event, leave: asyncio.Event) -> Service:
    service = create_service("agent", LoadedSettings(Settings(), {}), lifespan=_nothing)

    async def hold(request: Request) -> Response:
        entered.set()
        await leave.wait()
        return json_reply(b"{}")

    async def refuse(request: Request) -> Response:
        raise BadRowError("no")

    service.add_bare_route("POST", "/hold/{name}", hold)
    service.add_bare_route("POST", "/refuse/{name}", refuse)

    @service.get("/whole/{name}")
    async def whole(name: str) -> str:
        return name

    return service


async def test_requests_are_counted_by_route_however_they_end_and_never_by_path() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    service = _service(entered, leave)
    metrics: Metrics = service.state.mesh.metrics
    async with serving(service) as url, httpx.AsyncClient(trust_env=False) as client:
        held = asyncio.create_task(client.post(f"{url}/hold/one"))
        await asyncio.wait_for(entered.wait(), SOON_S)
        assert value(metrics, "paddock_requests_in_flight") == 1
        leave.set()
        await held
        for n in range(3):
            await client.post(f"{url}/refuse/{n}")
            await client.get(f"{url}/whole/{n}")
            await client.get(f"{url}/nowhere/{n}")
            await client.get(f"{url}/{n}")
    assert value(metrics, "paddock_requests_in_flight") == 0
    counted = {
        ("/hold/{name}", "200"): 1, ("/refuse/{name}", "422"): 3, ("/whole/{name}", "200"): 3, (OTHER, "404"): 6,
    }  # fmt: skip
    for (route, status), times in counted.items():
        assert value(metrics, "paddock_requests_total", route=route, status=status) == times
    routes = set(re.findall(r'^paddock_request_seconds_count\{route="(.*?)"\}', _text(metrics), re.MULTILINE))
    assert routes == {route for route, _ in counted}


async def test_a_request_whose_caller_leaves_is_no_longer_in_flight() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    service = _service(entered, leave)
    metrics: Metrics = service.state.mesh.metrics
    async with serving(service) as url:
        async with httpx.AsyncClient(trust_env=False) as client:
            held = asyncio.create_task(client.post(f"{url}/hold/one"))
            await asyncio.wait_for(entered.wait(), SOON_S)
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        leave.set()
    assert value(metrics, "paddock_requests_in_flight") == 0
    assert value(metrics, "paddock_request_seconds_count", route="/hold/{name}") == 1


async def test_a_service_tells_its_build_and_uses_the_configured_names() -> None:
    settings = Settings.model_validate({"models": {"policy": {"upstream": "scripted"}}})
    service = create_service("model_proxy", LoadedSettings(settings, {}), lifespan=_nothing)
    metrics: Metrics = service.state.mesh.metrics
    assert re.search(r'^paddock_build_info\{service="model_proxy",version=".+"\} 1\.0$', _text(metrics), re.MULTILINE)
    metrics.tokens.labels("policy", "output").inc(3)
    metrics.tokens.labels("another", "output").inc(4)
    assert value(metrics, "paddock_tokens_total", model="policy", direction="output") == 3
    assert value(metrics, "paddock_tokens_total", model=OTHER, direction="output") == 4


WORKER = """
import sys
from pathlib import Path
from shared.http.worker_metrics import exposition, share_metrics
number = int(sys.argv[2])
share_metrics(Path(sys.argv[1]), number)
from shared.metrics import Metrics, Names
metrics = Metrics(Names(agents=frozenset({"loop"}), environments=frozenset({"math"})), "agent")
metrics.running.labels("activations").inc(number + 1)
metrics.activations.labels("loop", "completed").inc(10 * (number + 1))
metrics.activation_seconds.labels("loop").observe(0.01)
metrics.activation_seconds.labels("loop").observe(100.0 * number)
metrics.flush()
print("flushed", flush=True)
sys.stdin.readline()
metrics.flush()
print(exposition(metrics.registry).decode())
"""


def test_a_scrape_of_one_of_several_workers_tells_the_sum_of_all(tmp_path: Path) -> None:
    command = (sys.executable, "-c", WORKER, str(tmp_path))
    workers = [
        subprocess.Popen([*command, str(n)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "flushed\n"
    texts = [worker.communicate("go on\n", timeout=60)[0] for worker in workers]
    # The second one meets the first one's values although that one has ended; only its gauges may be gone.
    series = {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(texts[0])
        for sample in family.samples
    }
    assert series["paddock_running[('what', 'activations')]"] == 3
    assert series["paddock_activations_total[('agent', 'loop'), ('end', 'completed')]"] == 30
    assert series["paddock_activation_seconds_count[('agent', 'loop')]"] == 4
    assert series["paddock_activation_seconds_sum[('agent', 'loop')]"] == pytest.approx(100.02)
    assert not [name for name in series if name.startswith(("paddock_episodes", "paddock_grading"))]
    assert not [name for name in series if "pid" in name]
