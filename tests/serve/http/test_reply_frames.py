"""Frames with long reports are made on another thread, and keep their position in the stream."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai.generation import ChoicePiece
from dist_aclgraph.serve.openai.reply import ReplyShape, _Frames
from dist_aclgraph.steps.step import PromptLogprobs

REPORT = (PromptLogprobs(0, 1, b"", b"", b""),)


class Texts(ReplyShape):
    """Makes one frame of each text. A frame with a report is made only after ``is_free`` is set."""

    shows_usage_so_far = True

    def __init__(self):
        self.is_free = threading.Event()
        self.threads = {}

    def frames(self, usage, piece):
        self.threads[piece.text] = threading.current_thread()
        if piece.text == "bad":
            raise InvalidParameterError("no report")
        if piece.prompt_logprobs:
            assert self.is_free.wait(180)
        return f"{piece.text}{usage} ".encode()

    def last_frames(self, generation):
        return b"end"

    def whole(self, generation, pieces):
        raise NotImplementedError


def piece(text, report=()):
    return ChoicePiece(0, text, (), (), None, [], report)


async def sent(pieces, error=None):
    """Send the pieces; return the bytes that a client gets, and for each frame, the thread that
    made it.
    """
    shape, generation, parts = Texts(), SimpleNamespace(usage=0), []
    frames = _Frames(shape, generation)
    for each in pieces:
        frames.add_piece(each)
        generation.usage += 1
    await asyncio.sleep(0)
    frames.finish(error)
    shape.is_free.set()  # the event loop got here, although a frame still waits for ``is_free``

    async def send(message):
        parts.append(message["body"])

    await frames.outlet.send_to({}, send)
    return b"".join(parts), shape.threads


def test_a_report_is_made_on_a_thread_and_all_frames_keep_their_order_and_usage():
    body, threads = asyncio.run(sent([piece("a"), piece("b", REPORT), piece("c"), piece("d")]))

    assert body == b"a0 b1 c2 d3 end"
    assert threads["a"] is threading.main_thread()
    assert threads["b"] is not threading.main_thread()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_report_that_fails_ends_the_stream_with_an_error(is_late):
    body, _ = asyncio.run(sent([piece("a"), piece("bad", REPORT), *[piece("c")] * is_late]))

    assert body.startswith(b'a0 data: {"error"')
    assert b"end" not in body


def test_an_error_comes_after_the_frames_before_it():
    error = InvalidParameterError("broken")

    body, _ = asyncio.run(sent([piece("a", REPORT), piece("b")], error))

    assert body.startswith(b"a0 b1 data: ")
    assert b"broken" in body
