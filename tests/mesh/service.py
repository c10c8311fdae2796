"""One `paddock serve` as a test talks to it: every request on a connection of its own."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from tests.mesh.processes import Running

TOKEN = "a-mesh-token-of-these-tests"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
BOUND_S = 45.0


@dataclass
class Service:
    """`url` without a slash at its end."""

    process: Running
    url: str

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=AUTHORIZED, timeout=BOUND_S, trust_env=False)

    def status(self, path: str) -> int | None:
        """None when there is no answer."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None


def wait_until(holds: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """
    Raises:
        TimeoutError: it does not hold within `bound_s`.
    """
    deadline = time.monotonic() + bound_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to that")
        time.sleep(0.01)
