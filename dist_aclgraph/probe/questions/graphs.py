"""Questions about capture, replay and task updates of ACL graphs, and about graphs' streams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from dist_aclgraph.probe.question import (
    ACCEPTED,
    DIFFERENT,
    EQUAL,
    REFUSED,
    Answer,
    Bench,
    Between,
    Probe,
)
from dist_aclgraph.probe.questions.operators import (
    BLOCK,
    DIM,
    attention_arguments,
    blocks_in_order,
    in_version_2,
)

EDGES = (1, 1023, 1024, 2048)  # KV lengths; at 1024 keys, a kernel of CANN 9 changes its algorithm
LONGEST = 32_768  # largest KV length
OPERATOR = "npu_fused_infer_attention_score"
# Latent attention, and attention with sinks, use this version.
OPERATOR_V2 = "npu_fused_infer_attention_score_v2"
LAYERS = 28  # number of layers of Qwen3-0.6B
NUM_CAPTURES = 32
IN_FLIGHT = 2
NUM_STEPS = 1000


def captured(bench: Bench, body: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture a call of ``body``; return the graph and the result of the call."""
    graph = bench.torch.npu.NPUGraph()
    with bench.torch.npu.graph(graph):
        result = body()
    return graph, result


def _replay(bench: Bench) -> Answer:
    x = bench.torch.ones(64, device="npu")
    graph, y = captured(bench, lambda: (x * 2 + 1) * x)
    for value in (1.0, 5.0, -2.0):
        x.fill_(value)
        graph.replay()
        answer = bench.compare(y, bench.torch.full((64,), (value * 2 + 1) * value))
        if answer.found != EQUAL:
            break
    return answer


def _side_stream(bench: Bench) -> Answer:
    torch = bench.torch
    x, side = torch.ones(64, 64, device="npu"), torch.npu.Stream()

    def body() -> Any:
        main = torch.npu.current_stream()
        a = x * 2
        side.wait_stream(main)
        with torch.npu.stream(side):
            b = a
            for _ in range(20):
                b = b + a
        c = a + 1
        main.wait_stream(side)
        return b + c

    graph, y = captured(bench, body)
    x.fill_(3.0)
    graph.replay()
    return bench.compare(y, torch.full((64, 64), 21 * 6.0 + 7.0))


def _unjoined_stream(bench: Bench) -> str:
    torch = bench.torch
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def body() -> Any:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return x + 1

    captured(bench, body)
    return ACCEPTED


def _inside_capture(bench: Bench, call: Callable[[Bench, Any], Any]) -> Answer:
    """Execute ``call`` during a capture, and test whether the graph is still valid."""
    x = bench.torch.ones(4, device="npu")
    refusal: list[str] = []

    def body() -> Any:
        y = x + 1
        try:
            call(bench, x)
        except RuntimeError as e:
            refusal.append(str(e))
        return y * 2

    graph, y = captured(bench, body)
    graph.replay()
    is_valid = y.cpu().tolist() == [4.0] * 4
    found = REFUSED if refusal else ACCEPTED
    return Answer(f"{found}, graph {'valid' if is_valid else 'wrong'}", "".join(refusal))


def _query_event(bench: Bench, x: Any) -> None:
    event = bench.torch.npu.Event()
    event.record()
    event.query()


def _accounting(bench: Bench) -> str:
    bench.torch.ones(4, device="npu")
    return "pinned" if bench.npu.counts_graphs(bench.torch.npu.Stream()) else "software_sq"


def _streams_of_a_graph(bench: Bench) -> float:
    x = bench.torch.ones(4, device="npu")
    captured(bench, lambda: x + 1)[0].reset()  # the first capture creates torch_npu's own streams
    before = bench.npu.available_streams()
    graphs = [captured(bench, lambda: x + 1)[0] for _ in range(NUM_CAPTURES)]
    taken = before - bench.npu.available_streams()
    for graph in graphs:
        graph.reset()
    return float(taken) / NUM_CAPTURES


