"""For each rule by which the emulator refuses calls, there are questions to a device, or there is a
reason why no question exists.
"""

import re

import pytest

from dist_aclgraph.probe.question import REFUSED, STOPPED, ByCann
from dist_aclgraph.probe.questions import PROBES
from tools.refusals import (
    PAGE,
    REASONS,
    Entry,
    differences,
    known_refusals,
    page_of,
    refusals_of,
)

ENTRIES = known_refusals()


def expects_a_refusal(probe):
    """Return whether the emulator refuses the question's call for at least one chip or release of
    CANN.
    """
    if isinstance(probe.says, ByCann):
        answers = [probe.expected(c, v) for c in ("Ascend910B1", "Ascend910_9391") for v in "89"]
    else:
        answers = [probe.says]
    return any(str(answer).startswith((REFUSED, STOPPED)) for answer in answers)


def test_each_text_has_an_entry_and_each_entry_a_text():
    assert differences(refusals_of(), ENTRIES) == []


def test_an_entry_has_questions_that_exist_or_a_reason():
    names = {probe.name for probe in PROBES}

    for entry in ENTRIES:
        assert bool(entry.questions) != bool(entry.reason), entry
        assert not set(entry.questions) - names, entry
        assert not entry.reason or entry.reason in REASONS, entry


def test_each_question_about_a_refusal_belongs_to_a_text():
    asked = {name for entry in ENTRIES for name in entry.questions}

    assert {p.name for p in PROBES if p.rule or expects_a_refusal(p)} - asked == set()


def can_begin_with(text, part):
    """Return whether ``text`` can begin with ``part``, where each ``*`` stands for one word or
    number.
    """
    if not part or not text:
        return not part
    if text[0] == part[0] and can_begin_with(text[1:], part[1:]):
        return True
    ends = range(re.match(r"\w*", part).end() + 1)
    return text[0] == "*" and any(can_begin_with(text[1:], part[end:]) for end in ends)


@pytest.mark.parametrize("probe", [p for p in PROBES if p.rule], ids=lambda probe: probe.name)
def test_a_rule_is_a_part_of_a_text_of_its_question(probe):
    """Each entry of ``admit`` switches off the rules whose text contains the entry. So the value of
    ``rule`` in a question must occur in the text of a refusal.
    """
    texts = {text for e in ENTRIES if probe.name in e.questions for text in e.texts}

    assert any(can_begin_with(t[i:], probe.rule) for t in texts for i in range(len(t))), texts


def test_the_page_shows_the_entries():
    assert PAGE.read_text() == page_of(ENTRIES), "python -m tools.refusals writes the page"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('demand(x.dim() == 2, "x of rank ", x.dim(), ", not 2");', "x of rank *, not 2"),
        ('refuse_unless(f(a, b) || c, what,\n  " is " "odd");', "* is odd"),
        ('should(layout == "TND", "layout ", layout, flat ? " a" : " b");', "layout *"),
        ('return fail(CODE, "%zu of %s: %#x", a, b, c);', "* of *: *"),
        ('fail("key ", key, " twice");', "key * twice"),
        ('stop_device(device, code_of(e), text("node ", i) + ": " + e.what());', "node *: *"),
        ('throw TaskError(code, std::string("rank ") + name + " is dead");', "rank * is dead"),
        ('throw std::runtime_error("no " + what);', "no *"),
        ("return ACL_ERROR_RT_CONTEXT_NULL;", "ACL_ERROR_RT_CONTEXT_NULL"),
    ],
)
def test_the_text_of_a_call_is_read(tmp_path, source, text):
    (tmp_path / "a.cpp").write_text(f'// demand(x, "a comment")\nvoid f() {{ {source} }}\n')

    assert refusals_of(tmp_path) == {"a.cpp": [text]}


def test_the_text_of_a_python_error_is_read(tmp_path):
    (tmp_path / "a.py").write_text('raise ValueError(f"no {name}" + reason) from error\nraise\n')

    assert refusals_of(tmp_path) == {"a.py": ["no *"]}


def test_a_text_that_another_function_made_is_left_out(tmp_path):
    (tmp_path / "a.cpp").write_text('fail(1, "%s", e.what()); throw std::runtime_error(problem);')

    assert refusals_of(tmp_path) == {}


def test_a_new_refusal_and_an_old_entry_are_named():
    entries = [Entry("a.cpp", ("x", "y")), Entry("a.cpp", ("w",))]

    assert differences({"a.cpp": ["x", "w", "z"]}, entries) == [
        "a.cpp: no entry for 'z'",
        "a.cpp: no refusal for the entry 'y'",
    ]


def test_a_second_refusal_with_the_same_text_needs_a_second_entry():
    once, twice = [Entry("a.cpp", ("x",))], [Entry("a.cpp", ("x",)), Entry("a.cpp", ("x",))]

    assert differences({"a.cpp": ["x", "x"]}, once) == ["a.cpp: no entry for 'x'"]
    assert differences({"a.cpp": ["x", "x"]}, twice) == []
