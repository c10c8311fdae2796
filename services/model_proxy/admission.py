"""Whether a call may be made: it is in the capture before it is sent, its episode is not over, its token not spent.

Calls under way count. Their order in the capture's log decides between calls that race on different replicas,
so together they never make more than `max_calls`. Output tokens are known when a call has ended: those of calls
that were under way at once may together exceed `max_output_tokens`.
"""

from services.model_proxy.access import Caller
from services.model_proxy.capture import END_OF_LOG, Captures
from services.model_proxy.failures import ModelCallError, sealed, spent, unrecorded
from services.model_proxy.record import Record
from shared.errors import StoreUnavailableError


async def admit(captures: Captures, caller: Caller, record: Record) -> None:
    """Write down that the call begins; when it is refused then, it must be made void.

    Raises:
        ModelCallError: the episode's capture is sealed, a bound of its token is reached, or the store is away.
    """
    key, of_agent = caller.key, caller.phase == "agent"
    try:
        if of_agent and captures.was_refused(key):
            # A client that goes on and on leaves no trace: it could fill the store.
            await _check(captures, caller, await captures.is_sealed(key), END_OF_LOG)
        record.begun = True
        begun = await captures.begin(key, record.facts)
        if of_agent:
            await _check(captures, caller, begun.sealed, begun.position)
    except StoreUnavailableError as error:
        raise unrecorded() from error


async def _check(captures: Captures, caller: Caller, is_sealed: bool, position: int) -> None:
    try:
        if is_sealed:
            raise sealed(caller.key)
        if caller.max_calls is not None or caller.max_output_tokens is not None:
            await _within_bounds(captures, caller, position)
    except ModelCallError:
        captures.note_refusal(caller.key)
        raise


async def _within_bounds(captures: Captures, caller: Caller, position: int) -> None:
    calls, output_tokens = await captures.spent(caller.key, position)
    if caller.max_calls is not None and calls >= caller.max_calls:
        raise spent(f"it allows {caller.max_calls} calls")
    if caller.max_output_tokens is not None and output_tokens >= caller.max_output_tokens:
        raise spent(f"{output_tokens} output tokens were produced, and it allows {caller.max_output_tokens}")
