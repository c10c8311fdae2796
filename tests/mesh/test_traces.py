"""One trace through every hop of an episode, whether it is recorded or not."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from shared.tracing import read_trace
from tests.mesh import rows
from tests.mesh.chat import ChatServer, Gate, calls, refuses, says
from tests.mesh.processes import SERVICES, UpMesh
from tests.mesh.watched import BOUND_S, COLLECTOR_KEY, RIGHT, SPAN, TRACE, keyed, lines_of, run, started, token_of
from tests.otlp import Collector, Received, collector


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, chat: ChatServer) -> Iterator[UpMesh]:
    """Without a collector."""
    with started(tmp_path_factory.mktemp("plain"), chat) as running:
        yield running


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
    with started(tmp_path_factory.mktemp("traced"), chat, **environ) as running:
        yield running


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


def test_the_calls_of_a_harness_that_knows_no_trace_are_in_its_episodes_trace(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<opaque>", says("hello"))
    _call_model(mesh, token_of("opaque-1", f"00-{TRACE}-{SPAN}-01 a=b"), "<opaque>")
    headers = scene.asked[0].headers
    assert (headers["traceparent"], headers["tracestate"]) == (f"00-{TRACE}-{SPAN}-01", "a=b")


def test_a_harness_that_continues_its_trace_is_followed(mesh: UpMesh, chat: ChatServer) -> None:
    scene = chat.on("<aware>", says("hello"))
    further = f"00-{TRACE}-{'e' * 16}-01"
    _call_model(mesh, token_of("aware-1", f"00-{TRACE}-{SPAN}-01"), "<aware>", traceparent=further)
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
