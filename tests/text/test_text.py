from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import InvalidParameterError, ModelError, RequestTooLongError
from dist_aclgraph.formats.events import CallBegin, CallEnd, Content
from dist_aclgraph.sampling import SamplingParams, StructuredOutputs
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.detokenizer import Detokenizer
from dist_aclgraph.text.output import OutputText, end_ids
from dist_aclgraph.text.stops import StopMatcher
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.laws import examples

MODEL = Path(__file__).parents[2] / "models" / "tiny-qwen3"
TOKENIZER = Tokenizer(MODEL)


def naive(text: str, stops: list[str], immune: int = 0) -> str:
    """Cut a text at the first stop string. This simple function reads the text character by
    character.

    Args:
        immune: a number of characters at the beginning of the text. A stop string that ends within
            these characters is ignored.
    """
    for end in range(immune + 1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@examples(400)
@given(
    pieces=st.lists(st.text("abé ", max_size=4), max_size=12),
    stops=st.lists(st.text("abé ", min_size=1, max_size=4), max_size=4),
    num_immune=st.integers(0, 12),
)
def test_stop_strings_cut_where_a_search_of_the_whole_text_cuts(pieces, stops, num_immune):
    matcher = StopMatcher(stops)

    fed = [matcher.feed(piece, may_match=i >= num_immune) for i, piece in enumerate(pieces)]
    out = "".join(fed) + matcher.finish()

    assert out == naive("".join(pieces), stops, len("".join(pieces[:num_immune])))


def test_a_possible_beginning_of_a_stop_string_is_held_back():
    matcher = StopMatcher(["END"])

    assert [matcher.feed(piece) for piece in ("go E", "N", "X")] == ["go ", "", "ENX"]


@examples(200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40))
def test_text_fed_token_by_token_is_the_text(text):
    detokenizer = Detokenizer(TOKENIZER)

    pieces = [detokenizer.feed(i) for i in TOKENIZER.encode(text)]

    assert "".join(pieces) + detokenizer.finish() == text


def test_special_tokens_alone_are_no_text():
    detokenizer = Detokenizer(TOKENIZER)
    end = TOKENIZER.eos_ids[0]

    assert "".join(map(detokenizer.feed, [end] * 30)) + detokenizer.finish() == ""


def test_no_piece_ends_in_half_a_character():
    detokenizer = Detokenizer(TOKENIZER)

    pieces = [detokenizer.feed(i) for i in TOKENIZER.encode("aé😀b")]

    assert [piece for piece in pieces if piece] == ["a", "é", "😀", "b"]


def test_bytes_that_never_make_a_character_come_out_as_replacements():
    detokenizer = Detokenizer(TOKENIZER)
    first_byte = TOKENIZER.encode("😀")[0]

    text = "".join(map(detokenizer.feed, [first_byte] * 40)) + detokenizer.finish()

    assert set(text) == {"\ufffd"}


def test_output_text_stops_in_the_middle_of_a_token():
    params = SamplingParams(stop=("lo", "zzz"))
    output = OutputText(TOKENIZER, (), params)

    pieces = []
    for token_id in TOKENIZER.encode("Hello there"):
        pieces.append(output.add_tokens([token_id], (), None))
        if pieces[-1].finish_reason is not None:
            break

    assert "".join(piece.text for piece in pieces) == "Hel"
    assert pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (StructuredOutputs(regex="Hello there"), "Hello there"),
        (StructuredOutputs(lark='start: "Hello there"'), "Hello there"),
        (StructuredOutputs(lark="start: /(.|\\n)*/", has_free_text=True), "Hel"),
    ],
)
def test_stop_strings_do_not_cut_an_answer_that_must_have_a_form(form, expected):
    params = SamplingParams(stop=("lo",), structured_outputs=form, stop_token_ids=(7,))
    output = OutputText(TOKENIZER, (), params)

    piece = output.add_tokens(TOKENIZER.encode("Hello there"), (), "length")

    assert piece.text == expected
    assert end_ids(TOKENIZER, params) == TOKENIZER.eos_ids


