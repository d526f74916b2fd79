"""``make bench-overload``: how overload and stalled clients affect clients that read their answers.

The bench starts one service on the emulated NPU, as a user would. First it measures the peak rate,
with as many clients as the service has slots. Then requests arrive at ten times the peak rate; the
service refuses many of them. Then eight clients read their answers while 64 other clients read
nothing. Finally, eight clients read their answers while other clients send huge bodies. Clients and
service share this machine's cores, so only ratios within one run are meaningful.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.common.command import run_command
from benchmarks.common.report import Table
from benchmarks.common.workload import percentile
from tools.chaos.service import Service, new_folder
from tools.chaos.shapes import SHAPES

PATH = "/v1/completions"
# Number of tokens of an answer for each of three kinds of clients: usual clients, stalled clients,
# and clients that read while other clients stall or send huge bodies.
TOKENS, LONG_TOKENS, READ_TOKENS = 100, 1500, 600
NUM_PLACES, NUM_WAITING = 72, 8
NUM_READERS, NUM_STALLED = 8, 64
TIMES = 10  # ratio of the request rate to the peak rate
PING_S, RUNNING_S = 0.01, 10.0
OK, TOO_MANY, BUSY = 200, 429, 503
spawn = multiprocessing.get_context("spawn")
SHAPE = replace(
    SHAPES["streams"],
    num_tokens=TOKENS,
    overrides=(
        *SHAPES["streams"].overrides,
        "parallel.tp=1",
        f"graph.sizes=[8,{NUM_PLACES}]",
        f"scheduler.max_num_seqs={NUM_PLACES}",
        f"scheduler.max_waiting={NUM_WAITING}",
        "kv.num_blocks=2000",
    ),
)


@dataclass
class Reply:
    """What a client has observed of one request. Times are in seconds, on the monotonic clock.

    ``status`` is 0 if there was no answer.
    """

    asked_s: float
    status: int = 0
    head_s: float = 0.0
    says_when: bool = False  # whether a refusal has Retry-After
    deltas_s: list[float] = field(default_factory=list)
    is_whole: bool = False

    @property
    def is_refused(self) -> bool:
        return self.status in (TOO_MANY, BUSY)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.deltas_s, self.deltas_s[1:], strict=False)]


class Visitor:
    """Sends each request on a new connection. Uses little CPU time, because clients and service
    share the machine's cores.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    async def ask(self, body: bytes) -> Reply:
        """Send a request, and read the whole answer."""
        reply = Reply(time.monotonic())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async with self._sent(body) as reader:
                head = await reader.readuntil(b"\r\n\r\n")
                reply.head_s = time.monotonic()
                reply.status = int(head.split(maxsplit=2)[1])
                reply.says_when = b"\nretry-after:" in head.lower()
                tail = b""
                while chunk := await reader.read(65536):
                    count = chunk.count(b'"text":')
                    reply.deltas_s += [time.monotonic()] * count
                    reply.is_whole = reply.is_whole or b"[DONE]" in tail + chunk
                    tail = chunk[-len(b"[DONE]") :]
        return reply

    async def stall(self, body: bytes) -> None:
        """Send a request, and do not read the answer, until the task is cancelled."""
        async with self._sent(body, limit=1):
            await asyncio.Event().wait()

    @asynccontextmanager
    async def _sent(self, body: bytes, limit: int = 65536) -> AsyncIterator[asyncio.StreamReader]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=limit)
        try:
            writer.write(
                f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            with suppress(ConnectionError):  # the service may close the connection after a refusal
                await writer.drain()
            yield reader
        finally:
            writer.transport.abort()


class Pings:
    """Polls the health of a service, from a process that does nothing else.

    Attributes:
        seconds: how many seconds each poll took. Available after the ``with`` block.
    """

    def __init__(self, port: int) -> None:
        self._end, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_ping, args=(port, theirs), daemon=True)
        self.seconds: list[float] = []

    def __enter__(self) -> Pings:
        self._process.start()
        self._end.recv()  # the process has started
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.send(None)
        self.seconds = self._end.recv()
        self._process.join()


