"""`paddock episodes`: what an environment server has in hand, as a person asks for it: list, watch, cancel."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

import httpx

from services.collector.call import Trouble
from services.collector.connection import CONNECT_TIMEOUT_S, host_of, nobody_there, token_refused, why
from services.collector.options import EXIT_OK, EXIT_ROWS_FAILED, RunError
from shared.http.problems import read
from shared.settings import is_loopback

STATES: Final = ("queued", "running", "done")
MOST: Final = 1000
ANSWER_TIMEOUT_S: Final = 30.0
# A stream without a change of stage is silent; so long, then it is asked for anew in case it is dead.
SILENCE_S: Final = 60.0
PATIENCE_S: Final = 300.0


def add_episodes_arguments(parser: argparse.ArgumentParser) -> None:
    _add_url(parser, None)
    parser.add_argument("--state", choices=STATES, help="only episodes in this state")
    parser.add_argument("--limit", type=int, default=100, metavar="N", help=f"at most {MOST} (default: 100)")
    parser.add_argument("--after", default="", metavar="KEY", help="only keys after this one, in their order")
    actions = parser.add_subparsers(title="instead of a list", metavar="[ACTION]")
    watch = actions.add_parser("watch", help="tell each change of stage until the end, and then the outcome")
    watch.add_argument("key", metavar="KEY", help="rollout id, with -aN for attempt N from 1 on")
    watch.set_defaults(act=_watch)
    cancel = actions.add_parser("cancel", help="cancel episodes: their cleanup runs, nothing is graded")
    cancel.add_argument("keys", nargs="+", metavar="KEY")
    cancel.set_defaults(act=_cancel)
    for action in (watch, cancel):
        _add_url(action, argparse.SUPPRESS)
    parser.set_defaults(act=_list)


def _add_url(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--url", default=default, help="environment server (else PADDOCK_ENVIRONMENT_URL, else the configured one)"
    )


def episodes(arguments: argparse.Namespace, url: str, token: str | None) -> int:
    """Do what the words say; returns the exit status."""
    try:
        with Episodes(url, token) as server:
            status: int = arguments.act(arguments, server)
            return status
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status


class Episodes:
    """The episodes of one environment server; use it as a context manager. Every method raises RunError."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not is_loopback(host_of(self._url)),
        )

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def list(self, state: str | None, limit: int, after: str) -> list[dict[str, Any]]:
        """Key, environment, state and stage of each, in the order of the keys."""
        asked = {"limit": limit, "after": after} | ({"state": state} if state else {})
        found: list[dict[str, Any]] = self._told("GET", "/episodes", params=asked).get("episodes", [])
        return found

    def cancel(self, key: str) -> dict[str, Any]:
        """Where the episode was when it was cancelled."""
        return self._told("DELETE", _path(key))

    def outcome(self, key: str) -> dict[str, Any]:
        """The answer of an episode that has ended."""
        return self._told("GET", _path(key))

    def changes(self, key: str) -> Iterator[dict[str, Any]]:
        """What is told of the episode, each time that it is another, until it has ended."""
        trouble, last = Trouble(PATIENCE_S), None
        while True:
            why_not = "the stream ends before the episode does"
            try:
                for name, told in self._events(key):
                    trouble.over()
                    if name in {"stage", "end"} and told != last:
                        last = told
                        yield told
                    if name == "end":
                        return
            except httpx.RequestError as error:
                if last is None:
                    raise RunError(nobody_there(self._url, error)) from error
                why_not = why(error)
            pause_s = trouble.pause_s()
            if pause_s is None:
                raise RunError(f"The episode '{key}' cannot be watched any more at {self._url}: {why_not}.")
            time.sleep(pause_s)

    def _events(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The server-sent events of one connection."""
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S)
        with self._client.stream("GET", f"{_path(key)}/events", timeout=timeout) as reply:
            if reply.status_code in {502, 503, 504}:
                return
            if not reply.is_success:
                reply.read()
            self._check(reply)
            name = ""
            for line in reply.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

    def _told(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            reply = self._client.request(method, path, **more)
        except httpx.RequestError as error:
            raise RunError(nobody_there(self._url, error)) from error
        self._check(reply)
        try:
            return dict(reply.json())
        except ValueError as error:
            raise RunError(f"What answers at {self._url} is no environment server.") from error

    def _check(self, reply: httpx.Response) -> None:
        if reply.status_code in {401, 403}:
            raise token_refused(self._url, reply.status_code, given=self._token is not None)
        if not reply.is_success:
            raise RunError(read(reply.status_code, dict(reply.headers), reply.content, service=self._url).message)


def _path(key: str) -> str:
    return f"/episodes/{quote(key, safe='')}"


def _list(arguments: argparse.Namespace, server: Episodes) -> int:
    found = server.list(arguments.state, arguments.limit, arguments.after)
    width = max((len(episode["key"]) for episode in found), default=0)
    for episode in found:
        print(f"{episode['key']:<{width}}  {episode['state']:<7}  {episode['stage']:<12}  {episode['environment']}")
    if not found:
        print("There are none.", file=sys.stderr)
    elif len(found) == arguments.limit:
        print(f"There may be more: --after {found[-1]['key']}", file=sys.stderr)
    return EXIT_OK


def _cancel(arguments: argparse.Namespace, server: Episodes) -> int:
    missed = 0
    for key in arguments.keys:
        try:
            told = server.cancel(key)
            print(f"{key}: cancelled, {told['state']} at stage {told['stage']} until its cleanup is done")
        except RunError as error:
            missed += 1
            print(f"{key}: {error}", file=sys.stderr)
    return EXIT_ROWS_FAILED if missed else EXIT_OK


def _watch(arguments: argparse.Namespace, server: Episodes) -> int:
    for told in server.changes(arguments.key):
        now = datetime.now().astimezone().strftime("%H:%M:%S")
        print(f"{now}  {told['state']:<7}  {told['stage']}", flush=True)
    outcome = server.outcome(arguments.key)
    failure = outcome.get("failure")
    if failure is None:
        print(f"reward {outcome.get('result', outcome).get('reward')}")
        return EXIT_OK
    again = "" if failure["terminal"] else " (may be tried again)"
    print(f"failed at stage {failure['stage']}: {failure['failure_kind']}{again}: {failure['failure_reason']}")
    return EXIT_ROWS_FAILED