@pytest.mark.parametrize(
    ("stop", "min_tokens", "expected"),
    [
        (" 2", 1, ("1", "stop")),
        (" 2", 2, ("1 2 3", "stop")),  # the first match is too early
        (" 2", 4, ("1 2 3 2 3", "length")),
        ("2 3", 2, ("1 ", "stop")),  # the match ends after the two tokens of the minimum
    ],
)
@pytest.mark.parametrize("size", [1, 5])
def test_a_stop_string_within_the_first_min_tokens_stops_nothing(stop, min_tokens, expected, size):
    ids = TOKENIZER.encode("1 2 3 2 3")  # this text has five tokens
    output = OutputText(TOKENIZER, (), SamplingParams(stop=(stop,), min_tokens=min_tokens))

    text, reason = "", None
    for start in range(0, len(ids), size):
        if reason is None:
            is_last = start + size == len(ids)
            piece = output.add_tokens(ids[start : start + size], (), "length" if is_last else None)
            text, reason = text + piece.text, piece.finish_reason

    assert (text, reason) == expected


@pytest.mark.parametrize("reads", [False, True])
def test_a_stop_string_in_the_last_uncertain_text_stops_the_answer(reads):
    half = TOKENIZER.encode("🦝")[:1]  # the first bytes of a character that stays incomplete
    read = SimpleNamespace(feed=lambda _, text: [Content(text)] * bool(text), finish=list)
    output = OutputText(TOKENIZER, (), SamplingParams(stop=("\ufffd",)), read if reads else None)

    piece = output.add_tokens([*TOKENIZER.encode("Hi"), *half], (), "length")

    text = "".join(event.text for event in piece.events) if reads else piece.text
    assert (text, piece.finish_reason, output.stop_reason) == ("Hi", "stop", "\ufffd")


@examples(200)
@given(data=st.data())
def test_how_tokens_are_cut_into_deltas_shows_nowhere(data):
    """With drafts, a delta can have several tokens. Texts, counts and logprobs stay the same."""
    ids = TOKENIZER.encode(data.draw(st.text("ab é😀", min_size=1, max_size=12)))
    stops = tuple(data.draw(st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2)))
    reason = data.draw(st.sampled_from(["stop", "length"]))
    params = SamplingParams(stop=stops, min_tokens=data.draw(st.integers(0, 4)))
    cuts = sorted(data.draw(st.lists(st.integers(1, len(ids)), max_size=3)))
    rows = [RowLogprobs(b"", (float(i),), 1) for i in range(len(ids))]

    def taken(ends: list[int]) -> tuple[str, list[int], list[float], str | None]:
        output, start = OutputText(TOKENIZER, (), params), 0
        text, tokens, values = "", [], []
        for end in ends:
            last = reason if end == len(ids) else None
            piece = output.add_tokens(ids[start:end], rows[start:end], last)
            text, start = text + piece.text, end
            tokens += piece.token_ids
            values += [row.logprobs[0] for row in piece.logprobs]
            if piece.finish_reason is not None:
                return text, tokens, values, piece.finish_reason
        raise AssertionError("it never ended")

    one_by_one = taken(list(range(1, len(ids) + 1)))

    assert taken([*(cut for cut in dict.fromkeys(cuts) if cut < len(ids)), len(ids)]) == one_by_one


@pytest.mark.parametrize("size", [1, 9])
def test_a_stop_string_may_be_part_of_the_text(size):
    params = SamplingParams(stop=("lo", "zzz"), include_stop_str_in_output=True)
    output = OutputText(TOKENIZER, (), params)
    ids = TOKENIZER.encode("Hello there")

    pieces = [output.add_tokens(ids[i : i + size], (), None) for i in range(0, len(ids), size)]

    ended = next(i for i, piece in enumerate(pieces) if piece.finish_reason == "stop")
    assert "".join(piece.text for piece in pieces[: ended + 1]) == "Hello"


def test_special_tokens_appear_in_the_text_where_asked_for():
    output = OutputText(TOKENIZER, (), SamplingParams(skip_special_tokens=False))

    piece = output.add_tokens(TOKENIZER.encode("hi<|im_end|>there"), (), "length")

    assert piece.text == "hi<|im_end|>there"


