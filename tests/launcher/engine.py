"""A model engine of the tests' own: serves Chat Completions, and has a worker process as real engines have.

With `--forward` it is a router: it passes requests on to these addresses in turn. Whatever it does is a line
of its output. TERM ends it with status 0, as it does a real engine.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Worker = Literal["none", "plain", "stubborn", "detached"]


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def start_worker(kind: Worker) -> None:
    """A child process: one that heeds TERM, one that does not, or one that also leaves the process group."""
    if kind == "none":
        return
    pid = os.fork()
    if pid:
        return
    if kind != "plain":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "detached":
        os.setsid()
    tell(f"worker {os.getpid()}")
    while True:
        signal.pause()


def completion(content: str) -> bytes:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps(body).encode()


def handler_of(options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    asked = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            ready = self.path == "/health" and next(asked) >= options.refuse_health
            self._answer(200 if ready else 503, b"{}")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            tell(f"asked {self.path}")
            if not options.forward:
                self._answer(200, completion(options.says))
                return
            url = options.forward[next(asked) % len(options.forward)] + self.path
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=20.0) as answer:
                self._answer(answer.status, answer.read())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Not a line per request."""

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--says", default="")
    parser.add_argument("--worker", default="none")
    parser.add_argument("--forward", nargs="*", default=[])
    parser.add_argument("--refuse-health", type=int, default=0, help="this many times before it is ready")
    parser.add_argument("--leave", type=int, help="end with this status instead of serving")
    parser.add_argument("--stubborn", action="store_true", help="heed no TERM")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.stubborn else lambda number, frame: os._exit(0))
    tell(f"engine {os.getpid()} of {os.getppid()}")
    tell(f"called {json.dumps(sys.argv[1:])}")
    tell(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    tell(f"secrets {sorted(name for name in os.environ if name.startswith('PADDOCK_'))}")
    start_worker(options.worker)
    if options.leave is not None:
        tell("RuntimeError: no device has enough memory")
        time.sleep(0.05)  # the worker tells its pid
        sys.exit(options.leave)
    ThreadingHTTPServer(("127.0.0.1", options.port), handler_of(options)).serve_forever()


if __name__ == "__main__":
    main()