def _streams_come_back(bench: Bench) -> str:
    x = bench.torch.ones(4, device="npu")
    captured(bench, lambda: x + 1)[0].reset()
    before = bench.npu.available_streams()
    for _ in range(NUM_CAPTURES):
        captured(bench, lambda: x + 1)[0].reset()
    lost = before - bench.npu.available_streams()
    return f"{lost} streams are lost"


class UpdatableGraph:
    """A graph whose attention tasks wait for external events, as in ``graphs/task_update.py``.

    Args:
        longest: the largest KV length that an update can set.
        operator: name of the attention operator.
        at_once: whether a single call both updates a task and records its event.
    """

    def __init__(
        self,
        bench: Bench,
        num_tasks: int = 1,
        longest: int = EDGES[-1],
        *,
        operator: str = OPERATOR,
        at_once: bool = False,
    ) -> None:
        # The next import loads torch; only a child process may do this.
        from dist_aclgraph.device.npu import update_at_once

        torch = bench.torch
        self._bench = bench
        self._operator = operator
        self._at_once = update_at_once(operator) if at_once else None
        if at_once and self._at_once is None:
            raise AttributeError(f"torch_npu has no call that updates {operator} at once")
        self.query = torch.randn(1, 4, DIM).bfloat16().npu()
        num_blocks = longest // BLOCK
        self.keys, self.values = (
            torch.randn(num_blocks, BLOCK, 2, DIM).bfloat16().npu() for _ in range(2)
        )
        self._table = blocks_in_order(bench, self.keys, 1)
        self.out = torch.zeros_like(self.query)
        lse = torch.zeros(1, dtype=torch.bfloat16, device="npu")
        arguments = self._arguments(1)
        # The workspace is large enough for all lengths up to ``longest``.
        sizing = getattr(torch.ops.npu, f"_{operator}_get_max_workspace")
        self._written = {"workspace": sizing(**arguments), "out": [self.out, lse]}
        self._overload = getattr(torch.ops.npu, operator).out
        self.update_stream = torch.npu.Stream()
        self._tasks: list[tuple[Any, Any]] = []
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph):
            stream = torch.npu.current_stream()
            for _ in range(num_tasks):
                event = torch.npu.ExternalEvent()
                event.wait(stream)
                event.reset(stream)
                torch.npu.graph_task_group_begin(stream)
                self._overload(**arguments, **self._written)
                self._tasks.append((torch.npu.graph_task_group_end(stream), event))

    def update(self, length: int) -> None:
        """Set the KV length of all tasks, and record the events for which the tasks wait."""
        arguments = self._arguments(length)
        torch = self._bench.torch
        with torch.npu.stream(self.update_stream):
            for handle, event in self._tasks:
                if self._at_once is not None:
                    self._at_once(self.update_stream, handle, event, **arguments, **self._written)
                    continue
                torch.npu.graph_task_update_begin(self.update_stream, handle)
                self._overload(**arguments, **self._written)
                torch.npu.graph_task_update_end(self.update_stream)
                event.record(self.update_stream)

    def close(self) -> None:
        """Undo an update that no replay has used. Wait for the update's events, and reset these
        events.
        """
        main = self._bench.torch.npu.current_stream()
        for _, event in self._tasks:
            event.wait(self.update_stream)
            event.reset(self.update_stream)
        main.wait_stream(self.update_stream)

    def eager(self, length: int) -> Any:
        """Run the operator without a graph; return a copy of its result on the host."""
        run = getattr(self._bench.ops, self._operator)
        return run(**self._arguments(length))[0].cpu()

    def _arguments(self, length: int) -> dict[str, Any]:
        arguments = attention_arguments(self.query, self.keys, self.values, [length], self._table)
        return in_version_2(arguments) if self._operator == OPERATOR_V2 else arguments


def _of_version_2(bench: Bench, ask: Callable[..., Answer | float]) -> Answer | float:
    """Ask about version 2 of the attention operator. Update its tasks in the same way as the
    runtime.
    """
    # The next import loads torch; only a child process may do this.
    from dist_aclgraph.device.npu import update_at_once

    return ask(bench, operator=OPERATOR_V2, at_once=update_at_once(OPERATOR_V2) is not None)


