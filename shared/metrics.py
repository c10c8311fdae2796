"""The mesh's metrics: every name, label and meaning in one place. `python -m shared.metrics` prints their table.

A gauge tells of its own process; summed over the instances it tells of the mesh, also after one has died. What
several replicas change in turn (a session's state) is counted by the one that wrote it.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Final, Literal, get_args

from shared.contracts.capture import ErrorCategory
from shared.contracts.failure import FailureKind, Stage
from shared.metric_families import ALL, Entry, Vocabulary
from shared.settings import SERVICE_NAMES, Settings

ActivationEnd = Literal["completed", "incomplete", "failed", "error", "deadline", "closed", "shutdown", "lost"]
AgentState = Literal["seeding", "ready", "active", "stopping", "collected", "closed", "setup_failed", "fenced"]
CloseOutcome = Literal["closed", "unknown", "failed"]
EpisodeOutcome = Literal["result", "failure", "refused"]
ResourcesState = Literal["open", "verifying", "graded", "closed"]
StoreOutcome = Literal["ok", "conflict", "fenced", "unavailable", "cancelled", "error"]
ToolOutcome = Literal["ok", "refused", "failed"]
VerificationOutcome = Literal["graded", "masked", "failed"]
Work = Literal["episodes", "activations", "verifications", "model_calls"]

FLUSH_EVERY_S: Final = 1.0
LEASED: Final = ("episode", "admission", "agent", "resources", "sandbox")
STORE_OPERATIONS: Final = (
    "get", "create", "replace", "delete", "wait_for_change", "acquire", "renew", "release", "append", "append_and_get",
    "read_log", "add_member", "remove_member", "members",
)  # fmt: skip
_STATUSES: Final = ("none", *(str(status) for status in range(100, 600)))
FAST_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.0, 10.0)
_CALL_S: Final = (0.002, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0)
_STAGE_S: Final = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0, 1800.0, 7200.0, 21600.0)
_BATCH_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Names:
    """What the configuration names, and labels may therefore hold."""

    environments: frozenset[str] = frozenset()
    agents: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: Settings) -> "Names":
        named = (settings.environments, settings.agents, settings.resources, settings.models)
        return cls(*(frozenset(section) for section in named))


class Metrics:
    """All metrics, of which an application exposes those of its service, if it is given.

    Without `names` no name of a configuration is known.
    """

    def __init__(self, names: Names | None = None, service: str | None = None) -> None:
        known = Names() if names is None else names
        self._vocabulary = Vocabulary(service)
        self.registry = self._vocabulary.registry
        self._add_http()
        self._add_store()
        self._add_reaper()
        self._add_environment(known)
        self._add_agent(known)
        self._add_resources(known)
        self._add_model_proxy(known)
        self._begin_what_alerts_watch(known)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._vocabulary.entries)

    def flush(self) -> None:
        """Hand on to the registry what was noted since the last time; before it is read."""
        self._vocabulary.flush()

    @asynccontextmanager
    async def handed_on(self) -> AsyncIterator[None]:
        """Flush now and then until the block ends: a scrape meets one worker, and is told of the others, too."""
        flushing = asyncio.create_task(self._flush_for_ever(), name="metrics", context=Context())
        try:
            yield
        finally:
            flushing.cancel()
            self.flush()

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self.flush()

    def _begin_what_alerts_watch(self, known: Names) -> None:
        rare = (self.leases_lost, self.lease_renew_failures, self.taken_over, self.handed_over, self.agent_closes)
        for family in rare:
            family.begin()
        for environment in known.environments:
            self.episodes.begin(environment, "failure", FailureKind.CLEANUP_UNPROVEN)

    def _add_http(self) -> None:
        every = self._vocabulary.of(ALL)
        self.build = every.gauge(
            "paddock_build_info", "1; the labels tell the service and its version.", service=SERVICE_NAMES, version=None
        )
        self.requests = every.counter(
            "paddock_requests", "HTTP requests by route and status; `none` when no status was sent.",
            route=None, status=_STATUSES,
        )  # fmt: skip
        self.request_seconds = every.histogram(
            "paddock_request_seconds", "From a request to the end of its answer.", _CALL_S, route=None
        )
        self.requests_in_flight = every.gauge("paddock_requests_in_flight", "HTTP requests that are being answered.")
        self.running = every.gauge("paddock_running", "Work under way, by what it is.", what=get_args(Work))

    def _add_store(self) -> None:
        every = self._vocabulary.of(ALL)
        self.store_seconds = every.histogram(
            "paddock_store_seconds",
            "Operations of the Redis store by how they ended; `wait_for_change` and `acquire` may wait by intent.",
            FAST_S, op=STORE_OPERATIONS, outcome=get_args(StoreOutcome),
        )  # fmt: skip
        self.store_batch_size = every.histogram(
            "paddock_store_batch_size", "Commands that went to Redis together.", _BATCH_SIZES
        )
        self.leases_held = every.gauge("paddock_leases_held", "Claims that are kept alive, by their kind.", what=LEASED)
        self.leases_lost = every.counter(
            "paddock_leases_lost", "Claims that ran out or were taken over while they were held.", what=LEASED
        )
        self.lease_renew_failures = every.counter(
            "paddock_lease_renew_failures", "Renewals that the store did not answer; they are tried again.", what=LEASED
        )

    def _add_reaper(self) -> None:
        every = self._vocabulary.of(ALL)
        self.reaper_passes = every.counter(
            "paddock_reaper_passes", "Looks for what dead replicas left, by how they ended.",
            service=SERVICE_NAMES, outcome=("ok", "failed"),
        )  # fmt: skip
        self.taken_over = every.counter(
            "paddock_taken_over", "Episodes and sessions of another replica that this one continued or finished.",
            service=SERVICE_NAMES,
        )  # fmt: skip
        self.handed_over = every.counter(
            "paddock_handed_over", "Episodes and sessions that were left to another replica by a stop.",
            service=SERVICE_NAMES,
        )  # fmt: skip

    def _add_environment(self, known: Names) -> None:
        environment = self._vocabulary.of("environment")
        outcomes = get_args(EpisodeOutcome)
        self.episodes = environment.counter(
            "paddock_episodes", "Episodes that ended, by outcome and failure kind.",
            environment=known.environments, outcome=outcomes, kind=("none", *FailureKind),
        )  # fmt: skip
        self.episode_seconds = environment.histogram(
            "paddock_episode_seconds", "From the admission to the stored answer.", _STAGE_S,
            environment=known.environments, outcome=outcomes,
        )  # fmt: skip
        self.stage_seconds = environment.histogram(
            "paddock_stage_seconds", "Duration of an episode's stages.", _STAGE_S,
            environment=known.environments, stage=(*Stage, "unwind"),
        )  # fmt: skip
        self.episodes_queued = environment.gauge(
            "paddock_episodes_queued", "Episodes that wait for admission.", environment=known.environments
        )
        self.admission_wait_seconds = environment.histogram(
            "paddock_admission_wait_seconds", "Wait for a place where places are limited, by how it ended.", _CALL_S,
            environment=known.environments, outcome=("admitted", "refused", "cancelled"),
        )  # fmt: skip

    def _add_agent(self, known: Names) -> None:
        agent = self._vocabulary.of("agent")
        self.agent_sessions = agent.counter(
            "paddock_agent_sessions", "Agent sessions that came into a state, by who wrote it.",
            agent=known.agents, state=get_args(AgentState),
        )  # fmt: skip
        self.activations = agent.counter(
            "paddock_activations", "Activations by how they ended, by who stored the end.",
            agent=known.agents, end=get_args(ActivationEnd),
        )  # fmt: skip
        self.activation_seconds = agent.histogram(
            "paddock_activation_seconds", "Run of a harness, waiting for a place included.", _STAGE_S,
            agent=known.agents,
        )  # fmt: skip
        self.agent_closes = agent.counter(
            "paddock_agent_closes", "Closes of agent sessions; replayed receipts are not counted.",
            agent=known.agents, outcome=get_args(CloseOutcome),
        )  # fmt: skip

    def _add_resources(self, known: Names) -> None:
        resources = self._vocabulary.of("resources")
        self.resources_sessions = resources.counter(
            "paddock_resources_sessions", "Resources sessions that came into a state, by who wrote it.",
            resources=known.resources, state=get_args(ResourcesState),
        )  # fmt: skip
        self.verifications = resources.counter(
            "paddock_verifications", "Verifications by how they ended; replayed verdicts are not counted.",
            resources=known.resources, outcome=get_args(VerificationOutcome),
        )  # fmt: skip
        self.tool_calls = resources.counter(
            "paddock_tool_calls", "Calls of lent tools: served, refused for the call's own fault, or failed.",
            resources=known.resources, outcome=get_args(ToolOutcome),
        )  # fmt: skip
        self.grading_children = resources.gauge("paddock_grading_children", "Child processes that grade mathematics.")
        self.grading_busy = resources.gauge("paddock_grading_busy", "Grading children that compare at the moment.")
        self.grading_killed = resources.counter(
            "paddock_grading_killed", "Grading children that were ended in the middle of a comparison, or died in it."
        )

    def _add_model_proxy(self, known: Names) -> None:
        proxy = self._vocabulary.of("model_proxy")
        models = known.models
        self.model_calls = proxy.counter(
            "paddock_model_calls", "Model calls by how they ended: `ok`, or the capture's error category.",
            model=models, outcome=("ok", *ErrorCategory),
        )  # fmt: skip
        self.model_call_seconds = proxy.histogram(
            "paddock_model_call_seconds", "Model calls to their recorded end.", _CALL_S, model=models
        )
        self.first_byte_seconds = proxy.histogram(
            "paddock_first_byte_seconds", "Wait for the upstream's first byte.", _CALL_S, model=models
        )
        self.upstream_statuses = proxy.counter(
            "paddock_upstream_statuses", "Answers of model upstreams by status; `none` when there was no answer.",
            model=models, status=_STATUSES,
        )  # fmt: skip
        self.upstream_attempts = proxy.counter(
            "paddock_upstream_attempts", "Requests that were sent to upstreams, repeated ones included.", model=models
        )
        self.tokens = proxy.counter(
            "paddock_tokens", "Tokens as upstreams count them.", model=models, direction=("input", "output")
        )
        self.captures_sealed = proxy.counter("paddock_captures_sealed", "Captures that were sealed, repeats included.")
        self.capture_bytes = proxy.counter("paddock_capture_bytes", "Bytes that were added to captures.")


def table() -> Iterator[str]:
    """The vocabulary as it stands in the documentation."""
    yield "| metric | type | labels | service | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for entry in Metrics().entries:
        labels = ", ".join(f"`{name}`" for name in entry.labels)
        yield f"| `{entry.name}` | {entry.type} | {labels} | {entry.service} | {entry.meaning} |"


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in table()))
