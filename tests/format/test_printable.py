"""Text for terminals: nothing in it steers them, and JSON keeps its meaning."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayfmt.format.validation import printable, printable_json

ANY_TEXT = st.text(st.characters(), max_size=40)


@pytest.mark.slow
@given(ANY_TEXT)
def test_text_becomes_printable_and_printable_text_stays(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


@pytest.mark.slow
@given(
    st.recursive(
        ANY_TEXT | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_becomes_printable_and_means_the_same(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert printable_json(text).isprintable()
    assert json.loads(printable_json(text)) == value


def test_long_text_is_cut() -> None:
    assert printable("a" * 10, 4) == "aaa…"
