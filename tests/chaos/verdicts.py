"""What must hold of episodes whatever was done to the mesh; each breach is a sentence."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

import orjson

from services.agent.record import AgentSession, State, record_key
from services.environment.page import OPEN, episode_key
from services.environment.record import decoded
from shared.contracts.failure import FailureKind
from tests.chaos.clients import Client, Episode
from tests.chaos.fleet import Fleet
from tests.chaos.model import numbers_in

SETTLED_S = 60.0
LOOK_S = 0.1


async def breaches(fleet: Fleet, client: Client, episodes: Sequence[Episode]) -> list[str]:
    """Everything that is wrong with these episodes, once the mesh has come to rest."""
    found = [*client.unanswered, *await _left_running(fleet)]
    for episode in episodes:
        found += _of_outcome(fleet, episode)
    found += await _of_replays(fleet, client, episodes)
    found += _of_turns(fleet, {episode.key for episode in episodes})
    found += await _of_sessions(fleet, episodes)
    without = await asyncio.to_thread(fleet.redis.keys_without_ttl)
    return found + [f"the store keeps {key} for ever" for key in without]


async def retried(fleet: Fleet, client: Client, episodes: Sequence[Episode]) -> list[Episode]:
    """The next attempt at what failed, in calm."""
    failed = {episode.task: episode for episode in episodes if episode.failure is not None}
    ended = await asyncio.gather(*(client.run(fleet.url, task, old.attempt + 1) for task, old in failed.items()))
    return [episode for episode in ended if episode is not None]


def _of_outcome(fleet: Fleet, episode: Episode) -> list[str]:
    key, failure = episode.key, episode.failure
    if ("result" in episode.answer) == (failure is not None):
        return [f"{key} has not exactly one of result and failure: {episode.answer}"]
    if failure is not None:
        known = failure["failure_kind"] in {kind.value for kind in FailureKind}
        return [] if known and not failure["terminal"] else [f"{key} failed for good: {failure}"]
    return [f"{key}: {wrong}" for wrong in _of_result(fleet, episode)]


def _of_result(fleet: Fleet, episode: Episode) -> Iterable[str]:
    result, evidence = episode.answer["result"], episode.answer["evidence"]
    if result["mask_sample"]:
        if result.get("failure_kind") != FailureKind.JUDGE_FAILED:
            yield f"it is masked for no reason: {result}"
    elif result["reward"] != episode.task.reward:
        yield f"the reward is {result['reward']}; {episode.task.reward} is right"
    said = numbers_in(orjson.dumps(result["response"]["output"]).decode())
    if len(said) != 1 or not said <= fleet.model.served[episode.key]:
        yield f"what was graded is not what the model said: {said}, {fleet.model.served[episode.key]}"
    receipt = evidence.get("close_receipt")
    if receipt is None or receipt["status"] != "closed" or receipt["cleanup"]["cleanup_confirmed"] is not True:
        yield f"it was graded without proof that the agent is gone: {receipt}"
    if evidence.get("cleanup_errors"):
        yield f"something was not cleaned up: {evidence['cleanup_errors']}"


def _of_turns(fleet: Fleet, keys: set[str]) -> list[str]:
    """Every activation asks the model for its first turn, and the mesh repeats no model call."""
    found = []
    for key in sorted(keys):
        twice = {turn: count for turn, count in fleet.model.turns[key].items() if count > 1}
        if 0 in twice:
            found.append(f"{key} was activated {twice[0]} times")
        elif twice:
            found.append(f"{key}: the model was asked more than once for turns {twice}")
    return found


async def _of_replays(fleet: Fleet, client: Client, episodes: Sequence[Episode]) -> list[str]:
    """Every replica tells the same, and so does the request when it is sent again."""
    outcomes: dict[str, bytes] = {}
    found = []
    for episode in episodes:
        if outcomes.setdefault(episode.key, episode.raw) != episode.raw:
            found.append(f"{episode.key} has two outcomes: {outcomes[episode.key]!r} and {episode.raw!r}")
    tasks = {episode.key: (episode.task, episode.attempt) for episode in episodes}
    for key, raw in outcomes.items():
        told = [(await replica.get(f"/episodes/{key}")).content for replica in fleet.replicas["environment"]]
        again = await client.run(fleet.url, *tasks[key])
        told.append(b"nothing" if again is None else again.raw)
        found += [f"{key} ended as {raw!r}, and is told as {other!r}" for other in told if other != raw]
    return found


async def _left_running(fleet: Fleet) -> list[str]:
    """Open episodes when there should be none; whoever stopped before it took them off the list is waited for."""
    left: set[str] = set()
    for _ in range(round(SETTLED_S / LOOK_S)):
        if not (left := await fleet.store.members(OPEN)):
            break
        await asyncio.sleep(LOOK_S)
    return [f"{key} is still open" for key in sorted(left)]


async def _of_sessions(fleet: Fleet, episodes: Sequence[Episode]) -> list[str]:
    """The agent's sessions are closed, unless the outcome says that this could not be done."""
    found = []
    for episode in episodes:
        if episode.answer["evidence"].get("cleanup_errors"):
            continue
        stored = await fleet.store.get(episode_key(episode.key))
        assert stored is not None
        session = await fleet.store.get(record_key(decoded(stored.value).agent_session_id))
        state = None if session is None else AgentSession.from_bytes(session.value).state
        if state not in {None, State.CLOSED, State.FENCED}:
            found.append(f"{episode.key}: the agent's session was left {state}")
    return found


def table(episodes: Sequence[Episode]) -> list[str]:
    """How many ended how, by kind, and how long they took."""
    counts = Counter(episode.ended_as for episode in episodes)
    taken_over = sum(episode.answer["evidence"].get("takeovers", 0) > 0 for episode in episodes)
    lines = [f"{count:5} {ended_as}" for ended_as, count in counts.most_common()]
    return [*lines, f"{taken_over:5} of {len(episodes)} were taken over"]


def times(takeovers: Sequence[tuple[str, float]]) -> list[str]:
    """By fault: how many takeovers, and the slowest of them and of 95 % of them in seconds."""
    lines = []
    for fault in sorted({fault for fault, _ in takeovers}):
        taken = sorted(seconds for of, seconds in takeovers if of == fault)
        p95 = taken[min(len(taken) - 1, int(0.95 * len(taken)))]
        lines.append(f"{len(taken):5} takeovers after '{fault}': p95 {p95:.2f} s, max {taken[-1]:.2f} s")
    return lines
