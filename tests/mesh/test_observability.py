"""What an operator sees of a mesh: metrics, log lines, and one trace through every hop, without a secret in any."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.contracts.failure import FailureKind, Stage
from shared.tokens import SessionClaims, Signer
from shared.tracing import read_trace
from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, calls, refuses, says
from tests.mesh.processes import SERVICES, UpMesh, up
from tests.otlp import Collector, Received, collector
from tests.serving import free_port

MESH_TOKEN = "mesh-token-4711-of-this-test"
CLIENT_TOKEN = "client-token-4711-of-this-test"
MODEL_KEY = "model-key-4711-of-this-test"
TOOL_KEY = "tool-key-4711-of-this-test"
COLLECTOR_KEY = "collector-key-4711-of-this-test"
SECRETS = (MESH_TOKEN, CLIENT_TOKEN, MODEL_KEY, TOOL_KEY, COLLECTOR_KEY)
RIGHT = r"\boxed{12}"
BOUND_S = 60.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
OPEN_LABELS = {"route", "version", "le"}


def configuration(chat_url: str) -> dict[str, Any]:
    model = {"upstream": "chat_completions", "api_key_env": "A_MODELS_KEY", "model": "m", "base_url": chat_url}
    foreign = {
        "type": "mcp", "name": "foreign", "required": True, "url": f"http://me:{TOOL_KEY}@127.0.0.1:{free_port()}/mcp",
        "headers": {"Authorization": f"Bearer {TOOL_KEY}"},
    }  # fmt: skip
    weather = {"verifier": "tool_calls", "tools": ["weather"], "without_expected_calls": "offered_tool"}
    entry = {"resources": "math", "agent": "tool_loop"}
    return {
        "models": {
            "policy": model,
            "private": {**model, "trace_context": False},
            "nobody": {**model, "base_url": f"http://127.0.0.1:{free_port()}/v1"},
        },
        "agents": {
            "tool_loop": {"harness": "tool_loop", "model": "policy"},
            "private": {"harness": "tool_loop", "model": "private"},
            "nobody": {"harness": "tool_loop", "model": "nobody"},
            "foreign": {"harness": "tool_loop", "tool_accesses": [foreign]},
        },
        "resources": {
            "math": {"verifier": "math"}, "judged": {"verifier": "math", "judge": "policy"}, "weather": weather,
        },
        "environments": {
            "math": entry,
            "private": {**entry, "agent": "private"},
            "nobody": {**entry, "agent": "nobody"},
            "foreign": {**entry, "agent": "foreign"},
            "judged": {**entry, "resources": "judged"},
            "weather": {"resources": "weather", "agent": "tool_loop", "tools": ["direct_http"]},
            "weather_mcp": {"resources": "weather", "agent": "tool_loop", "tools": ["mcp"]},
            "narrow": {**entry, "max_concurrent": 1, "queue_timeout_s": 30.0},
        },
    }  # fmt: skip


def _started(folder: Path, chat: ChatServer, **environ: str) -> Any:
    config = folder / "paddock.json"
    config.write_bytes(orjson.dumps(configuration(chat.url)))
    given = {"A_MODELS_KEY": MODEL_KEY, "PADDOCK_MESH_TOKEN": MESH_TOKEN, "PADDOCK_CLIENT_TOKEN": CLIENT_TOKEN}
    return up("--config", config, cwd=folder, environ={**given, **environ})


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    """Without a collector."""
    with _started(tmp_path_factory.mktemp("plain"), chat) as started:
        yield started


@pytest.fixture(scope="module")
def received() -> Iterator[Collector]:
    with collector() as kept:
        yield kept


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer, received: Collector) -> Iterator[UpMesh]:
    """Its spans go to the collector soon."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-api-key={COLLECTOR_KEY}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with _started(tmp_path_factory.mktemp("traced"), chat, **environ) as started:
        yield started


def run(mesh: UpMesh, row: dict[str, Any], **headers: str) -> dict[str, Any]:
    given = {"Authorization": f"Bearer {CLIENT_TOKEN}", **headers}
    answered = httpx.post(f"{mesh.url}/run", json=row, headers=given, timeout=BOUND_S, trust_env=False)
    body: dict[str, Any] = answered.json()
    assert answered.status_code == 200, body
    return body


