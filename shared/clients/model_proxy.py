"""The model proxy's captures, as the agent server sees them, and the address of its models.

`model_base_url` is the one place where a harness's model address is built.
"""

from typing import Final
from urllib.parse import quote

from shared.contracts.capture import Capture
from shared.http.client import HttpClient

SERVICE: Final = "model_proxy"
# The code of the proxy's error when a session token's bound is reached.
SESSION_LIMIT_REACHED: Final = "session_limit_reached"


def model_base_url(proxy_url: str, key: str | None = None) -> str:
    """An OpenAI-style base address. With a session token no key is needed; the mesh token needs one."""
    prefix = f"/rollouts/{quote(key, safe='')}" if key is not None else ""
    return f"{proxy_url.rstrip('/')}{prefix}/v1"


class ModelProxyClient:
    def __init__(self, http: HttpClient, server_url: str) -> None:
        self._http = http
        self._url = server_url

    async def seal(self, key: str, *, timeout_s: float) -> Capture:
        """Refuse session tokens of this key from now on, end its calls, and return their facts; idempotent.

        It takes some seconds when a call is not recorded in time; such a call comes with the category `lost`.
        """
        url = f"{self._captures(key)}/seal?bodies=false"
        reply = await self._http.request("POST", url, service=SERVICE, timeout_s=timeout_s, replayable=True)
        return Capture.model_validate_json(reply.body)

    async def read(self, key: str, *, timeout_s: float) -> Capture:
        """What was captured so far, requests and responses included."""
        reply = await self._http.request(
            "GET", self._captures(key), service=SERVICE, timeout_s=timeout_s, replayable=True
        )
        return Capture.model_validate_json(reply.body)

    def _captures(self, key: str) -> str:
        return f"{self._url}/captures/{quote(key, safe='')}"