def _ping(port: int, told: Connection) -> None:
    """Send a message to the parent process, then poll. When the parent sends a message, stop
    polling, and send the durations of all polls.
    """
    found: list[float] = []
    told.send(None)
    while not told.poll(PING_S):
        asked_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while connection.recv(4096):
                pass
        found.append(time.monotonic() - asked_s)
    told.send(found)


def body_of(count: int, prompt: Any = None) -> bytes:
    """Return a request that streams the given number of tokens."""
    words = {"model": SHAPE.config, "prompt": prompt or [70, 71, 72], "max_tokens": count,
             "ignore_eos": True, "stream": True, "temperature": 0}  # fmt: skip
    return json.dumps(words).encode()


async def at_the_peak(visitor: Visitor, seconds: float) -> list[Reply]:
    """Keep all slots of the service busy for ``seconds`` seconds."""
    until_s = time.monotonic() + seconds
    replies: list[Reply] = []

    async def client() -> None:
        while time.monotonic() < until_s:
            replies.append(await visitor.ask(body_of(TOKENS)))

    await asyncio.gather(*(client() for _ in range(NUM_PLACES)))
    return replies


async def at_a_rate(visitor: Visitor, per_second: float, seconds: float) -> list[Reply]:
    """Send requests at a constant rate, without waiting for the answers of earlier requests."""
    tasks: list[asyncio.Task[Reply]] = []
    start_s = time.monotonic()
    while (now_s := time.monotonic() - start_s) < seconds:
        while len(tasks) < now_s * per_second:
            tasks.append(asyncio.create_task(visitor.ask(body_of(TOKENS))))
        await asyncio.sleep(0.001)
    return list(await asyncio.gather(*tasks))


async def readers(visitor: Visitor) -> list[Reply]:
    """Let ``NUM_READERS`` clients each read one answer, at the same time."""
    return list(
        await asyncio.gather(*(visitor.ask(body_of(READ_TOKENS)) for _ in range(NUM_READERS)))
    )


