"""Server-Sent Events, cut anywhere."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.model_proxy.bridge.stream import DONE, SseDecoder
from tests.bridge.chats import unhurried

STREAM = b': ping\n\ndata: {"a":1}\n\nevent: x\nid: 7\ndata:{"b":\ndata: 2}\n\n\n\nretry: 5\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":\n2}', DONE]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@unhurried
@given(cuts=st.lists(st.integers(0, 140)))
def test_events_are_the_same_wherever_the_bytes_are_cut(end: bytes, cuts: list[int]) -> None:
    stream = STREAM.replace(b"\n", end)
    decoder = SseDecoder()
    places = [0, *sorted(cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert [data for piece in pieces for data in decoder.feed(piece)] == EVENTS
    assert decoder.end() == []


def test_single_bytes_are_enough() -> None:
    decoder = SseDecoder()
    stream = STREAM.replace(b"\n", b"\r\n")
    assert [data for byte in stream for data in decoder.feed(bytes([byte]))] == EVENTS


def test_nothing_received_changes_nothing() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\r") == []
    assert decoder.feed(b"") == []
    assert decoder.feed(b"\n\r\n") == [b"x"]


def test_an_event_is_given_at_its_blank_line() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: x\n") == []
    assert decoder.feed(b"\n") == [b"x"]


@pytest.mark.parametrize("tail", [b"data: x", b"data: x\n", b"data: x\r"])
def test_the_last_event_needs_no_blank_line_when_the_connection_ends(tail: bytes) -> None:
    decoder = SseDecoder()
    assert decoder.feed(tail) == []
    assert decoder.end() == [b"x"]