def test_special_tokens_do_not_appear_in_the_text():
    ids = TOKENIZER.encode("hi<|im_end|>")

    assert TOKENIZER.decode(ids) == "hi"
    assert ids[-1] in TOKENIZER.eos_ids


def test_numbers_are_one_token_each():
    assert len(TOKENIZER.encode("98 99 100")) == 3


def test_the_chat_template_is_the_models_own():
    messages = [{"role": "user", "content": "Hi"}]

    text = TOKENIZER.render_chat(messages)

    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.encode_chat(messages)[0] == TOKENIZER.encode("<|im_start|>")[0]


def test_text_that_cannot_be_tokenized_is_a_request_error():
    with pytest.raises(InvalidParameterError, match="unpaired surrogate"):
        TOKENIZER.encode("\ud800")
    with pytest.raises(RequestTooLongError, match="10000000 characters"):
        TOKENIZER.encode("x" * 10_000_000)
    with pytest.raises(RequestTooLongError, match="length is 3 tokens; the text has"):
        TOKENIZER.encode("1 2 3 4", max_tokens=3)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(InvalidParameterError, match="token ids lie"):
        TOKENIZER.decode([TOKENIZER.vocab_size])


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("max_calls", [1, 2, None])
def test_no_call_begins_after_the_last_call(max_calls, has_end):
    """If ``has_end`` is false, the first of two calls has no end event. A syntax error has this
    effect.
    """
    calls = [[CallBegin(i, "f"), *[CallEnd(i)] * (has_end or i)] for i in range(2)]
    read = SimpleNamespace(feed=lambda *token: calls.pop(0) if calls else [], finish=list)
    output = OutputText(TOKENIZER, (), SamplingParams(), read, max_calls)

    piece = output.add_tokens(TOKENIZER.encode("1 2 3 4 5 6"), (), None)

    assert [event.index for event in piece.events if isinstance(event, CallBegin)] == (
        [0] if max_calls == 1 else [0, 1]
    )
    assert (piece.finish_reason == "stop") == (max_calls is not None)


def test_end_ids_follow_ignore_eos():
    own = TOKENIZER.eos_ids

    assert end_ids(TOKENIZER, SamplingParams(stop_token_ids=(7,))) == (*own, 7)
    assert end_ids(TOKENIZER, SamplingParams(ignore_eos=True)) == ()


def write_model(directory: Path, template: str) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_bytes((MODEL / name).read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set x = messages.append(1) %}",
        "{{ raise_exception('no') }}",
        "{% for i in range(100000) %}{% for j in range(10000) %}xxxxxxxxxxxxxxxxx{% endfor %}"
        "{% endfor %}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_misbehaves_is_refused(tmp_path, template):
    tokenizer = Tokenizer(write_model(tmp_path, template))

    with pytest.raises(InvalidParameterError):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer(write_model(tmp_path, "{% for %}"))


def test_a_tokenizer_that_cannot_be_read_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("unit", ["a ", "hello world, ", "a", " ", "\n", "é€", "🙂", "12"])
def test_a_long_text_is_taken_up_to_the_last_token_and_no_further(unit):
    text = unit * (150_000 // len(unit))  # three parts
    ids = TOKENIZER.encode(text, max_tokens=len(text) * 4)

    assert TOKENIZER.encode(text, max_tokens=len(ids)) == ids
    with pytest.raises(RequestTooLongError, match="tokens"):
        TOKENIZER.encode(text, max_tokens=len(ids) - 1)


def test_a_text_of_far_too_many_tokens_is_refused_by_its_beginning(monkeypatch):
    text = "a " * 200_000
    ids = TOKENIZER.encode(text, max_tokens=len(text))
    encoded, encode = [], TOKENIZER._encode

    def counting(part, *options):
        encoded.append(len(part))
        return encode(part, *options)

    monkeypatch.setattr(TOKENIZER, "_encode", counting)
    with pytest.raises(RequestTooLongError):
        TOKENIZER.encode(text, max_tokens=len(ids) // 20)

    assert sum(encoded) < len(text) / 2