def _update_lengths(bench: Bench, *, operator: str = OPERATOR, at_once: bool = False) -> Answer:
    graph = UpdatableGraph(bench, longest=LONGEST, operator=operator, at_once=at_once)
    for length in (*EDGES, LONGEST, *reversed(EDGES)):
        answer = _replay_with(bench, graph, length)
        if answer.found != EQUAL:
            return Answer(DIFFERENT, f"length {length}: {answer.text}")
    return Answer(EQUAL)


def _replay_with(bench: Bench, graph: UpdatableGraph, length: int) -> Answer:
    """Queue a replay of the graph, then set the KV length of this replay."""
    graph.graph.replay()
    graph.update(length)
    bench.synchronize()
    return bench.compare(graph.out, graph.eager(length))


def _update_ahead(bench: Bench) -> Answer:
    graph = UpdatableGraph(bench)
    graph.update(77)
    graph.graph.replay()
    bench.synchronize()
    return bench.compare(graph.out, graph.eager(77))


def _wrong_guess(bench: Bench) -> Answer:
    """Set a wrong KV length, undo this update, queue a replay, and set the right KV length."""
    graph = UpdatableGraph(bench)
    for guess, length in ((77, 78), (2048, 1)):
        graph.update(guess)
        graph.close()
        answer = _replay_with(bench, graph, length)
        if answer.found != EQUAL:
            return Answer(DIFFERENT, f"length {length} after {guess}: {answer.text}")
    return Answer(EQUAL)


def _in_flight(bench: Bench) -> Answer:
    """Queue replays and updates while earlier replays run; compare every result."""
    torch = bench.torch
    graph = UpdatableGraph(bench)
    wanted = [graph.eager(length) for length in EDGES]
    results = torch.zeros(NUM_STEPS, *graph.out.shape[1:], dtype=graph.out.dtype, device="npu")
    main = torch.npu.current_stream()
    replayed = [torch.npu.Event() for _ in range(IN_FLIGHT)]
    for i in range(NUM_STEPS):
        done = replayed[i % IN_FLIGHT]
        if i >= IN_FLIGHT:
            done.synchronize()
        if i:
            graph.update_stream.wait_event(replayed[(i - 1) % IN_FLIGHT])
        graph.graph.replay()
        graph.update(EDGES[i % len(EDGES)])
        results[i].copy_(graph.out[0])
        done.record(main)
    found = results.cpu()
    wrong = [i for i in range(NUM_STEPS) if not torch.equal(found[i], wanted[i % len(EDGES)][0])]
    return Answer(DIFFERENT, f"steps {wrong[:20]}") if wrong else Answer(EQUAL)


def _us_of_an_update(bench: Bench, *, operator: str = OPERATOR, at_once: bool = False) -> float:
    """Return the host's time for an update of one task (begin, operator, end, record), in µs."""
    graph = UpdatableGraph(bench, LAYERS, operator=operator, at_once=at_once)
    times = []
    for _ in range(20):
        graph.graph.replay()
        begun = time.perf_counter()
        graph.update(100)
        times.append(time.perf_counter() - begun)
        bench.synchronize()
    return statistics.median(times) * 1e6 / LAYERS


def _other_operator(bench: Bench) -> str:
    torch = bench.torch
    x, y = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    updates = torch.npu.Stream()

    def body() -> Any:
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        torch.add(x, 3.0, out=y)
        return torch.npu.graph_task_group_end(stream)

    _, handle = captured(bench, body)
    with torch.npu.stream(updates):
        torch.npu.graph_task_update_begin(updates, handle)
        torch.mul(x, 3.0, out=y)
        torch.npu.graph_task_update_end(updates)
    return ACCEPTED


def _ai_cpu(bench: Bench) -> str:
    # The next import loads torch; only a child process may do this.
    from dist_aclgraph.device.npu import ai_cpu_operators

    x = bench.torch.ones(8, device="npu")
    graph, _ = captured(bench, lambda: x * 2)
    return f"{len(ai_cpu_operators(graph))} operators"


def _after_refusal(bench: Bench) -> Answer:
    """Capture an operator that the device refuses; then compute something else."""
    torch = bench.torch
    x, gamma = torch.zeros(2, 64).half().npu(), torch.zeros(32).half().npu()
    torch.npu.synchronize()
    try:
        captured(bench, lambda: bench.ops.npu_rms_norm(x, gamma))
    except RuntimeError:
        return bench.compare(torch.ones(4, device="npu") + 1, torch.full((4,), 2.0))
    return Answer("the capture was not refused")


