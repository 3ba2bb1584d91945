"""The spelling of methods and what contenders are made of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.base.registry import parse, spell
from twoaxis.model.variant import make_contender

NAMES = st.text("abcdefgh_", min_size=1, max_size=8)
NUMBERS = st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=10), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(NAMES, st.dictionaries(NAMES, VALUES, max_size=4))
def test_parse_undoes_spell(name: str, options: dict[str, Any]) -> None:
    assert parse(spell(name, options)) == (name, options)


def test_values_as_people_write_them() -> None:
    name, options = parse("a: b=1, c=0.5,d=true,e=False,f=None,k=none,g=text,h=[1,2],i=2-3/attention,j=1e-3")
    expected = {"b": 1, "c": 0.5, "d": True, "e": False, "f": None, "k": "none", "g": "text", "h": [1, 2]}
    assert (name, options) == ("a", expected | {"i": "2-3/attention", "j": 0.001})


@pytest.mark.parametrize("text", ["", ":a=1", "a:b", "a:=1", "a:b=1,b=2"])
def test_mistakes(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no method|is no option|twice"):
        parse(text)


def test_contender_sorts_its_options() -> None:
    made = make_contender(
        "deep_delta:value_channels=4,placement=2-3,init=paired,model.hidden_size=96,train.lr=0.01",
        "short_swa:window=16,mixer_blocks=[0,2]",
    )
    assert (made.stream_options, made.mixer_options) == ({"value_channels": 4}, {"window": 16})
    assert made.model == {"placement": "2-3", "init": "paired", "hidden_size": 96, "mixer_blocks": [0, 2]}
    assert made.train == {"lr": 0.01}
    fields = made.model_fields()
    assert (fields["stream_options"], fields["mixer"]) == ({"value_channels": 4}, "short_swa")
    assert make_contender().model_fields() == {"stream": "standard"}


def test_key_is_blind_to_the_label_alone() -> None:
    plain = make_contender("deep_delta:update=write")
    named = make_contender("deep_delta:update=write,label=write only")
    assert named.label == "write only"
    assert plain.label == "deep_delta:update=write"
    assert plain.key == named.key
    assert plain.key != make_contender("deep_delta:update=add").key
    assert plain.key != make_contender("deep_delta:update=write", "canon").key
    assert make_contender(None, "canon").label == "standard + canon"
