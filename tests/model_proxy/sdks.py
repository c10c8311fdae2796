"""The official clients of both makers before the model proxy, which none of them calls a second time."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai

from shared.contracts.capture import Capture
from shared.settings import LoadedSettings
from shared.tokens import SessionClaims, Signer
from tests.model_proxy.wire import WAIT_S, Proxy, proxy_of, settings_of

MESH = "mesh-token-of-these-tests"
KEY = "k"


class Clients:
    """Both makers' clients with a session token, none of which tries a call again."""

    def __init__(self, proxy: Proxy) -> None:
        claims = SessionClaims(key=KEY, model="policy", expires_at=time.time() + 60)
        token = Signer(MESH, "session-token").session_token(claims)
        self.proxy = proxy
        self.anthropic = anthropic.AsyncAnthropic(
            api_key=token,
            base_url=proxy.url,
            max_retries=0,
            timeout=WAIT_S,
            http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False, verify=False),
        )
        self.openai = openai.AsyncOpenAI(
            api_key=token,
            base_url=f"{proxy.url}/v1",
            max_retries=0,
            timeout=WAIT_S,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=False),
        )

    async def capture(self) -> Capture:
        answer = await self.proxy.http.get(f"/captures/{KEY}", headers={"Authorization": f"Bearer {MESH}"})
        return Capture.model_validate_json(answer.content)


def guarded(**model: Any) -> LoadedSettings:
    return settings_of({"model": "up", **model}, security={"mesh_token": MESH})


@contextlib.asynccontextmanager
async def clients_of(loaded: LoadedSettings) -> AsyncIterator[Clients]:
    async with proxy_of(loaded) as proxy:
        clients = Clients(proxy)
        async with clients.anthropic, clients.openai:
            yield clients