def _refused_inside(name: str, what: str, call: Callable[[Bench, Any], Any]) -> Probe:
    return Probe(
        f"graphs.{name}_inside",
        f"Is {what} in a capture refused, and the graph valid?",
        partial(_inside_capture, call=call),
        f"{REFUSED}, graph valid",
    )


PROBES = (
    Probe("graphs.replay", "Does a replay read its inputs anew?", _replay, EQUAL, "quick"),
    Probe("graphs.side_stream", "Is a forked and joined stream replayed?", _side_stream, EQUAL),
    Probe(
        "graphs.accounting",
        "Are streams of graphs counted (pinned), or do graphs borrow queues (software_sq)?",
        _accounting,
        "pinned",
        setting="accounting",
    ),
    Probe(
        "graphs.streams",
        "How many streams does a graph on one stream take?",
        _streams_of_a_graph,
        Between(1, 1, "streams"),
    ),
    Probe(
        "graphs.streams_come_back",
        f"Are all streams free after {NUM_CAPTURES} captures and releases?",
        _streams_come_back,
        "0 streams are lost",
    ),
    Probe(
        "graphs.ai_cpu",
        "How many operators of a product run on the AI CPU?",
        _ai_cpu,
        "0 operators",
    ),
    Probe(
        "graphs.update_lengths",
        f"Does an update to KV lengths {(*EDGES, LONGEST)} give the eager result?",
        _update_lengths,
        EQUAL,
        "quick",
    ),
    Probe(
        "graphs.update_lengths_at_once",
        "Does it if one call updates a task and records its event?",
        partial(_update_lengths, at_once=True),
        EQUAL,
    ),
    Probe(
        "graphs.update_lengths_v2",
        "Does it with version 2 of attention (latents, sinks)?",
        partial(_of_version_2, ask=_update_lengths),
        EQUAL,
    ),
    Probe("graphs.update_ahead", "Does an update before its replay count?", _update_ahead, EQUAL),
    Probe(
        "graphs.update_us",
        "How many microseconds of the host does the update of one task take?",
        _us_of_an_update,
        Between(0, 1000, "us"),
    ),
    Probe(
        "graphs.update_at_once_us",
        "How many microseconds does it take in one call?",
        partial(_us_of_an_update, at_once=True),
        Between(0, 1000, "us"),
    ),
    Probe(
        "graphs.update_us_v2",
        "How many microseconds does it take with version 2 of attention?",
        partial(_of_version_2, ask=_us_of_an_update),
        Between(0, 1000, "us"),
    ),
    Probe(
        "graphs.wrong_guess",
        "Is a replay right if an update ahead of it was taken back?",
        _wrong_guess,
        EQUAL,
    ),
    Probe(
        "graphs.in_flight",
        f"Are {NUM_STEPS} replays, {IN_FLIGHT} at a time, with updates, all right?",
        _in_flight,
        EQUAL,
    ),
    _refused_inside("synchronize", "a synchronize", lambda bench, x: bench.synchronize()),
    _refused_inside("read", "a copy to the host", lambda bench, x: x.cpu()),
    _refused_inside(
        "query", "a query of the stream", lambda bench, x: bench.torch.npu.current_stream().query()
    ),
    _refused_inside("event_query", "a query of a captured event", _query_event),
    Probe(
        "graphs.unjoined_stream",
        "Is a capture refused whose stream was not joined?",
        _unjoined_stream,
        REFUSED,
    ),
    Probe(
        "graphs.other_operator",
        "Is an update by another operator refused?",
        _other_operator,
        REFUSED,
    ),
    Probe(
        "graphs.after_refusal",
        "Does the device compute after a capture with a refused operator?",
        _after_refusal,
        EQUAL,
    ),
    Probe(
        "graphs.after_refusal_queued",
        "Does it with TASK_QUEUE_ENABLE=1?",
        _after_refusal,
        EQUAL,
        task_queue=1,
    ),
)
