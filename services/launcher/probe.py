"""Asks a server again and again until it answers, in a thread, so that whoever waits heeds signals meanwhile."""

import contextlib
import http.client
import os
import socket
import threading
import time
from typing import Final
from urllib.parse import urlsplit, urlunsplit

READY: Final = b"\x06"
_TIMEOUT_S: Final = 10.0
_PAUSE_S: Final = 0.2
_READ_BYTES: Final = 4096


class Probe(threading.Thread):
    """Ends when `url` has answered with 2xx, or can never do so because its host has no address."""

    def __init__(self, url: str) -> None:
        super().__init__(name="probe", daemon=True)
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._path = urlunsplit(("", "", parts.path, parts.query, ""))
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self.last = "it was not asked yet"
        """What came of the last try, as a clause."""

    def fileno(self) -> int:
        """Readable when there is something to hear."""
        return self._read_fd

    def heard(self) -> bytes:
        """Empty as long as nothing is certain; then `READY`, or why it cannot be reached."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._read_fd, _READ_BYTES)
        return b""

    def run(self) -> None:
        while not (told := self._asked()):
            time.sleep(_PAUSE_S)
        os.write(self._write_fd, told)

    def _asked(self) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", self._path, headers={"Connection": "close"})
            answer = connection.getresponse()
            answer.read(_READ_BYTES)  # a close before would be a reset to the server
            status = answer.status
        except socket.gaierror as error:
            return f"the host '{self._host}' has no address ({error.strerror})".encode()
        except (OSError, http.client.HTTPException) as error:
            self.last = f"{self._path} gave no answer ({str(error) or type(error).__name__})"
            return b""
        finally:
            connection.close()
        self.last = f"{self._path} answered {status}"
        return READY if 200 <= status < 300 else b""
