"""Regular expressions mean the same to llguidance as to Python."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_aclgraph.formats.regex_dialect import in_dialect
from dist_aclgraph.sampling import StructuredOutputs
from tests.formats.walk import Walk

WALK = Walk("hermes", {}, has_tokens=False)
# Parts from which the tests build classes. "^" is never the first part of a class, because a "^" at
# the beginning negates the class.
PARTS = ["[", "&&", "&", "--", "-", "~~", "~", "^", "a", "b", "z", "{", r"\]", r"\w", r"\d", r"\-"]
SIGNS = "[]&-~^ab1{z_ |"


def allows(pattern: str, text: str) -> bool:
    return WALK.allows(StructuredOutputs(regex=pattern), WALK.tokens(text))


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"[^[\]]+", ["ab", "-"], ["[", "]", "a]"]),
        (r"[\w.[\]]+", ["a.[0]"], ["a b"]),
        ("[a&&b]+", ["a&b"], ["", "c"]),
        ("[a~~b]", ["a", "~", "b"], ["c"]),
        ("[+--]", ["+", ",", "-"], ["*", "."]),
        (r"[\w-.]+", ["a-b.c"], ["a b"]),
        (r"[a-\d]+", ["a-1"], ["b"]),
        (r"^{.*}$", ["{}", "{a}"], ["a"]),
        (r"\{[a-z]{1,2}\}", ["{ab}"], ["{abc}", "a"]),
        (r"a{x", ["a{x"], ["aax"]),
        (r"[\b]\cJ", ["\b\n"], ["b"]),
        (r"[[:alpha:]]+", ["ab"], ["1", ":"]),
        (r"[]a]+", ["]a"], ["b"]),
        (r"[\[-\]]", ["[", "\\", "]"], ["a"]),
        (r"\\[a[]", ["\\["], ["["]),
    ],
)
def test_published_patterns_are_read(pattern, matches, others):
    for text in matches + others:
        assert allows(pattern, text) == (text in matches)
    schema = {"type": "string", "pattern": f"^(?:{pattern.strip('^$')})$"}
    inner = StructuredOutputs(json=json.dumps(schema))
    for text in matches:
        assert WALK.allows(inner, WALK.tokens(json.dumps(text)))


@given(is_negative=st.booleans(), parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=5))
def test_classes_mean_the_same_as_in_python(is_negative, parts):
    pattern = f"[{'^' * is_negative}{''.join(parts)}]"
    assume(is_negative or not parts[0].startswith("^"))
    try:
        with warnings.catch_warnings():
            # A warning says that later releases of Python may have operators in classes.
            warnings.simplefilter("ignore", FutureWarning)
            expected = re.compile(pattern)
    except re.error:  # for example, a range whose end comes before its beginning
        return

    found = {sign for sign in SIGNS if allows(pattern, sign)}

    # Python refuses a range that ends with a set, such as \w. llguidance reads such a range as a
    # hyphen and a set.
    assert found == {sign for sign in SIGNS if expected.fullmatch(sign)}


@given(st.text(alphabet="[]{}&-~^ab1,\\wd:()|*+?", max_size=12))
def test_a_pattern_in_the_dialect_stays_the_same(pattern):
    once = in_dialect(pattern)

    assert in_dialect(once) == once


@pytest.mark.parametrize(
    "pattern", ["a{,3}", "a{2,1}", "(a", "a)", "[a", "[b-a]", r"(a)\1", r"a\b"]
)
def test_other_patterns_stay_refused(pattern):
    with pytest.raises(AssertionError):  # the grammar has an error
        allows(pattern, "a")
