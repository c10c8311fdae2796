"""How often the real CLI asks with its own number of retries. Slow, since it waits longer each time."""

from pathlib import Path

import pytest

from tests.codex.chat import refuses, says
from tests.codex.cli import Provider, Task, run_codex
from tests.codex.rig import UNKNOWN_MODEL, Rig
from tests.model_proxy.wire import Handler
from tests.serving import free_port

pytestmark = [pytest.mark.codex, pytest.mark.full]

ERROR = {"message": "the upstream's own words", "type": "some_error", "code": "some_code"}
OLD = "0.144.4"


@pytest.mark.parametrize(
    ("answer", "asks"),
    [(refuses(400, ERROR), 1), (refuses(401, ERROR), 6), (refuses(429, ERROR), 1), (refuses(500, ERROR), 30)],
    ids=["400", "401", "429", "500"],
)
async def test_the_cli_gives_up_after_its_own_number_of_retries(codex: Rig, answer: Handler, asks: int) -> None:
    run = (await codex.run(*[answer] * asks, retries=True)).failed()
    assert len(run.calls) == asks
    assert all(asked == run.asked[0] for asked in run.asked)


async def test_the_old_cli_asks_again_after_an_answer_that_was_ended_early(codex: Rig) -> None:
    asks = 6 if codex.version == OLD else 1
    run = (await codex.run(*[says("half a sentence", finish="length")] * asks, retries=True)).failed()
    assert run.printed.failure.endswith("reason: max_output_tokens")
    # What it has of the answer it sends again, each time once more.
    last = run.asked[-1]["messages"][-1]
    assert last["content"] == ("\n\n".join(["half a sentence"] * 5) if codex.version == OLD else "Do the task.")


async def test_only_the_old_cli_gives_up_when_no_proxy_is_there(codex: Rig, tmp_path: Path) -> None:
    provider = Provider(f"http://127.0.0.1:{free_port()}/v1", "token", UNKNOWN_MODEL, retries=None)
    running = run_codex(codex.version, provider, Task(), home=tmp_path / "home", work=codex.work, bound_s=60)
    if codex.version == OLD:
        assert (await running).exit_code == 1
    else:
        with pytest.raises(TimeoutError):
            await running
