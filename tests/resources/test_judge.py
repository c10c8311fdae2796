"""The judge: asked through the model proxy, and a sample is masked when it fails."""

from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.resources.rig import FAKES, answer, loaded, resources, verify_body
from tests.serving import serving


class Proxy:
    """A model proxy that answers as it is told."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[str, str | None, Any]] = []

    async def respond(self, request: Request) -> Response:
        self.seen.append((request.url.path, request.headers.get("authorization"), orjson.loads(await request.body())))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return JSONResponse(body, status)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.respond, methods=["POST"])])


async def _judged(proxy: Proxy) -> dict[str, Any]:
    task = {"name": "judged", "end": "judge"}
    async with serving(proxy.app()) as proxy_url:
        settings = loaded(
            {"judged": {"verifier": "scripted", "judge": "referee"}},
            models={"referee": {"upstream": "scripted"}},
            services={"model_proxy": {"url": proxy_url}},
            security={"mesh_token": "mesh-secret"},
        )
        async with resources(settings, plugins=FAKES, token="mesh-secret") as server:
            cookies = await server.seed("judged", "s", task, episode_id={"rollout_id": "roll", "attempt": 2})
            first = await server.post("judged/verify", verify_body(task), cookies=cookies)
            again = await server.post("judged/verify", verify_body(task), cookies=cookies)
    assert first.status_code == 200, first.text
    assert first.content == again.content
    verdict: dict[str, Any] = first.json()
    return verdict


async def test_a_judge_is_asked_through_the_proxy_under_the_episodes_key() -> None:
    proxy = Proxy((200, answer("yes, right")))
    verdict = await _judged(proxy)
    assert verdict["said"] == "yes, right"
    assert proxy.seen == [
        (
            "/rollouts/roll-a2/v1/responses",
            "Bearer mesh-secret",
            {
                "model": "referee",
                "input": [
                    {"role": "system", "content": "You are a judge."},
                    {"role": "user", "content": "Is it right?"},
                ],
            },
        )
    ]


@pytest.mark.behaviour("RS-3")
@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, {"error": {"message": "no such key"}}, "401: no such key"),
        (400, {"error": {"message": "too long"}}, "400: too long"),
        (200, answer("so") | {"status": "incomplete"}, "'incomplete'"),
        (200, answer("so") | {"status": "failed"}, "'failed'"),
        (200, answer("  "), "no text"),
        (200, [], "status"),
    ],
)
async def test_a_judge_that_fails_masks_the_sample(status: int, body: Any, says: str) -> None:
    verdict = await _judged(Proxy((status, body)))
    assert (verdict["reward"], verdict["mask_sample"]) == (0.0, True)
    assert verdict["failure_kind"] == "judge_failed"
    assert says in verdict["failure_reason"]


async def test_a_judge_is_asked_again_while_its_failure_may_pass() -> None:
    proxy = Proxy((503, {"error": {"message": "busy"}}), (200, answer("yes")))
    assert (await _judged(proxy))["said"] == "yes"
    assert len(proxy.seen) == 2
