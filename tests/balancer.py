"""The shipped balancer as a real HAProxy on this machine, before servers that the test has started.

Its rules are those of `deploy/balancer/haproxy.cfg`; only the list of servers is the test's. It listens on the
four default ports of a loopback address of its own, so that any number of balancers run side by side.
"""

import csv
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

RULES = Path(__file__).parents[1] / "deploy" / "balancer" / "haproxy.cfg"
PORTS = {"environment": 8100, "agent": 8200, "model_proxy": 8300, "resources": 8400}
STATUS_PORT = 8500
BOUND_S = 15.0

Servers = Mapping[str, Sequence[str]]
"""By service (`environment`, `agent`, `model_proxy`, `resources`): the addresses of its replicas."""


def start(servers: Servers, address: str | None = None) -> "Balancer":
    """A balancer that takes requests; stop it, or use it as a context manager.

    `address` is that of one that was stopped, whose place it takes.
    """
    return Balancer(servers, address)


class Balancer:
    def __init__(self, servers: Servers, address: str | None = None) -> None:
        fresh = f"127.{random.randint(64, 126)}.{random.randint(1, 250)}.{random.randint(2, 250)}"
        self.address = address or fresh
        self._folder = tempfile.TemporaryDirectory(prefix="balancer-")
        self._backends = Path(self._folder.name, "backends.cfg")
        self._log = Path(self._folder.name, "log")
        self._backends.write_text(_backends(servers), encoding="ascii")
        with self._log.open("ab") as out:
            self._master = subprocess.Popen(
                ["haproxy", "-W", "-db", "-f", str(RULES), "-f", str(self._backends)],
                env={**os.environ, "BALANCER_ADDRESS": self.address},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            self._wait_until(lambda: self._worker() != 0, "take requests")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def url(self, service: str) -> str:
        """Where callers of the service find the balancer."""
        return f"http://{self.address}:{PORTS[service]}"

    @property
    def urls(self) -> dict[str, str]:
        return {service: self.url(service) for service in PORTS}

    @property
    def log(self) -> str:
        """What it has written so far: requests that went wrong, and changes of servers."""
        return self._log.read_text(encoding="utf-8")

    def reload(self, servers: Servers) -> None:
        """Go over to other servers without refusing or cutting any request."""
        before = self._worker()
        self._backends.write_text(_backends(servers), encoding="ascii")
        self._master.send_signal(signal.SIGUSR2)
        self._wait_until(lambda: self._worker() not in {0, before}, "take over its new servers")

    def ready(self, service: str) -> set[str]:
        """The addresses of the replicas that get requests now; before its first check, one is taken to be ready."""
        return {f"http://{row['svname']}" for row in self._rows(service) if row["status"].startswith("UP")}

    def wait_until_ready(self, service: str, urls: Sequence[str], bound_s: float = BOUND_S) -> None:
        """Until all replicas were asked, and these and no others get requests."""

        def holds() -> bool:
            asked = all("INI" not in row["check_status"] for row in self._rows(service))
            return asked and self.ready(service) == set(urls)

        self._wait_until(holds, f"send {service} to {', '.join(urls) or 'nobody'}", bound_s)

    def _rows(self, service: str) -> list[dict[str, str]]:
        """What the status page says of each replica."""
        page = httpx.get(f"http://{self.address}:{STATUS_PORT}/;csv", trust_env=False).text
        rows = csv.DictReader(page.removeprefix("# ").splitlines())
        return [row for row in rows if row["pxname"] == service and row["svname"] != "BACKEND"]

    def stop(self) -> None:
        """End it at once, open requests too; idempotent."""
        self._master.terminate()
        try:
            self._master.wait(BOUND_S)
        finally:
            self._master.kill()
            self._master.wait()
            self._folder.cleanup()

    def _worker(self) -> int:
        """The pid of the process that takes requests; 0 while there is none."""
        try:
            page = httpx.get(f"http://{self.address}:{STATUS_PORT}/", trust_env=False).text
        except httpx.TransportError:
            return 0
        found = re.search(r"pid = </b> (\d+)", page)
        assert found is not None, "the status page names no pid"
        return int(found[1])

    def _wait_until(self, holds: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
        end = time.monotonic() + bound_s
        while not holds():
            if self._master.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"The balancer did not {what}.\n{self.log}")
            time.sleep(0.02)


def _backends(servers: Servers) -> str:
    if unknown := servers.keys() - PORTS.keys():
        raise ValueError(f"The balancer serves {', '.join(PORTS)}; not {', '.join(unknown)}.")
    return "\n".join(_backend(service, servers.get(service, ())) for service in PORTS)


def _backend(service: str, urls: Sequence[str]) -> str:
    places = [urlsplit(url).netloc for url in urls]
    lines = [f"  server {place} {place}\n" for place in places]
    return f"backend {service}\n{''.join(lines)}"
