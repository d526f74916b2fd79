"""If an engine dies, its requests continue on another engine, and get the same tokens as without
the death.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.token_log import OpenRequest
from dist_aclgraph.actors.wire.messages import Submit, error_of
from dist_aclgraph.arrays.ints import INT_BYTES, pack_ints, unpack_ints
from dist_aclgraph.errors import EngineDeadError
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import Request, row_sampling
from dist_aclgraph.steps.delta import RequestDelta
from tests.serve.conftest import WAIT_S, until
from tests.serve.fake_engine import NODE, TOKEN, FakeEngine

LINK_S = 10.0  # so long that no engine counts as silent, even on a busy machine
PROMPT = [7, 8, 9]
END_ID = 5000


def by_position(submit: Submit) -> list[int]:
    """Return output tokens that depend only on their positions."""
    first = len(submit.prompt) // INT_BYTES
    return [1000 + first + i for i in range(submit.max_tokens)]


def wanted(count: int) -> list[int]:
    return [1000 + len(PROMPT) + i for i in range(count)]


def all_of(deltas: queue.Queue[RequestDelta]) -> list[int]:
    """Collect the deltas of a request; check that it ends without an error; return its tokens."""
    tokens: list[int] = []
    while True:
        delta = deltas.get(timeout=WAIT_S)
        tokens += delta.tokens
        if delta.finish_reason is not None:
            assert not delta.error
            return tokens


@dataclass
class Engines:
    engines: list[FakeEngine]
    client: EngineClient
    deltas: queue.Queue[RequestDelta] = field(default_factory=queue.Queue)

    def submit(self, count: int, **more: object) -> None:
        params = SamplingParams(max_tokens=count, **more)
        self.client.submit("a", PROMPT, params, (END_ID,), self.deltas.put, seed=11)

    @property
    def running(self) -> FakeEngine:
        [found] = [engine for engine in self.engines if engine.num_running and not engine.is_closed]
        return found

    def lose_running(self) -> None:
        """Let the engine of the running request fail with EngineDeadError. Return when the request
        continues on another engine, and the failed engine serves again.
        """
        resumed, engine = self.client.num_resumed, self.running
        engine.fail_after = (0, "EngineDeadError")
        until(lambda: self.client.num_resumed > resumed)
        engine.fail_after = None
        until(lambda: not self.is_lost(engine))

    def is_lost(self, engine: FakeEngine) -> bool:
        [known] = [k for k in self.client._known() if k.url == engine.address.file.url]
        return bool(known.dead_because)

    def wait_until_all_serve(self) -> None:
        until(lambda: all(known.link.is_welcome for known in self.client._known()))

    def collect(self, count: int | None = None) -> tuple[list[int], RequestDelta]:
        """Read ``count`` tokens of the request, or all tokens if ``count`` is None."""
        tokens: list[int] = []
        while True:
            delta = self.deltas.get(timeout=WAIT_S)
            tokens += delta.tokens
            if delta.finish_reason is not None or len(tokens) == count:
                return tokens, delta


@contextmanager
def serving(count: int, link_s: float) -> Iterator[Engines]:
    engines = [FakeEngine(by_position, step_s=0.005) for _ in range(count)]
    addresses = [engine.address for engine in engines]
    found = Engines(engines, EngineClient(addresses, TOKEN, node_id=NODE, link_s=link_s))
    found.wait_until_all_serve()
    yield found
    found.client.close()
    for engine in engines:
        engine.close()


@pytest.fixture
def three() -> Iterator[Engines]:
    with serving(3, LINK_S) as engines:
        yield engines


def test_a_request_goes_on_where_its_engine_died(three: Engines) -> None:
    three.submit(400, temperature=0.5, frequency_penalty=0.3, min_tokens=300)
    before, _ = three.collect(20)
    first = three.running

    first.close()

    after, last = three.collect()
    assert before + after == wanted(400)
    assert last.finish_reason == "length"
    [again] = [e.requests[0] for e in three.engines if e.requests and e is not first]
    given_before = [int(i) for i in unpack_ints(again.prompt)][len(PROMPT) :]
    assert given_before == wanted(len(given_before))
    assert again.max_tokens == 400 - len(given_before)
    assert again.sampling == first.submitted[0].sampling
    assert again.sampling.num_prompt_tokens == len(PROMPT)
    assert three.client.num_resumed == 1


def test_a_missing_message_of_an_engine_loses_no_token(three: Engines) -> None:
    three.submit(400)
    before, _ = three.collect(20)
    first = three.running

    first.skipped = 1

    after, _ = three.collect()
    assert before + after == wanted(400)
    until(lambda: first.num_running == 0)


def test_an_engine_that_says_that_it_is_dead_loses_no_request(three: Engines) -> None:
    three.submit(400)
    before, _ = three.collect(20)

    three.running.fail_after = (0, "EngineDeadError")

    after, _ = three.collect()
    assert before + after == wanted(400)


def test_another_error_ends_a_request(three: Engines) -> None:
    three.submit(400)
    three.collect(20)

    three.running.fail_after = (0, "RequestTooLongError")

    assert three.collect()[1].error_kind == "RequestTooLongError"
    assert three.client.num_resumed == 0


def test_an_abort_reaches_the_engine_that_went_on(three: Engines) -> None:
    three.submit(100_000)
    three.collect(20)
    first = three.running
    first.close()
    until(lambda: three.client.num_resumed == 1)
    until(lambda: any(e.num_running for e in three.engines if e is not first))

    three.client.abort("a")

    until(lambda: not any(e.num_running for e in three.engines if e is not first))


def test_a_request_that_kills_its_engines_ends_after_two_deaths(three: Engines) -> None:
    for engine in three.engines:
        engine.poison = "a"

    three.submit(100_000)

    tokens, last = three.collect()
    assert isinstance(error_of(last), EngineDeadError)
    assert tokens == []
    assert "2 engines died while they ran this request, all of them near output" in last.error
    assert three.client.num_resumed == 1


@pytest.mark.parametrize("poison_after", [0, 1], ids=["prefill", "decode"])
def test_its_neighbours_go_on(three: Engines, poison_after: int) -> None:
    """The other requests lose their engine twice. Each of these requests is then a possible cause,
    so the requests run one after another.
    """
    names = [f"n{i}" for i in range(8)]
    deltas = {name: queue.Queue() for name in names}
    for name in names:
        three.client.submit(
            name, PROMPT, SamplingParams(max_tokens=400), (), deltas[name].put, seed=11
        )
    for engine in three.engines:
        engine.poison, engine.poison_after = "a", poison_after

    three.submit(30)

    assert "2 engines died" in three.collect()[1].error
    for name in names:
        assert all_of(deltas[name]) == wanted(400)
    assert sum(engine.num_deaths for engine in three.engines) == 2


def test_a_request_for_one_more_token_ends_with_this_token(three: Engines) -> None:
    for engine in three.engines:
        engine.poison, engine.poison_after = "a", 1

    three.submit(2)

    assert three.collect()[0] == wanted(2)
    assert sum(engine.num_deaths for engine in three.engines) == 1


def test_deaths_between_which_a_request_got_tokens_do_not_end_it(three: Engines) -> None:
    three.submit(20_000)
    for _ in range(5):
        three.collect(5)
        until(lambda: any(engine.num_sent("a") > 1 for engine in three.engines))
        three.lose_running()

    _, last = three.collect(40)

    assert last.finish_reason is None, last.error
    assert three.client.num_resumed == 5


@given(
    st.lists(st.integers(0, 5), max_size=2),
    st.integers(1, 30),
    st.integers(1, 20),
)
def test_a_continued_request_asks_only_for_the_missing_tokens(
    lost_after: list[int], max_tokens: int, num_prompt: int
) -> None:
    """Lost engines do not change the total length of prompt and output."""
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min(4, max_tokens))
    prompt = list(range(num_prompt))
    sampling = row_sampling(params, seed=1, num_prompt_tokens=num_prompt, end_ids=())
    log = OpenRequest(
        "a", bytearray(pack_ints(prompt)), sampling, max_tokens, (), "", lambda delta: None
    )
    for count in lost_after:
        for _ in range(min(count, max_tokens - log.num_output_tokens - 1)):
            log.note(RequestDelta("a", pack_ints([9])))

    again = log.submit(0)

    assert len(again.prompt) // INT_BYTES + again.max_tokens == num_prompt + max_tokens
    asked = Request("a", unpack_ints(again.prompt), again.sampling, max_tokens=again.max_tokens)
    assert asked.min_total_tokens == num_prompt + params.min_tokens
