"""The last complete box of a text, and equality as text: pure string work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.resources.grading.answers import bare, is_blank, last_box, same_text


@pytest.mark.behaviour("MA-1")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{4}", "4"),
        (r"first \boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\frac{3}{\sqrt{2}}} as {claimed}", r"\frac{3}{\sqrt{2}}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{x = \boxed{3}}", "x =  3"),
        (r"\boxed{ open { \boxed{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {6}", "6"),
        ("\\boxed{\n  8\n}", "8"),
        (r"an odd } before \boxed{9} and } after", "9"),
        (r"\boxed{3} \boxed{}", ""),
        (r"\boxed{3} \boxed{ }", ""),
        (r"the answer is 12", None),
        (r"\boxed{12", None),
        (r"\boxed 12", None),
        ("", None),
    ],
)
def test_the_box_that_is_closed_last_counts(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


@given(st.text(alphabet="\\boxed{}12 ", max_size=60), st.integers(min_value=0))
def test_a_complete_box_at_the_end_is_found_after_any_text(noise: str, number: int) -> None:
    # A backslash just before would make another command of it.
    assert (last_box(f"{noise.rstrip(chr(92))}\n\\boxed{{{number}}}") or "").endswith(str(number))


def test_ten_thousand_boxes_in_each_other_are_opened_at_once() -> None:
    assert last_box(r"\boxed{" * 10_000 + "4" + "}" * 10_000) == "4"


@pytest.mark.parametrize("text", [r"$\frac12$", r"\(\frac12\)", r"\[\frac12\]", r"$$\frac12$$", r" $ \frac12 $ "])
def test_delimiters_are_stripped(text: str) -> None:
    assert bare(text) == r"\frac12"


def test_two_formulas_in_a_row_are_not_one() -> None:
    assert bare("$1$ and $2$") == "$1$ and $2$"


@pytest.mark.parametrize("text", ["", " ", r"\,", "$$", "{}", r"\ ~"])
def test_spacing_alone_is_blank(text: str) -> None:
    assert is_blank(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [(r"\(\frac{333}{1997}\)", r"\dfrac{333}{1997}"), ("x + 1", "x+1"), (r"\left( 1, 2 \right)", "(1,2)"), ("5", "5.")],
)
def test_spelling_alone_does_not_make_a_difference(one: str, other: str) -> None:
    assert same_text(one, other)


@pytest.mark.parametrize(("one", "other"), [("1 2", "12"), ("A", "a"), (r"\pi r", r"\pir"), ("1.5", "15")])
def test_what_changes_the_meaning_is_not_spelling(one: str, other: str) -> None:
    assert not same_text(one, other)