@asynccontextmanager
async def beside(works: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run the coroutines ``works`` during the ``with`` block. Cancel them when the block ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def send_huge_bodies(visitor: Visitor) -> None:
    """Again and again, send data that is too large: a large body, a prompt of many tokens, and a
    very long word.
    """
    bodies = [b" " * (32 << 20), body_of(1, [70] * 200_000), body_of(1, "a" * (1 << 20))]
    while True:
        for body in bodies:
            await visitor.ask(body)
            await asyncio.sleep(0.05)


async def measure(service: Service, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all parts of the bench. Return the results, in seconds, tokens per second and bytes."""
    port = int(service.url.rpartition(":")[2])
    visitor = Visitor(port)
    await at_the_peak(visitor, 2.0)  # warm-up
    say("the peak")
    peak = goodput(await at_the_peak(visitor, seconds))
    rate = TIMES * peak / TOKENS
    say(f"{rate:.0f} requests a second")
    pids = service.pids("serve:ingress") + service.pids("ray::Engine")
    before = resident_bytes(pids)
    flood = await at_a_rate(visitor, rate, seconds)
    after = resident_bytes(pids)
    refused = [reply for reply in flood if reply.is_refused]
    served = [reply for reply in flood if reply.status == OK]
    say("readers alone")
    alone = await readers(visitor)
    say("readers that stall")
    async with beside(visitor.stall(body_of(LONG_TOKENS)) for _ in range(NUM_STALLED)):
        await wait_for_running(service, NUM_STALLED)
        stalled = await readers(visitor)
    say("as many that read")
    async with beside(drop(visitor.ask(body_of(LONG_TOKENS))) for _ in range(NUM_STALLED)):
        await wait_for_running(service, NUM_STALLED)
        reading = await readers(visitor)
    say("huge bodies")
    with Pings(port) as quiet:
        await readers(visitor)
    with Pings(port) as huge:
        async with beside([send_huge_bodies(visitor)]):
            await readers(visitor)
    return {
        "peak": peak,
        "rate": rate,
        "goodput": goodput(flood) / peak,
        "served": len(served),
        "cut": sum(not reply.is_whole for reply in served),
        "refused": len(refused),
        "lost": len(flood) - len(served) - len(refused),
        "told_when": sum(reply.says_when for reply in refused),
        "refusal_s": spread([reply.head_s - reply.asked_s for reply in refused]),
        "memory": after / before,
        "alone_s": gaps(alone),
        "stalled_s": gaps(stalled),
        "reading_s": gaps(reading),
        "pings_s": {"quiet": spread(quiet.seconds), "huge": spread(huge.seconds)},
    }


async def drop(work: Coroutine[Any, Any, Any]) -> None:
    await work


async def wait_for_running(service: Service, count: int) -> None:
    """Wait until this number of requests runs. The wait is limited, because some of the requests
    may already have ended.
    """
    until_s = time.monotonic() + RUNNING_S
    while (await asyncio.to_thread(service.metrics)).get("num_requests_running", 0) < count:
        if time.monotonic() > until_s:
            return
        await asyncio.sleep(0.05)


def goodput(replies: Iterable[Reply]) -> float:
    """Return the total rate of all complete answers, in tokens per second. The time is measured
    from the first token of all answers to the last token of all answers.
    """
    whole = [reply.deltas_s for reply in replies if reply.is_whole]
    if not whole:
        return 0.0
    taken_s = max(times[-1] for times in whole) - min(times[0] for times in whole)
    return TOKENS * len(whole) / taken_s


def gaps(replies: Iterable[Reply]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of the seconds between two tokens of an answer."""
    return spread([gap for reply in replies for gap in reply.gaps_s])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum. If there are no values, all three are
    0.
    """
    values = values or [0.0]
    return {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values)}


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory, in bytes, of the processes that are still alive."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += page * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total


def main(
    seconds: Annotated[float, typer.Option(help="of the peak, and of the overload")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure and print."""
    console = Console(stderr=True)
    with console.status("starting") as status:
        service = Service(SHAPE, new_folder(None))
        try:
            service.wait_until_ready()
            found = asyncio.run(measure(service, seconds, status.update))
        finally:
            service.end()
    found["load"] = os.getloadavg()[0]
    print(json.dumps(found)) if as_json else Console().print(table(found).for_terminal())


def table(found: dict[str, Any]) -> Table:
    refusal, quiet, huge = found["refusal_s"], found["pings_s"]["quiet"], found["pings_s"]["huge"]
    alone, stalled, reading = (found[f"{name}_s"] for name in ("alone", "stalled", "reading"))
    rows = {
        f"goodput at {TIMES} times the rate": (f"{found['goodput']:.2f} of the peak", ">= 0.9"),
        "served, refused, neither": (
            f"{found['served']}, {found['refused']}, {found['lost']}",
            "none is neither",
        ),
        "refused without Retry-After": (str(found["refused"] - found["told_when"]), "0"),
        "served and cut off": (str(found["cut"]), "0"),
        "a refusal, p50 and p99": (ms(refusal["p50"], refusal["p99"]), "< 100 ms"),
        "memory of ingress and engine after it": (f"{found['memory']:.2f} of before", "< 1.1"),
        "pauses of readers alone, p50 and p99": (ms(alone["p50"], alone["p99"]), ""),
        f"beside {NUM_STALLED} that read": (ms(reading["p50"], reading["p99"]), ""),
        f"beside {NUM_STALLED} that stall": (
            ms(stalled["p50"], stalled["p99"]),
            "< 1.2 of those that read",
        ),
        "/health beside readers, p99 and longest": (ms(quiet["p99"], quiet["max"]), ""),
        "and beside huge bodies": (ms(huge["p99"], huge["max"]), "< 50 ms more"),
    }
    return Table(
        "emulated NPU on the CPU; not an NPU figure",
        ("what", "seen", "aim"),
        [(what, *found) for what, found in rows.items()],
    )


def ms(*seconds: float) -> str:
    return ", ".join(f"{value * 1e3:.1f} ms" for value in seconds)


if __name__ == "__main__":
    run_command(main)
