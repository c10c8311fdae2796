"""A custom tool's raw input out of JSON, whole or in pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model_proxy.bridge.freeform import FreeformInput
from tests.bridge.chats import unhurried


def read(*pieces: str) -> tuple[str, bool]:
    freeform = FreeformInput()
    text = "".join(freeform.feed(piece) for piece in pieces) + freeform.end()
    return text, freeform.cut


def cut_up(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(places)]


@unhurried
@given(text=st.text(), cuts=st.lists(st.integers(0, 200)), ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_any_input_survives_any_cut(text: str, cuts: list[int], ascii_only: bool, indent: int | None) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert read(*cut_up(arguments, cuts)) == (text, False)


@unhurried
@given(arguments=st.text('{}":\\ inputud8c3x\n', max_size=30), cuts=st.lists(st.integers(0, 30)), form=st.booleans())
def test_arguments_of_any_form_read_the_same_whole_and_cut(arguments: str, cuts: list[int], form: bool) -> None:
    arguments = f'{{"input":"{arguments}' if form else arguments
    whole = read(arguments)
    assert read(*cut_up(arguments, cuts)) == whole
    whole[0].encode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":"a","more":1}', "a"),
        ('{"more":1,"input":"a"}', "a"),
        ('{"input":7}', '{"input":7}'),
        ('{"patch":"a"}', '{"patch":"a"}'),
        ('["a"]', '["a"]'),
        ("*** Begin", "*** Begin"),
        ("", ""),
        (" \n", ""),
        ('{"input":"line\nbreak"}', "line\nbreak"),
        ('{"input":"\\d+ \\/ \\u12"}', "\\d+ / \\u12"),
        ('{"input":"\\ud83d\\ude00"}', "😀"),
        ('{"input":"\\ud83d!"}', "\ufffd!"),
        ('{"input":"\\ud83d"}', "\ufffd"),
        ('{"input":"\\\\ud83d"}', "\\ud83d"),
    ],
)
def test_forms(arguments: str, text: str) -> None:
    assert read(arguments) == (text, False)
    assert read(*arguments) == (text, False)


@pytest.mark.parametrize("arguments", ['{"inp', '{"input":', '{"input":"ab', '{"input":"ab\\', '{"input":"ab\\u00'])
def test_input_that_breaks_off_says_so(arguments: str) -> None:
    assert read(arguments)[1] is True
