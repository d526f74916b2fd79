"""``make bench-serve``: the CPU time and the latency of a token, from the engine's message to the
client's socket.

A paced engine has no model. At fixed intervals (steps), it sends one token to each stream, over the
usual links between engines and clients. The bench measures the CPU time per token of the processes
that serve HTTP, and the time from a step's result until the client has the frame. The bench
compares ``dist-aclgraph serve`` with three other servers: a bare uvicorn that sends the same frames
(the floor), Ray Serve behind Ray's own proxy, and Ray Serve behind HAProxy. ``dist-aclgraph serve``
is also measured with requests that have a tool. All servers take turns in one run. On a busy
machine, CPU times are still meaningful, but wall times are not.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.common.command import numbers, report_bench, run_command
from benchmarks.common.report import Report, draw_bars, make_table, sheet
from benchmarks.processes.serve_client import Ask, make_request, run_client
from benchmarks.processes.serve_on_ray import ray_serve
from benchmarks.processes.serve_servers import Server, floor, pid_of, plain, spawn
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.files.shipped import shipped
from dist_aclgraph.text.tokenizer import Tokenizer

TEXT = "The device never waits for the host, and tokens never wait for their readers. "
PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
WARM_UP = 20  # steps
SETTLE_S = 0.05  # seconds that servers may still take to send the frames of the last step
FRAMES_BEFORE = 1  # frames before the first token's frame: one frame with the assistant's role
GOAL_CPU_US, GOAL_LATENCY_MS = 20.0, 1.0
GOAL_TOKENS_PER_S = 300_000
COLUMNS = {
    "server": "{server}",
    "streams": "{streams}",
    "CPU us a token": "{cpu_us:.1f}",
    "of the floor": "{of_floor:.2f}",
    "result to frame, ms p50": "{latency_ms_p50:.2f}",
    "p99": "{latency_ms_p99:.2f}",
}
INGRESS_COLUMNS = {
    "ingresses": "{ingresses}",
    "streams of each": "{streams}",
    "CPU us a token": "{cpu_us:.1f}",
    "of the busiest ingress": "{ingress_us:.1f}",
    "tokens/s of an ingress": "{tokens_per_s:,.0f}",
    f"ingresses for {GOAL_TOKENS_PER_S:,} tokens/s": "{needed}",
}


@dataclass(frozen=True)
class Pace:
    """The number of steps in a turn, and the time between two steps."""

    steps: int
    interval_s: float


def main(
    streams: Annotated[str, typer.Option(help="Requests that are streamed together.")] = "1,8,32",
    steps: Annotated[int, typer.Option(help="Tokens of a stream.")] = 400,
    interval_ms: Annotated[float, typer.Option(help="Between two steps.")] = 5.0,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 3,
    on_ray: Annotated[bool, typer.Option(help="Ray Serve besides.")] = True,
    ingresses: Annotated[str, typer.Option(help="Numbers of ingresses of one service.")] = "1,2",
    of_ingress: Annotated[str, typer.Option(help="Streams of each of these.")] = "32,128",
    apart: Annotated[bool, typer.Option(help="Servers on one core, all else on others.")] = False,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("bench-results"),
) -> None:
    """Measure, print and save."""
    pace, sizes = Pace(steps, interval_ms / 1e3), numbers(streams)
    report_bench(
        "serve",
        out,
        lambda folder, bar: {
            **measure(folder, bar, sizes, pace, repeats, on_ray=on_ray, is_apart=apart),
            "ingresses": measure_ingresses(
                folder, bar, numbers(ingresses), numbers(of_ingress), pace, repeats
            ),
        },
        report,
        draw,
    )


def measure(
    folder: Path,
    bar: Progress,
    sizes: Sequence[int],
    pace: Pace,
    repeats: int,
    *,
    on_ray: bool,
    is_apart: bool,
) -> dict[str, Any]:
    """Stream from each server in turn. Return one row for each server and each number of streams.

    Args:
        is_apart: whether the servers have one core for themselves. On this core, no client preempts
            a server. This is like clients on another machine.
    """
    config = _config(max(sizes), pace)
    tokens = Tokenizer(config.model).encode(TEXT)
    request = make_request(PATH, _body(config, pace.steps))
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        served = stack.enter_context(plain(config, folder))
        # The first turn only warms up, and records the frames that the floor will send later.
        frames = turn(client, served, request, 1, pace, tokens).frames
        servers = [stack.enter_context(floor(_by_steps(frames))), served]
        for name in ("proxy", "haproxy") if on_ray else ():
            (place := folder / name).mkdir()
            on_it = ray_serve(config, place, haproxy=name == "haproxy")
            servers.append(stack.enter_context(on_it))
            turn(client, servers[-1], request, 1, pace, tokens)
        if is_apart:
            part_cores(servers, client)
        # In this variant, the ingress searches the text of each token for calls of a tool.
        with_tool = make_request(PATH, _body(config, pace.steps, tools=[TOOL]))
        asked = [(server, request) for server in servers]
        asked.insert(2, (replace(served, name=f"{served.name}, a tool"), with_tool))
        turns: dict[tuple[str, int], list[Turn]] = {}
        order = [(size, *each) for _ in range(repeats) for size in sizes for each in asked]
        task = bar.add_task("", total=len(order))
        for size, server, sent in order:
            bar.update(task, description=f"{server.name}, {size} streams")
            found = turn(client, server, sent, size, pace, tokens)
            turns.setdefault((server.name, size), []).append(found)
            bar.advance(task)
    return {
        "rows": [_row(name, size, found) for (name, size), found in turns.items()],
        "floor": servers[0].name,
        "steps": pace.steps,
        "interval_ms": pace.interval_s * 1e3,
        "repeats": repeats,
        "goals": {"cpu_us": GOAL_CPU_US, "latency_ms": GOAL_LATENCY_MS},
        "is_apart": is_apart,
        "note": "a paced engine without a model; CPU time of this machine",
    }


def measure_ingresses(
    folder: Path,
    bar: Progress,
    counts: Sequence[int],
    sizes: Sequence[int],
    pace: Pace,
    repeats: int,
) -> list[dict[str, Any]]:
    """Stream from services that have several ingress processes.

    The number of streams per ingress does not depend on the number of ingresses. If the CPU time
    per token is also equal for all numbers of ingresses, n ingresses on separate cores serve n
    times as many tokens as one ingress.

    Returns:
        A row for each number of streams per ingress and each number of ingresses.
    """
    config = _config(max(counts) * max(sizes), pace)
    tokens = Tokenizer(config.model).encode(TEXT)
    request = make_request(PATH, _body(config, pace.steps))
    rows = []
    task = bar.add_task("", total=repeats * len(sizes) * len(counts))
    with ExitStack() as stack:
        client = stack.enter_context(Client())
        servers = []
        for count in counts:
            (place := folder / f"ingresses-{count}").mkdir()
            servers.append(stack.enter_context(plain(config, place, count)))
            turn(client, servers[-1], request, count, pace, tokens)
        turns: dict[tuple[int, int], list[Turn]] = {}
        for size, server in [
            (s, server) for _ in range(repeats) for s in sizes for server in servers
        ]:
            count = len(server.ports)
            bar.update(task, description=f"{count} ingresses, {size} streams each")
            found = turn(client, server, request, count * size, pace, tokens)
            turns.setdefault((size, count), []).append(found)
            bar.advance(task)
    for (size, count), done in sorted(turns.items()):
        ingress_us = statistics.median(max(each.ingress_us) for each in done)
        rows.append(
            {
                "ingresses": count,
                "streams": size,
                "cpu_us": statistics.median(each.cpu_us for each in done),
                "ingress_us": ingress_us,
                "tokens_per_s": 1e6 / ingress_us,
                "needed": math.ceil(GOAL_TOKENS_PER_S * ingress_us / 1e6),
            }
        )
    return rows


class Client:
    """Owns the process that reads streams."""

    def __enter__(self) -> Client:
        self._asks, theirs = spawn.Pipe()
        self._process = spawn.Process(target=run_client, args=(theirs,), daemon=True)
        self._process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._asks.send(None)
        self._process.join(1.0)
        self._process.kill()

    @property
    def pid(self) -> int:
        return pid_of(self._process)

    def begin(self, ask: Ask) -> Connection:
        """Let the process open streams. The process sends results when all streams have ended."""
        self._asks.send(ask)
        return self._asks


@dataclass(frozen=True)
class Turn:
    """The results of one turn: the CPU time per token, all latencies, and the frames of one stream.

    ``ingress_us``: the CPU time of each ingress, divided by the number of its tokens.
    """

    cpu_us: float
    ingress_us: list[float]
    latencies_ms: list[float]
    frames: list[bytes]


def turn(
    client: Client,
    server: Server,
    request: bytes,
    num_streams: int,
    pace: Pace,
    tokens: Sequence[int],
) -> Turn:
    """Open the streams, let the source send tokens step by step, and return the results."""
    answer = client.begin(Ask(server.ports, request, num_streams))
    server.source.wait_for(num_streams)
    begun_s, begun_ingresses_s, sent_s = 0.0, list[float](), []
    next_s = time.monotonic() + SETTLE_S
    for step in range(pace.steps):
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s += pace.interval_s
        if step == WARM_UP:
            begun_s = cpu_seconds(server.pids)
            begun_ingresses_s = [cpu_seconds([pid]) for pid in server.ingresses]
        sent_s.append(time.monotonic())
        server.source.step(tokens[step % len(tokens)], is_last=step == pace.steps - 1)
    time.sleep(SETTLE_S)
    used_s = cpu_seconds(server.pids) - begun_s
    ingresses_s = [
        cpu_seconds([pid]) - begun
        for pid, begun in zip(server.ingresses, begun_ingresses_s, strict=True)
    ]
    arrivals_s, frames = answer.recv()
    num_tokens = num_streams * (pace.steps - WARM_UP)
    return Turn(
        used_s / num_tokens * 1e6,
        [each_s / num_tokens * len(ingresses_s) * 1e6 for each_s in ingresses_s],
        [
            (arrived_s - at_s) * 1e3
            for stream in arrivals_s
            for arrived_s, at_s in zip(
                stream[FRAMES_BEFORE + WARM_UP :], sent_s[WARM_UP:], strict=False
            )
        ],
        frames,
    )


def part_cores(servers: Sequence[Server], client: Client) -> None:
    """Bind the servers to one core. Bind the client and this process to all other cores."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        raise ConfigError("--apart needs two cores, and this process may use one; leave it out")
    places = {os.getpid(): others, client.pid: others}
    places |= {pid: [last] for server in servers for pid in server.pids}
    for pid, cores in places.items():
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return how many seconds of CPU time the processes have used. The resolution is one
    nanosecond.
    """
    # The expression is the id of the clock that counts a process's CPU time.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _config(num_streams: int, pace: Pace) -> Config:
    return make_config(
        {
            "model": str(shipped("models/tiny-qwen3")),
            "scheduler": {"max_num_seqs": num_streams},
            "max_model_len": pace.steps + 512,
            "serve": {"tool_format": "hermes"},
        }
    )


def _body(config: Config, max_tokens: int, **more: Any) -> bytes:
    return json.dumps(
        {
            "model": config.name,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": max_tokens,
            "stream": True,
            **more,
        }
    ).encode()


def _by_steps(frames: Sequence[bytes]) -> list[bytes]:
    """Return the bytes that a stream got at each step. The bytes before the first token belong to
    the first step.
    """
    first, last = FRAMES_BEFORE + 1, len(frames) - 1
    return [b"".join(frames[:first]), *frames[first : last - 1], b"".join(frames[last - 1 :])]


def _row(name: str, num_streams: int, turns: Sequence[Turn]) -> dict[str, Any]:
    latencies = sorted(latency for turn in turns for latency in turn.latencies_ms)
    return {
        "server": name,
        "streams": num_streams,
        "cpu_us": statistics.median(turn.cpu_us for turn in turns),
        "rounds_cpu_us": [turn.cpu_us for turn in turns],
        "latency_ms_p50": statistics.median(latencies),
        "latency_ms_p99": latencies[int(0.99 * len(latencies))],
    }


def report(results: dict[str, Any]) -> Report:
    floors = {
        row["streams"]: row["cpu_us"]
        for row in results["rows"]
        if row["server"] == results["floor"]
    }
    rows = [{**row, "of_floor": row["cpu_us"] / floors[row["streams"]]} for row in results["rows"]]
    return Report(
        f"{results['steps']} steps, {results['interval_ms']:g} ms apart, medians of "
        f"{results['repeats']} rounds"
        f"{', servers on one core and all else on the other,' * results['is_apart']}",
        [
            make_table("A token from the engine to the socket", COLUMNS, rows),
            make_table("Several ingresses", INGRESS_COLUMNS, results["ingresses"]),
        ],
        f"Aim: {GOAL_CPU_US:g} us and {GOAL_LATENCY_MS:g} ms.",
    )


def draw(results: dict[str, Any], path: Path) -> None:
    bars = partial(draw_bars, rows=results["rows"], group="{streams} streams", series="{server}")
    title = f"{results['steps']} steps, {results['interval_ms']:g} ms apart"
    with sheet(path, results, title, (1, 2), (12, 4.6)) as (_, (cpu, latency)):
        bars(
            cpu, title="CPU time of a token: median (bar), of each round (dots)",
            height="cpu_us", dots="rounds_cpu_us",
            label="{cpu_us:.3g}", unit="us", line=GOAL_CPU_US,
        )  # fmt: skip
        bars(
            latency, title="From a step's result to the client's frame: median",
            height="latency_ms_p50", label="{latency_ms_p50:.3g}", unit="ms",
            line=GOAL_LATENCY_MS, has_legend=False,
        )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
