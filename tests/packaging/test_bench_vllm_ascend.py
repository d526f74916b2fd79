"""Tests the settings and the loads of ``make bench-vllm-ascend`` without vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dist_aclgraph.config import make_config
from tools.bench_vllm_ascend import DEVICES, Device, our_config, peer_options, report, summary
from tools.vllm_ascend_loads import LOADS, TOKEN, Client, burst, join


class Server(ThreadingHTTPServer):
    """Answers each completion at once.

    Attributes:
        per_frame: number of tokens of a frame.
        num_missing: number of tokens by which each reply is shorter than requested.
        asked: the bodies of all requests.
    """

    request_queue_size = 64
    daemon_threads = True

    def __init__(self, per_frame: int, num_missing: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.per_frame, self.num_missing = per_frame, num_missing
        self.asked: list[dict[str, object]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.end_headers()
        total, size = body["max_tokens"] - self.server.num_missing, self.server.per_frame
        counts = (min(size, total - start) for start in range(0, total, size))
        frames = [b'data: {"text": "%s"}\n\n' % (TOKEN * count) for count in counts]
        self.wfile.write(b"".join([*frames, b"data: [DONE]\n\n"]))

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def answering(per_frame: int = 1, num_missing: int = 0) -> Iterator[Server]:
    with Server(per_frame, num_missing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_burst_has_the_first_token_of_each_request_and_the_gaps_between_frames() -> None:
    with answering(per_frame=2) as server:
        times = burst(Client(server.server_port, seed=1))

    assert (len(times["first"]), len(times["total"])) == (32, 1)
    assert len(times["gap"]) == 32 * (32 / 2 - 1)
    assert all(0 < first <= times["total"][0] for first in times["first"])
    assert {len(body["prompt"]) for body in server.asked} == {32}  # type: ignore[arg-type]


def test_requests_that_join_are_sent_after_the_others_have_tokens() -> None:
    with answering() as server:
        times = join(Client(server.server_port, seed=1))

    assert [body["max_tokens"] for body in server.asked] == [200] * 16 + [32] * 32
    assert len(times["first"]) == 32


def test_a_reply_without_all_of_its_tokens_is_an_error() -> None:
    with (
        answering(num_missing=3) as server,
        pytest.raises(RuntimeError, match="3 tokens are missing after "),
    ):
        burst(Client(server.server_port, seed=1))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_both_services_have_equal_settings(device: Device, tmp_path: Path) -> None:
    device.write_model(tmp_path / "model")
    ours = make_config(our_config(tmp_path / "model", 8000, "FULL_AND_PIECEWISE", device))
    theirs = dict(
        option.removeprefix("--").partition("=")[::2]
        for option in peer_options(tmp_path / "model", 8001, "FULL_AND_PIECEWISE", device)
    )

    assert int(theirs["max-model-len"]) == ours.max_model_len
    assert int(theirs["max-num-seqs"]) == ours.scheduler.max_num_seqs
    assert int(theirs["max-num-batched-tokens"]) == ours.scheduler.max_num_batched_tokens
    assert int(theirs["num-gpu-blocks-override"]) == ours.kv.num_blocks
    assert int(theirs["block-size"]) == ours.kv.block_size
    assert "no-enable-prefix-caching" in theirs
    assert not ours.scheduler.prefix_cache
    graphs = json.loads(theirs["compilation-config"])
    assert graphs["cudagraph_mode"] == ours.graph.mode
    assert tuple(graphs["cudagraph_capture_sizes"]) == ours.graph.sizes
    assert device.settings["kernels"] == ours.device.emulator.kernels
    assert (theirs["load-format"] == "dummy") == (ours.weights == "dummy")
    assert set(device.loads) <= set(LOADS)


def test_a_slow_round_does_not_change_a_median_and_missing_quantities_are_shown() -> None:
    turns = [{"first": [1.0, 3.0], "total": [9.0]}, {"first": [1.0, 3.0], "total": [8.0]}]
    slow = {"first": [500.0, 900.0], "total": [7000.0]}
    row = {"load": "alone", "name": "a service", **summary([*turns, slow])}
    results = {"cores": 2, "load": (1, 2), "note": "a note", "rows": [row]}

    document = report(results).for_document(results)

    assert "| alone, a service | 1.0 | 3.0 | 3.0 | - | - | - | 9 |" in document
