"""What is kept of a command's output: its beginning and its end, in bounded memory."""

from collections import deque

from shared.ports.sandbox import Output


class CappedOutput:
    """Takes bytes without end and keeps at most `limit` of them: the first half and the last."""

    def __init__(self, limit: int) -> None:
        self._head_room = (limit + 1) // 2
        self._tail_limit = limit - self._head_room
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._dropped = 0

    def add(self, data: bytes) -> None:
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            self._drop()

    def _drop(self) -> None:
        """Whole pieces only, so that a flood costs no copying; the last cut is made when the output is asked for."""
        while self._tail and self._tail_size - len(self._tail[0]) >= self._tail_limit:
            gone = len(self._tail.popleft())
            self._tail_size -= gone
            self._dropped += gone

    def output(self) -> Output:
        tail = b"".join(self._tail)
        surplus = max(0, len(tail) - self._tail_limit)
        return Output(bytes(self._head), tail[surplus:], self._dropped + surplus)
