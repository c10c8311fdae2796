"""Log lines: one JSON object each, with whose they are, and without credentials."""

import asyncio
import io
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from shared.contracts.failure import Stage
from shared.errors import StoreUnavailableError
from shared.redaction import hide, redact
from shared.telemetry import JsonFormatter, configure_logging, current_key, current_stage, log_as
from shared.tracing import current_trace, read_trace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Lines:
    """What a logger of its own has written."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(JsonFormatter("agent", "instance-1"))
        self.log = logging.getLogger(f"tests.{secrets.token_hex(4)}")
        self.log.propagate = False
        self.log.setLevel(logging.DEBUG)
        self.log.addHandler(self.handler)

    @property
    def all(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def lines() -> Lines:
    return Lines()


def test_a_line_tells_when_how_bad_who_and_whose(lines: Lines) -> None:
    current_key.set("r1")
    current_stage.set(Stage.AGENT)
    current_trace.set(read_trace(PARENT))
    lines.log.info("said %s", "it", extra={"reward": 1.0})
    (told,) = lines.all
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "info",
        "service": "agent",
        "instance": "instance-1",
        "message": "said it",
        "key": "r1",
        "stage": "agent",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "reward": 1.0,
    }


def test_what_is_not_there_is_left_out_and_what_a_line_says_itself_wins(lines: Lines) -> None:
    current_key.set(None)
    current_stage.set("seed")
    current_trace.set(None)
    lines.log.warning("x", extra={"stage": "cleanup"})
    (told,) = lines.all
    assert told["stage"] == "cleanup"
    assert told.keys() == {"time", "level", "service", "instance", "message", "stage"}


async def test_episodes_of_one_process_do_not_get_into_each_others_lines(lines: Lines) -> None:
    met = asyncio.Barrier(20)

    async def episode(n: int) -> None:
        current_key.set(f"r{n}")
        current_stage.set(f"stage {n}")
        current_trace.set(read_trace(f"00-{n + 1:032x}-{n + 1:016x}-01"))
        for _ in range(3):
            await met.wait()
            lines.log.info("%d", n)

    await asyncio.gather(*(episode(n) for n in range(20)))
    assert len(lines.all) == 60
    for told in lines.all:
        n = int(told["message"])
        assert (told["key"], told["stage"], told["trace_id"]) == (f"r{n}", f"stage {n}", f"{n + 1:032x}")


@contextmanager
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")
    switches = {name: getattr(logging, name) for name in names}
    try:
        yield
    finally:
        for name, value in switches.items():
            setattr(logging, name, value)
        root.handlers[:] = handlers
        root.setLevel(level)


def test_the_lines_of_a_process_carry_the_instance_that_serves_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    with _root_as_it_was():
        configure_logging("resources")
        logging.getLogger("tests.anything").info("before")
        log_as("instance-7")
        logging.getLogger("tests.anything").info("after")
    before, after = [orjson.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "instance" not in before
    assert (after["service"], after["instance"]) == ("resources", "instance-7")


LOOKS = [
    "sk-aBcDeFgH12345678",
    "Bearer aBcDeFgH12345678",
    "bearer   aBcDeFgH.12345678==",
    "pdk1.eyJrZXkiOiJyMSJ9.c2lnbmF0dXJl",
    "SK-UPPER12345",
]


def _refused_with(secret: str) -> None:
    try:
        int(f"x {secret}")
    except ValueError as error:
        raise StoreUnavailableError(f"cannot use it: {error}") from error


@pytest.mark.parametrize("secret", LOOKS)
def test_what_looks_like_a_credential_is_in_no_line(lines: Lines, secret: str) -> None:
    word = secret.split()[-1]
    try:
        _refused_with(secret)
    except StoreUnavailableError:
        lines.log.exception("failed with '%s'", secret, extra={"header": secret, "deep": {"list": [secret]}})
    assert word not in lines.stream.getvalue()
    (told,) = lines.all
    assert "StoreUnavailableError" in told["exception"]
    assert "direct cause" in told["exception"]


def test_user_and_password_of_an_address_are_in_no_line(lines: Lines) -> None:
    lines.log.error("at %s", "redis://me:pass-4711@host:1/0", extra={"to": "a@b.example", "url": "http://x/"})
    (told,) = lines.all
    assert told["message"] == "at redis://host:1/0"
    # Two fields that only together look like one: the line stays whole.
    assert (told["to"], told["url"]) == ("a@b.example", "http://x/")


@pytest.mark.parametrize(
    "secret", ["a plain secret", 'with "quotes" and \\ in it', "schlüssel-für-uns", "tab\tinside it"]
)
def test_a_hidden_secret_is_in_no_line_and_no_redacted_text_however_it_looks(lines: Lines, secret: str) -> None:
    hide(secret)
    try:
        _refused_with(secret)
    except StoreUnavailableError:
        lines.log.exception("it is %s", secret, extra={"given": [secret]})
    (told,) = lines.all
    assert secret not in told["exception"]
    assert repr(secret)[1:-1] not in told["exception"]
    assert told["message"] == "it is [credential]"
    assert redact(f"<{secret}>") == "<[credential]>"


def test_short_words_and_nothing_are_not_hidden() -> None:
    hide(None)
    hide("")
    hide("policy")
    assert redact("the policy said nothing") == "the policy said nothing"


@pytest.mark.parametrize("text", ["task-force-of-the-desk", "a bearer of news", "risk-averse", "http://host/path"])
def test_innocent_words_stay(text: str) -> None:
    assert redact(text) == text
