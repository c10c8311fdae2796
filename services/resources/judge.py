"""Ask the configured judge model, through the model proxy under the episode's own key.

The call carries the mesh token, so the proxy records it with the episode's capture in phase `verify`.
"""

import asyncio
from typing import Any, Final

import orjson

from shared.clients.model_proxy import SERVICE, model_base_url
from shared.contracts.failure import Origin
from shared.contracts.responses import output_text
from shared.deadline import Deadline
from shared.errors import JudgeError, PaddockError
from shared.http.client import HttpClient, Reply
from shared.http.problems import excerpt

ATTEMPTS: Final = 3
FIRST_PAUSE_S: Final = 0.5


class ProxyJudge:
    """Implements `shared.ports.verifier.Judge` for one model and one episode."""

    def __init__(self, http: HttpClient, proxy_url: str, model: str, key: str, limit_s: float) -> None:
        self._http = http
        self._url = f"{model_base_url(proxy_url, key)}/responses"
        self._model = model
        self._limit_s = limit_s

    async def ask(self, prompt: str, *, system: str | None = None, timeout_s: float | None = None) -> str:
        """The text of the model's answer; asked again while the failure may pass and time is left.

        Raises:
            JudgeError: the call failed, or the answer was cut off or empty.
        """
        messages = [{"role": "system", "content": system}] if system is not None else []
        body = orjson.dumps({"model": self._model, "input": [*messages, {"role": "user", "content": prompt}]})
        deadline = Deadline.after(min(timeout_s or self._limit_s, self._limit_s))
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = await self._http.request(
                    "POST", self._url, service=SERVICE, timeout_s=max(0.001, deadline.left_s), body=body
                )
            except PaddockError as error:
                pause_s = max(pause_s, error.retry_after_s or 0.0)
                if error.terminal or attempt == ATTEMPTS or deadline.left_s <= pause_s:
                    raise self._failed(error.message, error.origin) from error
                await asyncio.sleep(pause_s)
                pause_s *= 2
            else:
                return self._text(reply)
        raise AssertionError("the last attempt returns or raises")

    def _text(self, reply: Reply) -> str:
        origin = Origin(service=SERVICE, status=reply.status, body_excerpt=excerpt(reply.body))
        try:
            response: Any = orjson.loads(reply.body)
        except orjson.JSONDecodeError as error:
            raise self._failed("its answer is not JSON", origin) from error
        status = response.get("status") if isinstance(response, dict) else None
        if status != "completed":
            raise self._failed(f"its answer has the status '{status}' instead of 'completed'", origin)
        text = output_text(response)
        if not text.strip():
            raise self._failed("its answer holds no text", origin)
        return text

    def _failed(self, why: str, origin: Origin | None) -> JudgeError:
        return JudgeError(f"The judge '{self._model}' could not be asked: {why}", origin=origin)
