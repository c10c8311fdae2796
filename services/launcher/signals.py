"""Stop signals as data: a handler only notes the signal and wakes the loop; it never raises.

So no statement of the launcher can be cut in two by a signal, and the order "started, then noted" has no
window in which a child could be forgotten. What is done about a stop is decided elsewhere.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DRAIN_BYTES = 4096


class SignalInbox:
    """Takes the stop signals and the children's deaths for as long as it is entered; main thread only.

    After a stop signal the process is on its way out: from then on stop signals are ignored for good, so
    that a late one cannot change the exit status.
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        """The first stop signal; later ones are not looked at."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup: a closed terminal is no reason to stop
            self._before[number] = signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            gone = self.stop_signal is not None and number in STOP_SIGNALS
            signal.signal(number, signal.SIG_IGN if gone else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._wake_read

    def drain(self) -> None:
        """Forget the wake-ups so far; to be called before looking at what they announced."""
        try:
            while os.read(self._wake_read, _DRAIN_BYTES):
                pass
        except BlockingIOError:
            return

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD and self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