def keyed(marker: str, key: str, environment: str = "math", row: dict[str, Any] | None = None) -> dict[str, Any]:
    given = rows.math(marker, "12") if row is None else row
    return {**given, "environment": environment, "episode_id": {"rollout_id": key, "attempt": 0}}


def lines_of(mesh: UpMesh, key: str, enough: int = len(SERVICES)) -> list[dict[str, Any]]:
    """The log lines of an episode, once there are enough of them: a service may write one after it has answered."""
    deadline = time.monotonic() + BOUND_S
    while True:
        told = [line for line in all_lines(mesh) if line.get("key") == key]
        if len(told) >= enough or time.monotonic() > deadline:
            return told
        time.sleep(0.05)


def all_lines(mesh: UpMesh) -> list[dict[str, Any]]:
    """Every whole line of the services' standard error; each is JSON."""
    return [orjson.loads(line) for line in mesh.running.err.split("\n")[:-1]]


Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(mesh: UpMesh, service: str) -> Series:
    text = httpx.get(f"{mesh.urls[service]}/metrics", timeout=BOUND_S, trust_env=False).text
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def risen(before: Series, after: Series, name: str, **labels: str) -> float:
    """By how much one series has risen."""
    series = (name, frozenset(labels.items()))
    return after.get(series, 0.0) - before.get(series, 0.0)


# One trace, whether recorded or not.


def test_a_callers_context_goes_through_every_hop_to_the_models_server(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<carried>", says(RIGHT))
    parent = f"00-{TRACE}-{SPAN}-01"
    run(mesh, keyed("<carried>", "carried-1"), traceparent=parent, tracestate="vendor=x,other=y")
    (asked,) = scene.asked
    assert (asked.headers["traceparent"], asked.headers["tracestate"]) == (parent, "vendor=x,other=y")
    told = lines_of(mesh, "carried-1")
    assert {line["service"] for line in told} == set(SERVICES)
    assert {line["trace_id"] for line in told} == {TRACE}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("none", ""),
        ("words", "nonsense"),
        ("zero", f"00-{'0' * 32}-{SPAN}-01"),
        ("version", f"ff-{TRACE}-{SPAN}-01"),
    ],
)
def test_without_a_proper_context_a_run_gets_a_fresh_one_that_asks_for_no_recording(
    mesh: UpMesh, chat: ChatServer, name: str, given: str
) -> None:
    key = f"fresh-{name}"
    scene = chat.on(f"<{key}>", says(RIGHT))
    run(mesh, keyed(f"<{key}>", key), **({"traceparent": given, "tracestate": "a=b"} if given else {}))
    trace = read_trace(scene.asked[0].headers["traceparent"])
    assert trace is not None
    assert trace.trace_id != TRACE
    assert trace.flags == 0
    assert "tracestate" not in scene.asked[0].headers
    assert {line["trace_id"] for line in lines_of(mesh, key)} == {trace.trace_id}


def test_a_sampled_flag_that_is_off_stays_off(traced: UpMesh, chat: ChatServer, received: Collector) -> None:
    scene = chat.on("<unsampled>", says(RIGHT))
    run(traced, keyed("<unsampled>", "unsampled-1"), traceparent=f"00-{TRACE[::-1]}-{SPAN}-00")
    assert scene.asked[0].headers["traceparent"] == f"00-{TRACE[::-1]}-{SPAN}-00"
    chat.on("<sampled>", says(RIGHT))
    other = "f" * 31 + "1"
    run(traced, keyed("<sampled>", "sampled-1"), traceparent=f"00-{other}-{SPAN}-01")
    spans = received.wait_for(_whole_episodes(other))
    assert not [span for span in spans if span.trace_id == TRACE[::-1]]


