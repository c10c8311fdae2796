"""Token ids and log-probabilities: whole sets pass, parts are errors."""

from typing import Any

import pytest

from services.model_proxy.bridge.refusals import UpstreamReplyError
from tests.bridge.chats import Played, answer, chunk, completion

LOGPROBS = {"content": [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -0.2}]}
FIELDS: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "generation_token_ids": [4, 5],
    "generation_log_probs": [-0.1, -0.2],
}


def beside(chat: dict[str, Any], **choice: Any) -> dict[str, Any]:
    chat["choices"][0].update(choice)
    return chat


def carried(item: dict[str, Any]) -> dict[str, Any]:
    return {name: item[name] for name in FIELDS if name in item}


@pytest.mark.behaviour("MS-17")
def test_a_set_in_the_message_is_carried_by_the_last_item() -> None:
    output = answer(completion(content="x", reasoning="y", **FIELDS))["output"]
    assert [carried(item) for item in output] == [{}, FIELDS]


@pytest.mark.behaviour("MS-17")
def test_a_set_beside_the_message_is_carried_too() -> None:
    chat = beside({**completion(content="x"), "prompt_token_ids": [1, 2, 3]}, token_ids=[4, 5], logprobs=LOGPROBS)
    assert carried(answer(chat)["output"][0]) == FIELDS


@pytest.mark.behaviour("MS-17")
def test_a_set_that_comes_in_chunks_is_put_together() -> None:
    first = beside({**chunk(content="a"), "prompt_token_ids": [1, 2, 3]}, token_ids=[4])
    first["choices"][0]["logprobs"] = {"content": LOGPROBS["content"][:1]}
    second = beside(chunk("stop", content="b"), token_ids=[5])
    second["choices"][0]["logprobs"] = {"content": LOGPROBS["content"][1:]}
    played = Played([first, second])
    assert carried(played.output[0]) == FIELDS
    assert played.done_items() == played.output
    assert [token["token"] for token in played.output[0]["content"][0]["logprobs"]] == ["a", "b"]


def test_log_probabilities_alone_are_no_part_of_a_set() -> None:
    assert carried(answer(beside(completion(content="x"), logprobs=LOGPROBS))["output"][0]) == {}


def test_ids_without_log_probabilities_are_a_set() -> None:
    chat = beside({**completion(content="x"), "prompt_token_ids": [1]}, token_ids=[4])
    assert carried(answer(chat)["output"][0]) == {"prompt_token_ids": [1], "generation_token_ids": [4]}


@pytest.mark.behaviour("MS-17")
@pytest.mark.parametrize(
    "chat",
    [
        completion(content="x", prompt_token_ids=[1]),
        completion(content="x", **{**FIELDS, "generation_log_probs": [-0.1]}),
        {**completion(content="x"), "prompt_token_ids": [1]},
        beside(completion(content="x"), token_ids=[4]),
        beside({**completion(content="x"), "prompt_token_ids": [1]}, token_ids=[4], logprobs=LOGPROBS),
    ],
)
def test_a_part_of_a_set_or_lengths_that_differ_are_an_error(chat: dict[str, Any]) -> None:
    with pytest.raises(UpstreamReplyError) as error:
        answer(chat)
    assert error.value.code == "token_mismatch"


def test_a_mismatch_in_a_stream_fails_it() -> None:
    played = Played([beside(chunk("stop", content="a"), token_ids=[4])])
    assert played.response["error"]["code"] == "token_mismatch"
    assert played.kinds[-1] == "failed"
