"""A real Redis server of a test's own: on a free port, in a folder that goes away, set up as the mesh asks for."""

import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError

from tests.serving import free_port

READY_S = 20.0


class RedisServer:
    def __init__(self, folder: Path, *options: str, password: str | None = None) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._password = password
        self._options = (*options, *(("--requirepass", password) if password else ()))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        command = [
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
            *("--appendonly", "yes", "--maxmemory-policy", "noeviction", "--save", "", "--daemonize", "no"),
            *("--unixsocket", str(self.socket), *self._options),
        ]
        log = self._folder / "redis.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self.ask("PING")
            except RedisError:
                time.sleep(0.02)
            else:
                return
        self.stop()
        raise RuntimeError(f"redis-server did not become ready: {log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """End it in an orderly way; what was written is on disk then."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(READY_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(READY_S)
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ask(self, *command: str | int) -> Any:
        """The answer to one command, by a client that is not the store's."""
        with Redis(port=self.port, password=self._password, decode_responses=True, socket_timeout=READY_S) as client:
            return client.execute_command(*command)

    @property
    def socket(self) -> Path:
        return self._folder / "redis.sock"

    def keys_without_ttl(self) -> list[str]:
        with Redis(port=self.port, password=self._password, decode_responses=True) as client:
            # -2: it has expired since it was listed.
            return [key for key in client.scan_iter(count=1000) if client.pttl(key) == -1]