def test_a_model_may_be_kept_out_of_the_trace(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<private>", says(RIGHT))
    run(mesh, keyed("<private>", "private-1", "private"), traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=b")
    assert not {"traceparent", "tracestate"} & set(scene.asked[0].headers)


def _call_model(mesh: UpMesh, token: str, marker: str, **headers: str) -> None:
    answered = httpx.post(
        f"{mesh.urls['model_proxy']}/v1/responses",
        json={"model": "policy", "input": marker},
        headers={"Authorization": f"Bearer {token}", **headers},
        timeout=BOUND_S,
        trust_env=False,
    )
    assert answered.status_code == 200, answered.text


def _token(key: str, trace: str) -> str:
    claims = SessionClaims(key=key, model="policy", session="s", expires_at=time.time() + 60, trace=trace)
    return Signer(MESH_TOKEN, "session-token").session_token(claims)


def test_the_calls_of_a_harness_that_knows_no_trace_are_in_its_episodes_trace(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<opaque>", says("hello"))
    _call_model(mesh, _token("opaque-1", f"00-{TRACE}-{SPAN}-01 a=b"), "<opaque>")
    headers = scene.asked[0].headers
    assert (headers["traceparent"], headers["tracestate"]) == (f"00-{TRACE}-{SPAN}-01", "a=b")


def test_a_harness_that_continues_its_trace_is_followed(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<aware>", says("hello"))
    further = f"00-{TRACE}-{'e' * 16}-01"
    _call_model(mesh, _token("aware-1", f"00-{TRACE}-{SPAN}-01"), "<aware>", traceparent=further)
    assert scene.asked[0].headers["traceparent"] == further


# Recorded.


def _whole_episodes(*traces: str) -> Callable[[Sequence[Received]], bool]:
    """The spans that end last have come: the run's own at the environment, the last close at resources."""
    ends = {("environment", "POST /run"), ("environment", "episode"), ("resources", "POST /{entry}/close_session")}

    def enough(spans: Sequence[Received]) -> bool:
        return all(ends <= {(s.service, s.name) for s in spans if s.trace_id == trace} for trace in traces)

    return enough


def _tree(received: Collector, trace: str) -> dict[str, Received]:
    """The spans of one episode by their ids, once all are there: services send theirs at times of their own."""
    whole = _whole_episodes(trace)

    def complete(spans: Sequence[Received]) -> bool:
        mine = [span for span in spans if span.trace_id == trace]
        parents = {span.parent for span in mine}
        has_children = {span.span_id for span in mine if _calls_a_service(span)}
        return whole(spans) and parents - {SPAN} <= {span.span_id for span in mine} and has_children <= parents

    return {span.span_id: span for span in received.wait_for(complete) if span.trace_id == trace}


def _calls_a_service(span: Received) -> bool:
    """Whether a span of another service, or of the model's call, belongs below it."""
    if span.service == "model_proxy":
        return span.kind == "server" and span.name.endswith("/responses")
    return span.kind == "client"


def _path(spans: dict[str, Received], span: Received) -> list[str]:
    """From the outermost to this one."""
    above = spans.get(span.parent)
    return [*(_path(spans, above) if above is not None else []), f"{span.service}: {span.name}"]


def _paths(spans: dict[str, Received]) -> Counter[str]:
    return Counter(" > ".join(_path(spans, span)) for span in spans.values())


RUN = "environment: POST /run > environment: episode"
ACTIVATION = (
    f"{RUN} > environment: agent > environment: POST agent > agent: POST /{{agent}}/v1/responses"
    " > agent: activation tool_loop"
)
MODEL_CALL = "agent: POST model_proxy > model_proxy: POST /v1/responses > model_proxy: chat policy"
VERIFY = f"{RUN} > environment: verification > environment: POST resources > resources: POST /{{entry}}/verify"


def test_an_episode_is_one_tree_of_spans_over_all_services(
    traced: UpMesh, chat: ChatServer, received: Collector
) -> None:
    chat.on("<tree>", calls("get_weather", {"city": "Paris"}), says("Take a coat."))
    trace = "a" * 31 + "1"
    row = keyed("<tree>", "tree-1", "weather", rows.weather("<tree>"))
    assert run(traced, row, traceparent=f"00-{trace}-{SPAN}-01", tracestate="v=1")["reward"] == 1.0
    spans = _tree(received, trace)
    paths = _paths(spans)
    assert paths[f"{RUN} > environment: seed > environment: POST resources > resources: POST /{{entry}}/seed_session"]
    assert paths[f"{RUN} > environment: seed > environment: POST agent > agent: POST /{{agent}}/v1/agent_sessions"]
    assert paths[f"{ACTIVATION} > {MODEL_CALL}"] == 2
    assert paths[f"{ACTIVATION} > agent: POST tools > resources: POST /{{entry}}/{{tool}}"] == 1
    assert paths[f"{VERIFY} > resources: verify weather"] == 1
    for stage in ("admission", "seed", "agent", "cleanup", "verification", "unwind"):
        assert paths[f"{RUN} > environment: {stage}"] == 1, paths
    assert {span.state for span in spans.values()} == {"v=1"}
    assert not [span.name for span in spans.values() if span.failed]
    instances = {span.service: span.resource["service.instance.id"] for span in spans.values()}
    for service in SERVICES:
        ready = httpx.get(f"{traced.urls[service]}/readyz", timeout=BOUND_S, trust_env=False).json()
        assert instances[service] == ready["instance"]
    (call, _) = [span for span in spans.values() if span.name == "chat policy"]
    assert call.kind == "client"
    assert call.attributes["gen_ai.usage.input_tokens"] == 7
    assert call.attributes["http.response.status_code"] == 200
    (episode,) = [span for span in spans.values() if span.name == "episode"]
    assert episode.attributes["paddock.key"] == "tree-1"


def test_calls_of_tools_over_mcp_and_of_a_judge_are_in_the_tree(
    traced: UpMesh, chat: ChatServer, received: Collector
) -> None:
    chat.on("<mcp>", calls("get_weather", {"city": "Paris"}), says("Take a coat."))
    trace = "b" * 31 + "1"
    row = keyed("<mcp>", "mcp-1", "weather_mcp", rows.weather("<mcp>"))
    assert run(traced, row, traceparent=f"00-{trace}-{SPAN}-01")["reward"] == 1.0
    paths = _paths(_tree(received, trace))
    assert paths[f"{ACTIVATION} > resources: POST /{{entry}}/mcp"] >= 2, paths

    chat.on("<judged>", says(r"\boxed{13}"), says("[[A!=B]]"))
    trace = "c" * 31 + "1"
    assert run(traced, keyed("<judged>", "judged-1", "judged"), traceparent=f"00-{trace}-{SPAN}-01")["reward"] == 0.0
    paths = _paths(_tree(received, trace))
    judge = "resources: POST model_proxy > model_proxy: POST /rollouts/{key}/v1/responses > model_proxy: chat policy"
    assert paths[f"{VERIFY} > resources: verify judged > {judge}"] == 1, paths


def test_a_failure_is_marked_where_it_began(traced: UpMesh, chat: ChatServer, received: Collector) -> None:
    chat.on("<span-fails>", refuses(503, {"message": "busy"}))
    trace = "d" * 31 + "1"
    run(traced, keyed("<span-fails>", "fails-1"), traceparent=f"00-{trace}-{SPAN}-01")
    spans = _tree(received, trace)
    failed = {span.name: span.attributes["error.type"] for span in spans.values() if span.failed}
    assert failed["chat policy"] == "upstream_error"
    assert failed["episode"] == "model_overloaded"


def test_episodes_that_run_at_once_do_not_get_into_each_others_traces(
    traced: UpMesh, chat: ChatServer, received: Collector
) -> None:
    gate, count = Gate(), 12
    scenes = [chat.on(f"<at-once-{n}>", gate.before(says(RIGHT))) for n in range(count)]
    traces = [f"{n + 1:032x}" for n in range(count)]
    with ThreadPoolExecutor(count) as pool:
        running = [
            pool.submit(run, traced, keyed(f"<at-once-{n}>", f"at-once-{n}"), traceparent=f"00-{traces[n]}-{SPAN}-01")
            for n in range(count)
        ]
        for scene in scenes:
            scene.wait_for_call()
        gate.open()
        for one in running:
            assert one.result(BOUND_S)["reward"] == 1.0
    spans = received.wait_for(_whole_episodes(*traces))
    for n, trace in enumerate(traces):
        assert scenes[n].asked[0].headers["traceparent"][3:35] == trace
        keys = {span.attributes.get("paddock.key") for span in spans if span.trace_id == trace} - {None}
        assert keys == {f"at-once-{n}"}
        assert {line["trace_id"] for line in lines_of(traced, f"at-once-{n}")} == {trace}


# Metrics.


def test_an_episode_is_counted_by_every_service(mesh: UpMesh, chat: ChatServer) -> None:
    chat.on("<counted-all>", calls("get_weather", {"city": "Rome"}), says("Take a coat."))
    before = {service: scraped(mesh, service) for service in SERVICES}
    row = keyed("<counted-all>", "counted-all-1", "weather", rows.weather("<counted-all>"))
    assert run(mesh, row)["reward"] == 1.0
    lines_of(mesh, "counted-all-1")
    after = {service: scraped(mesh, service) for service in SERVICES}

    def rose(service: str, name: str, **labels: str) -> float:
        return risen(before[service], after[service], name, **labels)

    ended = {"environment": "weather", "outcome": "result"}
    assert rose("environment", "paddock_episodes_total", **ended, kind="none") == 1
    assert rose("environment", "paddock_episode_seconds_count", **ended) == 1
    for stage in ("seed", "agent", "cleanup", "verification"):
        assert rose("environment", "paddock_stage_seconds_count", environment="weather", stage=stage) == 1
    for state in ("ready", "active", "closed"):
        assert rose("agent", "paddock_agent_sessions_total", agent="tool_loop", state=state) == 1
    assert rose("agent", "paddock_activations_total", agent="tool_loop", end="completed") == 1
    assert rose("agent", "paddock_activation_seconds_count", agent="tool_loop") == 1
    assert rose("agent", "paddock_agent_closes_total", agent="tool_loop", outcome="closed") == 1
    for state in ("open", "verifying", "graded", "closed"):
        assert rose("resources", "paddock_resources_sessions_total", resources="weather", state=state) == 1
    assert rose("resources", "paddock_tool_calls_total", resources="weather", outcome="ok") == 1
    assert rose("resources", "paddock_verifications_total", resources="weather", outcome="graded") == 1
    assert rose("model_proxy", "paddock_model_calls_total", model="policy", outcome="ok") == 2
    assert rose("model_proxy", "paddock_upstream_statuses_total", model="policy", status="200") == 2
    assert rose("model_proxy", "paddock_upstream_attempts_total", model="policy") == 2
    assert rose("model_proxy", "paddock_first_byte_seconds_count", model="policy") == 2
    assert rose("model_proxy", "paddock_model_call_seconds_count", model="policy") == 2
    assert rose("model_proxy", "paddock_tokens_total", model="policy", direction="input") == 14
    assert rose("model_proxy", "paddock_tokens_total", model="policy", direction="output") == 4
    assert rose("model_proxy", "paddock_captures_sealed_total") == 1
    assert rose("model_proxy", "paddock_capture_bytes_total") > 500
    for service, what in (
        ("environment", "episodes"), ("agent", "activations"), ("resources", "verifications"),
        ("model_proxy", "model_calls"),
    ):  # fmt: skip
        assert after[service]["paddock_running", frozenset({("what", what)})] == 0
    assert after["environment"]["paddock_leases_held", frozenset({("what", "episode")})] == 0
    assert after["agent"]["paddock_leases_held", frozenset({("what", "agent")})] == 0


@pytest.mark.parametrize(
    ("environment", "kind", "end", "category"),
    [("math", "model_rate_limited", "failed", "rate_limit"), ("nobody", "model_error", "error", "connection")],
)
def test_a_failure_is_counted_by_its_kind_and_by_how_the_call_ended(
    mesh: UpMesh, chat: ChatServer, environment: str, kind: str, end: str, category: str
) -> None:
    chat.on("<counted-failure>", refuses(429, {"message": "slow down", "code": "rate_limit_exceeded"}))
    before = {service: scraped(mesh, service) for service in SERVICES}
    key = f"counted-failure-{environment}"
    body = run(mesh, keyed("<counted-failure>", key, environment))
    assert body["failure"]["failure_kind"] == kind, body
    lines_of(mesh, key)
    after = {service: scraped(mesh, service) for service in SERVICES}
    agent, model = ("tool_loop", "policy") if environment == "math" else ("nobody", "nobody")
    status = "429" if environment == "math" else "none"
    for service, name, labels in (
        ("environment", "paddock_episodes_total", {"environment": environment, "outcome": "failure", "kind": kind}),
        ("agent", "paddock_activations_total", {"agent": agent, "end": end}),
        ("model_proxy", "paddock_model_calls_total", {"model": model, "outcome": category}),
        ("model_proxy", "paddock_upstream_statuses_total", {"model": model, "status": status}),
    ):
        assert risen(before[service], after[service], name, **labels) == 1, (name, labels)


def test_who_waits_for_a_place_is_counted_while_it_waits_and_how_long(mesh: UpMesh, chat: ChatServer) -> None:
    gate = Gate()
    scene = chat.on("<first-in>", gate.before(says(RIGHT)))
    chat.on("<second-in>", says(RIGHT))
    before = scraped(mesh, "environment")
    queued = ("paddock_episodes_queued", frozenset({("environment", "narrow")}))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, mesh, keyed("<first-in>", "first-in-1", "narrow"))
        scene.wait_for_call()
        second = pool.submit(run, mesh, keyed("<second-in>", "second-in-1", "narrow"))
        deadline = time.monotonic() + BOUND_S
        while scraped(mesh, "environment").get(queued) != 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        waiting = scraped(mesh, "environment")
        assert waiting[queued] == 1
        assert waiting["paddock_leases_held", frozenset({("what", "admission")})] == 1
        gate.open()
        assert [one.result(BOUND_S)["reward"] for one in (first, second)] == [1.0, 1.0]
    after = scraped(mesh, "environment")
    assert after[queued] == 0
    admitted = {"environment": "narrow", "outcome": "admitted"}
    assert risen(before, after, "paddock_admission_wait_seconds_count", **admitted) == 2
    assert risen(before, after, "paddock_admission_wait_seconds_sum", **admitted) > 0


def test_no_label_takes_its_value_from_a_request(mesh: UpMesh) -> None:
    """Whatever callers send: the values are the code's own words and the configuration's names."""
    mark = "invented-by-the-caller"
    tokens = dict.fromkeys(SERVICES, MESH_TOKEN) | {"environment": CLIENT_TOKEN}
    paths = ("/run", f"/{mark}", f"/{mark}/{mark}", f"/{mark}/v1/responses", f"/{mark}/v1/agent_sessions",
             f"/{mark}/seed_session", f"/{mark}/verify", f"/rollouts/{mark}/v1/responses", f"/captures/{mark}",
             f"/episodes/{mark}", f"/weather/{mark}", "/v1/responses")  # fmt: skip
    body = {**keyed("<x>", mark), "environment": mark, "agent_ref": {"name": mark}, "model": mark, "input": "x"}
    with httpx.Client(timeout=BOUND_S, trust_env=False) as client:
        for service, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}", "X-Paddock-Key": mark, "X-Agent-Session": mark}
            for path in paths:
                for method in ("POST", "GET", "DELETE", "PROPFIND"):
                    client.request(method, mesh.urls[service] + path, json=body, headers=headers)
    loaded = configuration("http://x/v1")
    known = {
        "other", "none", "ok", *SERVICES, *(kind.value for kind in FailureKind), *(stage.value for stage in Stage),
        *(name for section in loaded.values() for name in section),
    }  # fmt: skip
    for service in SERVICES:
        for (name, labels), _ in scraped(mesh, service).items():
            for label, value in labels:
                assert mark not in value, (name, label)
                if label in OPEN_LABELS or re.fullmatch(r"[1-5]\d\d", value):
                    continue
                assert value in known or re.fullmatch(r"[a-z_]+", value), (name, label, value)


# Log lines.


def test_every_service_writes_one_line_for_an_episode_with_key_stage_and_instance(
    mesh: UpMesh, chat: ChatServer
) -> None:
    chat.on("<lines>", says(RIGHT))
    run(mesh, keyed("<lines>", "lines-1"))
    told = lines_of(mesh, "lines-1")
    assert Counter(line["service"] for line in told) == dict.fromkeys(SERVICES, 1)
    by_service = {line["service"]: line for line in told}
    for service, line in by_service.items():
        ready = httpx.get(f"{mesh.urls[service]}/readyz", timeout=BOUND_S, trust_env=False).json()
        assert line["instance"] == ready["instance"]
        assert line["level"] == "info"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert re.fullmatch(r"[0-9a-f]{32}", line["trace_id"])
    stages = {service: line["stage"] for service, line in by_service.items()}
    assert stages == {
        "environment": "verification", "agent": "cleanup", "model_proxy": "cleanup", "resources": "verification",
    }  # fmt: skip


def test_no_secret_is_in_any_line_answer_or_metric_whatever_fails(mesh: UpMesh, chat: ChatServer) -> None:
    """Servers that repeat what they were sent, addresses that hold a password, and faults at every service."""
    told = " ".join(SECRETS)
    echo = {"message": f"bad header: Authorization: Bearer {MODEL_KEY}; {MODEL_KEY}", "code": MODEL_KEY}
    answers: list[Any] = []
    for status in (400, 401, 403, 404, 429, 500, 503):
        chat.on(f"<echo-{status}>", refuses(status, echo, ("x-request-id", MODEL_KEY)))
        answers.append(run(mesh, keyed(f"<echo-{status}>", f"echo-{status}")))
    chat.on("<says-it>", says(f"{MODEL_KEY} {RIGHT}"))
    answers.append(run(mesh, keyed("<says-it>", "says-it")))
    chat.on("<judge-echo>", says(r"\boxed{13}"), refuses(401, echo))
    answers.append(run(mesh, keyed("<judge-echo>", "judge-echo", "judged")))
    for environment in ("foreign", "nobody"):
        answers.append(run(mesh, keyed("<x>", f"secret-{environment}", environment)))
    assert [body.get("failure") is not None for body in answers[:7]] == [True] * 7
    answers.append(_misused(mesh, told))
    seen = {"answers": repr(answers), "lines": mesh.told, "captures": _captures(mesh)}
    seen |= {service: repr(scraped(mesh, service)) for service in SERVICES}
    for where, text in seen.items():
        assert [secret for secret in SECRETS if secret in text] == [], where
    for line in all_lines(mesh):
        assert line["service"] in SERVICES


def _captures(mesh: UpMesh) -> str:
    headers = {"Authorization": f"Bearer {MESH_TOKEN}"}
    keys = [*(f"echo-{status}" for status in (400, 401, 503)), "says-it", "judge-echo", "secret-foreign"]
    with httpx.Client(timeout=BOUND_S, trust_env=False, headers=headers) as client:
        return "".join(client.get(f"{mesh.urls['model_proxy']}/captures/{key}").text for key in keys)


def _misused(mesh: UpMesh, told: str) -> list[str]:
    """Answers to requests that hold secrets where none belong, right and wrong tokens, whole and cut off."""
    answers = []
    session = _token("misused-1", "")
    with httpx.Client(timeout=BOUND_S, trust_env=False) as client:
        for service, url in mesh.urls.items():
            for token in (MESH_TOKEN, CLIENT_TOKEN, session, f"{session}x", "wrong"):
                headers = {"Authorization": f"Bearer {token}"}
                for path in ("/run", "/tool_loop/v1/responses", "/math/verify", "/v1/responses", "/captures/x/seal"):
                    answered = client.post(url + path, content=b'{"model": "policy", "input"', headers=headers)
                    answers.append(f"{service} {path} {answered.status_code} {answered.text}")
                    answers.append(client.post(url + path, json={"model": "policy"}, headers=headers).text)
    own = mesh.urls["agent"]
    # What a caller itself sends is repeated to that caller only, never in a log.
    client_told = httpx.post(
        f"{own}/tool_loop/v1/responses", json={"input": told}, timeout=BOUND_S, trust_env=False,
        headers={"Authorization": f"Bearer {MESH_TOKEN}", "X-Paddock-Key": "x", "X-Agent-Session": "no-such"},
    )  # fmt: skip
    assert client_told.status_code == 409
    return answers


def test_a_store_whose_address_holds_a_password_is_told_without_it(tmp_path: Path, chat: ChatServer) -> None:
    url = f"redis://:{TOOL_KEY}@127.0.0.1:{free_port()}/0"
    with _started(tmp_path, chat, PADDOCK_STORE_URL=url) as mesh:
        answered = httpx.post(
            f"{mesh.url}/run", json=keyed("<x>", "no-store-1"), timeout=BOUND_S, trust_env=False,
            headers={"Authorization": f"Bearer {CLIENT_TOKEN}"},
        )  # fmt: skip
        assert answered.status_code == 503
        assert f"127.0.0.1:{urlsplit(url).port}" in answered.text
        assert TOOL_KEY not in answered.text + mesh.told
        store = scraped(mesh, "environment")
        assert any(dict(labels).get("outcome") == "unavailable" for _, labels in store)
