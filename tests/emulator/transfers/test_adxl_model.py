"""Law: any sequence of calls of three ``adxl`` engines has the results that a model of CANN's
documents gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.adxl_engines import (
    ALREADY,
    DEVICE,
    FAILED,
    INVALID,
    LONG_MS,
    NOT_CONNECTED,
    OK,
    READ,
    WRITE,
    Engine,
    build_program,
)
from tests.laws import examples

ARENA = 1024
PLACES = st.sampled_from([0, 1, 255, 256, 257, 511, 512, 513])
LENGTHS = st.sampled_from([1, 255, 256, 257, 512])
ENGINES = st.integers(0, 2)
# A span begins in, or near, a registered range of each engine. A test draws four numbers for a
# span: the index of each range, a shift of the local offset, and a change of the length.
SHIFTS = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
SPANS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8), SHIFTS, SHIFTS), min_size=1, max_size=3
)
REGISTER = st.tuples(st.just("register"), ENGINES, PLACES, LENGTHS)
CONNECT = st.tuples(st.just("connect"), ENGINES, ENGINES)
TRANSFER = st.tuples(
    st.just("transfer"), ENGINES, ENGINES, st.integers(0, 8), st.sampled_from([READ, WRITE]), SPANS
)
OTHERS = st.one_of(
    st.tuples(st.just("deregister"), ENGINES, st.integers(0, 1)),
    st.tuples(st.just("disconnect"), ENGINES, ENGINES),
    st.tuples(st.just("fill"), ENGINES, PLACES, LENGTHS, st.integers(0, 255)),
)
# Engines refuse most random calls, so the first calls register ranges and make links.
CALLS = st.tuples(
    st.lists(REGISTER, min_size=4, max_size=9),
    st.lists(CONNECT, min_size=2, max_size=6),
    st.lists(TRANSFER, max_size=10),
    st.lists(st.one_of(OTHERS, CONNECT, REGISTER, TRANSFER), max_size=40),
).map(lambda parts: [call for part in parts for call in part])


class Model:
    """A model of three engines, made from CANN's documents. Each engine has one arena of memory."""

    def __init__(self) -> None:
        self.memory = [bytearray([number + 1] * ARENA) for number in range(3)]
        self.ranges: list[list[tuple[int, int, int]]] = [[], [], []]  # handle, begin, end
        self.links: dict[tuple[int, int], tuple[list, list]] = {}  # values: ranges of both ends

    def register(self, engine: int, handle: int, place: int, length: int) -> None:
        self.ranges[engine].append((handle, place, place + length))

    def deregister(self, engine: int, handle: int) -> int:
        if any(engine in pair for pair in self.links):
            return FAILED
        self.ranges[engine] = [each for each in self.ranges[engine] if each[0] != handle]
        return OK

    def connect(self, client: int, server: int) -> int:
        if (client, server) in self.links:
            return ALREADY
        if client == server:
            return INVALID
        self.links[client, server] = list(self.ranges[client]), list(self.ranges[server])
        return OK

    def disconnect(self, client: int, server: int) -> int:
        return NOT_CONNECTED if self.links.pop((client, server), None) is None else OK

    def spans(self, pair: tuple[int, int], wanted: list) -> list[tuple[int, int, int]]:
        """Return, for each wanted span, its place at both ends and its length."""
        found = []
        mine, yours = self.links.get(pair, ([], []))
        for a, b, shift, more in wanted:
            _, first, first_end = mine[a % len(mine)] if mine else (0, 0, 9)
            _, second, second_end = yours[b % len(yours)] if yours else (0, 0, 9)
            length = max(1, min(first_end - first, second_end - second) + more)
            found.append((max(0, first + shift), second, length))
        return found

    def transfer(self, client: int, server: int, operation: int, spans: list) -> int:
        if (client, server) not in self.links:
            return NOT_CONNECTED
        for span in spans:
            for ranges, place in zip(self.links[client, server], span[:2], strict=True):
                end = place + span[2]
                if not any(first <= place and end <= last for _, first, last in ranges):
                    return INVALID
        for mine, yours, length in spans:
            ends = (client, mine), (server, yours)
            (target, to), (source, from_) = ends if operation == READ else ends[::-1]
            self.memory[target][to : to + length] = self.memory[source][from_ : from_ + length]
        return OK


@pytest.fixture(scope="module")
def three_engines(tmp_path_factory) -> Iterator[list[Engine]]:
    program = build_program(tmp_path_factory.mktemp("adxl"))
    engines = [Engine(program, {}, {"HCCL_INTRA_ROCE_ENABLE": "1"}, n) for n in range(3)]
    yield engines
    for engine in engines:
        engine.process.kill()
        engine.process.communicate()


@given(CALLS)
@examples(200)
def test_any_calls_do_what_a_model_does(three_engines, calls):
    model, engines = Model(), three_engines
    arenas = []
    for number, engine in enumerate(engines):
        engine.wants("finalize")
        engine.begin()
        (arena,) = engine.wants("malloc", ARENA)
        engine.wants("fill", arena, ARENA, number + 1)
        arenas.append(int(arena))

    for call, number, *more in calls:
        engine, arena = engines[number], arenas[number]
        if call == "register":
            place, length = more[0], min(more[1], ARENA - more[0])
            (handle,) = engine.wants("register", arena + place, length, DEVICE)
            model.register(number, int(handle), place, length)
        elif call == "deregister":
            handles = [handle for handle, *_ in model.ranges[number]]
            if more[0] < len(handles):
                handle = handles[more[0]]
                assert engine.status("deregister", handle) == model.deregister(number, handle)
        elif call == "connect":
            status = engine.status("connect", engines[more[0]].name, LONG_MS)
            assert status == model.connect(number, more[0]), engine.text
        elif call == "disconnect":
            status = engine.status("disconnect", engines[more[0]].name, LONG_MS)
            assert status == model.disconnect(number, more[0]), engine.text
        elif call == "fill":
            place, length = more[0], min(more[1], ARENA - more[0])
            engine.wants("fill", arena + place, length, more[2])
            model.memory[number][place : place + length] = bytes([more[2]] * length)
        else:
            peer, chosen, operation, wanted = more
            if model.links and chosen:  # chosen == 0: the drawn engines, maybe without link
                number, peer = sorted(model.links)[chosen % len(model.links)]
                engine, arena = engines[number], arenas[number]
            spans = model.spans((number, peer), wanted)
            words = [word for a, b, n in spans for word in (arena + a, arenas[peer] + b, n)]
            status = engine.move(engines[peer], operation, *words)
            assert status == model.transfer(number, peer, operation, spans), engine.text

    for number, engine in enumerate(engines):
        runs = [(value, len(list(run))) for value, run in itertools.groupby(model.memory[number])]
        assert engine.bytes_at(arenas[number], ARENA) == " ".join(f"{v}*{n}" for v, n in runs)
        engine.wants("free", arenas[number])
