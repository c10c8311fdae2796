"""What the official clients of both makers raise for an upstream's errors, by way of the proxy."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.model_proxy.sdks import Clients, clients_of, guarded
from tests.model_proxy.wire import END, SSE_HEAD, WAIT_S, Asked, Handler, delta, event, raw_upstream, reply
from tests.serving import free_port

Ask = Callable[[Clients, bool], Awaitable[Any]]


async def _message(clients: Clients, stream: bool) -> Any:
    create: Any = clients.anthropic.messages.create
    return await create(model="policy", max_tokens=9, messages=[{"role": "user", "content": "go"}], stream=stream)


async def _response(clients: Clients, stream: bool) -> Any:
    create: Any = clients.openai.responses.create
    return await create(model="policy", input="go", stream=stream)


async def _completion(clients: Clients, stream: bool) -> Any:
    create: Any = clients.openai.chat.completions.create
    return await create(model="policy", messages=[{"role": "user", "content": "go"}], stream=stream)


ASKS: dict[str, tuple[Any, Ask]] = {
    "messages": (anthropic, _message),
    "responses": (openai, _response),
    "chat": (openai, _completion),
}
EACH = [
    pytest.param(*ASKS[name], stream, id=f"{name}-{stream}") for name, stream in itertools.product(ASKS, [False, True])
]
# Status, body, and the class of error that both makers' clients have for it.
STATUSES: list[tuple[int, bytes, str]] = [
    (400, b'{"error": {"message": "no"}}', "BadRequestError"),
    (401, b'{"error": {"message": "no"}}', "AuthenticationError"),
    (403, b'{"error": {"message": "no"}}', "PermissionDeniedError"),
    (404, b'{"error": {"message": "no"}}', "NotFoundError"),
    (413, b"<html>no</html>", "APIStatusError"),
    (422, b'{"detail": [{"msg": "no"}]}', "UnprocessableEntityError"),
    (429, b'{"error": {"message": "no"}}', "RateLimitError"),
    (500, b"no", "InternalServerError"),
    (503, b'{"error": {"message": "no"}}', "InternalServerError"),
    (529, b'{"type": "error"}', "InternalServerError"),
]


@contextlib.asynccontextmanager
async def before(handler: Handler, **model: Any) -> AsyncIterator[Clients]:
    """The clients before a server of Chat Completions."""
    async with raw_upstream(handler) as upstream:
        loaded = guarded(upstream="chat_completions", base_url=upstream.url, **model)
        async with clients_of(loaded) as clients:
            yield clients


@pytest.mark.behaviour("MS-2", "MS-3", "MS-5")
@pytest.mark.parametrize(("maker", "ask", "stream"), EACH)
async def test_a_client_raises_for_each_status_what_it_would_at_the_upstream(
    maker: Any, ask: Ask, stream: bool
) -> None:
    rows = iter(STATUSES)

    async def handler(asked: Asked) -> None:
        status, body, _ = next(rows)
        kind = "application/json" if body.startswith(b"{") else "text/plain"
        await asked.write(reply(status, body, ("Content-Type", kind), ("Retry-After", "17"), ("x-request-id", "r1")))

    async with before(handler) as clients:
        for status, body, name in STATUSES:
            with pytest.raises(getattr(maker, name)) as failed:
                await ask(clients, stream)
            response = failed.value.response
            assert (response.status_code, response.content) == (status, body)
            assert (response.headers["retry-after"], response.headers["x-request-id"]) == ("17", "r1")


@pytest.mark.behaviour("MS-2")
@pytest.mark.parametrize(("maker", "ask", "stream"), EACH)
async def test_a_client_is_told_that_the_upstream_cannot_be_reached(maker: Any, ask: Ask, stream: bool) -> None:
    loaded = guarded(upstream="chat_completions", base_url=f"http://127.0.0.1:{free_port()}/v1")
    async with clients_of(loaded) as clients:
        with pytest.raises(maker.InternalServerError, match="cannot be reached") as failed:
            await ask(clients, stream)
    assert failed.value.status_code == 502


@pytest.mark.behaviour("MS-2")
@pytest.mark.parametrize(("maker", "ask", "stream"), EACH)
async def test_a_client_is_told_that_the_upstream_dropped_the_connection(maker: Any, ask: Ask, stream: bool) -> None:
    async def drop(asked: Asked) -> None:
        asked.hang_up()

    async with before(drop) as clients:
        with pytest.raises(maker.InternalServerError, match="dropped the connection") as failed:
            await ask(clients, stream)
    assert failed.value.status_code == 502


@pytest.mark.behaviour("MS-2")
@pytest.mark.parametrize(("maker", "ask", "stream"), EACH)
async def test_a_client_is_told_that_the_upstream_is_silent(maker: Any, ask: Ask, stream: bool) -> None:
    async def hang(asked: Asked) -> None:
        await asked.gone.wait()

    async with before(hang, timeout_s=0.2) as clients:
        with pytest.raises(maker.InternalServerError, match="did not answer in time") as failed:
            await ask(clients, stream)
    assert failed.value.status_code == 504


@pytest.mark.behaviour("MS-4")
async def test_anthropics_client_that_leaves_a_stream_ends_the_upstreams_call() -> None:
    gone = asyncio.Event()

    async def talk(asked: Asked) -> None:
        await asked.write(SSE_HEAD + event(delta({"content": "one"})))
        await asked.gone.wait()
        gone.set()
        await asked.write(END)

    async with before(talk) as clients:
        async with clients.anthropic.messages.stream(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": "go"}]
        ) as stream:
            assert await anext(aiter(stream.text_stream)) == "one"
        async with asyncio.timeout(WAIT_S):
            await gone.wait()
