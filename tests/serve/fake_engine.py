"""FakeEngine speaks the engine's protocol over ZeroMQ, and generates tokens by a fixed rule."""

from __future__ import annotations

import copy
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq

from dist_aclgraph.actors.wire.addresses import Address, Endpoint
from dist_aclgraph.actors.wire.messages import (
    Abort,
    ClientBeat,
    Deltas,
    EngineStatus,
    Goodbye,
    GroupList,
    Hello,
    Query,
    Refused,
    Submit,
    answer,
    encoder,
    to_engine_decoder,
)
from dist_aclgraph.arrays.ints import pack_ints, unpack_ints
from dist_aclgraph.steps.delta import FinishReason, Note, StepDeltas
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs

NODE = "node"
TOKEN = "a-test-token"

METRICS: dict[str, Any] = {
    "num_requests_running": 2,
    "num_requests_waiting": 1,
    "num_requests_running_by_dp_rank": {"0": 2, "1": 0},
    "kv_cache_usage": 0.25,
    "kv_cache_usage_by_dp_rank": {"0": 0.5, "1": 0.0},
    "num_preemptions": 0,
    "prompt_tokens": 40,
    "generation_tokens": 60,
    "prefix_cache_queries": 10,
    "prefix_cache_hits": 4,
    "kv_copied_blocks": {"saved": 5, "unsaved": 0, "loaded": 3, "missed": 1},
    "kv_read_blocks": {"host": 2, "disk": 1},
    "kv_copies_bytes": {"host": 4096},
    "kv_late_look_ups": 0,
    "kv_fetched_blocks": 5,
    "kv_fetched_bytes": 2048,
    "kv_failed_fetches": 0,
    "spec_decode_num_drafts": 40,
    "spec_decode_num_draft_tokens": 80,
    "spec_decode_num_accepted_tokens": 45,
    "spec_decode_num_accepted_tokens_per_pos": {"0": 30, "1": 15},
    "expert_tokens": {"0": 1200, "1": 400},
    "steps": 12,
    "step_reruns": 1,
    "non_finite_requests": 1,
    "resumptions": {"link": 2},
    "graph": {
        "plan_version": 3,
        "replays": {"full decode 4": 7, "full decode 8": 2},
        "misses": {"prefill": 3},
        "padded_by_graph": {"full decode 4": 5, "full decode 8": 0},
        "wasted_by_graph": {"full decode 4": 0.1786, "full decode 8": 0.0},
    },
    "capture_seconds": {"full decode 4": 0.2, "full decode 8": 0.3, "full decode 16": 0.4},
    "pool_bytes": 5 << 20,
    "weight_bytes": 40 << 20,
    "memory_offered_bytes": {"0": 300 << 20, "1": 310 << 20},
    "ranks": {
        "0": {"node": "node-a", "npus": "0", "kind": "emulated"},
        "1": {"node": "node-b", "npus": "3", "kind": "emulated"},
    },
    "streams_offered": {"0": 1800, "1": 1792},
    "streams_predicted": {"0": 30, "1": 30},
    "streams_measured": {"0": 28, "1": 29},
    "group_start_time_seconds": 1.8e9,
    "restarts_left": 5,
    "process_resident_memory_bytes": {"engine": 300 << 20, "worker-0": 900 << 20},
    "process_open_fds": {"engine": 60},
    "host_memory_bytes": {"node-a": 64 << 30},
    "host_memory_available_bytes": {"node-a": 40 << 30},
}


def echo(submit: Submit) -> list[int]:
    """Return ``max_tokens`` tokens: the tokens of the prompt, repeated."""
    ids = [int(i) for i in unpack_ints(submit.prompt)]
    return (ids * (submit.max_tokens // max(1, len(ids)) + 1))[: submit.max_tokens]


@dataclass
class _Running:
    client: bytes
    submit: Submit
    output: list[int]
    sent: int = 0


class FakeEngine:
    """Runs a step every ``step_s`` seconds. In each step, each request gets one token.

    Attributes:
        reply: function that returns the output of a request. The engine cuts this output at
            ``max_tokens`` and after the first stop token.
        frames: all frames that were received, as bytes.
        submitted, aborted: the requests and the aborts that were received, in order.
        prefill_s: the duration in seconds that the engine reports for each prefill.
        fail_after: the number of tokens after which a request fails, and the kind of its error.
        reports_late: whether requests with prompt log-probabilities must wait until all other
            requests have ended.
        skipped: number of messages that the engine does not send, beginning with the next message.
        token_limit: once ``metrics`` counts this number of generated tokens, the engine generates
            no more. It still answers heartbeats.
        metrics: the answer to queries for metrics. In this object, the engine counts the tokens
            that it generates.
        groups: the list of groups that the engine sends to clients.
        others_tokens: the number of waiting tokens of all other clients, as the engine reports it
            to each client.
        last_beat: the last heartbeat that any client has sent.
        embedding: function that returns the hidden state of a prompt, for requests of embeddings.
        share: function from a prompt to the probability of the first token, for requests that allow
            only two tokens; None if the test sends no such requests.
        answers_queries: whether the engine answers queries; it always sends heartbeats.
        refusal: if not empty, the engine refuses all clients for this reason, and ends their links.
        poison: id of a request that makes the engine die when the request runs. Afterwards, the
            engine serves again.
        poison_after: the number of tokens that the request ``poison`` gets before the engine dies.
        num_deaths: the number of times that the engine has died of the request ``poison``.
        is_proving: whether the engine sends a token for a probe as soon as the probe arrives. A
            probe is a request with which a client tests the engine.
    """

    def __init__(
        self,
        reply: Callable[[Submit], list[int]] = echo,
        step_s: float = 0.002,
        token: str = TOKEN,
    ) -> None:
        self._token = token
        self.reply = reply
        self.step_s = step_s
        self.frames: list[bytes] = []
        self.sent_frames: list[bytes] = []
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.fail_after: tuple[int, str] | None = None
        self.prefill_s = 0.0
        self.silent = False
        self.reports_late = False
        self.embedding: Callable[[list[int]], list[float]] = lambda ids: [float(sum(ids)), 1.0]
        self.share: Callable[[list[int]], float] | None = None
        self.answers_queries = True
        self.skipped = 0
        self.token_limit: int | None = None
        self.refusal = ""
        self.poison = ""
        self.poison_after = 0
        self.num_deaths = 0
        self.is_proving = False
        self.metrics = copy.deepcopy(METRICS)
        self.groups: GroupList | None = None
        self._told: GroupList | None = None
        self.others_tokens = 0
        self.last_beat = ClientBeat()
        self._numbers: dict[bytes, int] = {}  # for each client, the number of its last ``Deltas``
        self._names: dict[bytes, str] = {}
        self._running: dict[str, _Running] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        endpoint = Endpoint(f"tcp://127.0.0.1:{port}")
        self.address = Address(NODE, endpoint, endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def requests(self) -> list[Submit]:
        """The requests that were received, in order, except probes, with which clients test the
        engine.
        """
        return [each for each in self.submitted if not each.request_id.startswith("probe-")]

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_sent(self, request_id: str) -> int:
        """Return the number of tokens that a running request has got from this engine."""
        running = self._running.get(request_id)
        return 0 if running is None else running.sent

    @property
    def is_closed(self) -> bool:
        return self._stopping.is_set()

    def close(self) -> None:
        """End the engine. Clients notice the end at once, as they notice the death of a process."""
        if self.is_closed:
            return
        self._stopping.set()
        self._thread.join()
        self._router.close()
        self._context.term()

    def _run(self) -> None:
        next_step_s = time.monotonic()
        while not self._stopping.is_set():
            while self._router.poll(1 if self._running else 10):
                client, frame = self._router.recv_multipart()
                self.frames.append(frame)
                if not self.silent:
                    self._receive(client, to_engine_decoder.decode(frame))
            if self.groups is not self._told:
                self._told = self.groups
                for client in self._numbers:
                    self._send(client, self.groups)
            if self.refusal:
                self._cut_off(Refused(self.refusal))
                self.refusal = ""
            if time.monotonic() >= next_step_s and not self.silent:
                next_step_s = time.monotonic() + self.step_s
                self._step()

    def _send(self, client: bytes, message: object) -> None:
        frame = encoder.encode(message)
        self.sent_frames.append(frame)
        self._router.send_multipart([client, frame])

    def _receive(self, client: bytes, message: object) -> None:
        if isinstance(message, Hello):
            if message.token != self._token:
                self._send(client, Refused("wrong token"))
            else:
                for earlier in [c for c, name in self._names.items() if name == message.client]:
                    self._forget(earlier)
                self._numbers[client], self._names[client] = 0, message.client
                self._send(client, EngineStatus())
                if self._told is not None:
                    self._send(client, self._told)
        elif client not in self._numbers:
            return
        elif isinstance(message, ClientBeat):
            self.last_beat = message
            self._send(client, EngineStatus("", self.others_tokens))
        elif isinstance(message, Goodbye):
            self._forget(client)
        elif isinstance(message, Submit):
            self.submitted.append(message)
            stops = set(message.stop_token_ids)
            output = self.reply(message)[: message.max_tokens]
            for i, token_id in enumerate(output):
                if token_id in stops and i + 1 >= message.sampling.min_tokens:
                    output = output[: i + 1]
                    break
            self._running[message.request_id] = _Running(client, message, output)
            if self.is_proving and message.request_id.startswith("probe-"):
                self._step()
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            self._running.pop(message.request_id, None)
        elif isinstance(message, Query) and self.answers_queries:
            bodies = {"metrics": self.metrics, "report": {"epoch": 1}}
            self._send(client, answer(message, bodies[message.what]))

    def _forget(self, client: bytes) -> None:
        del self._numbers[client], self._names[client]
        for running in [r for r in self._running.values() if r.client == client]:
            del self._running[running.submit.request_id]

    def _cut_off(self, last_words: Refused | EngineStatus) -> None:
        for client in list(self._names):
            self._forget(client)
            self._send(client, last_words)

    def _step(self) -> None:
        poison = self._running.get(self.poison)
        if poison is not None and poison.sent >= self.poison_after:
            self.num_deaths += 1
            self._cut_off(EngineStatus("the step failed"))
            return
        by_client: dict[bytes, list[StepDeltas]] = {}
        running_now = list(self._running.values())
        if self.reports_late:
            plain = [each for each in running_now if each.submit.sampling.prompt_logprobs < 0]
            running_now = plain or running_now
        for running in running_now:
            made = self.metrics["generation_tokens"]
            if self.token_limit is not None and made >= self.token_limit:
                break
            delta = self._advance(running)
            by_client.setdefault(running.client, []).append(delta)
            if any(note.finish_reason for note in delta.notes):
                del self._running[running.submit.request_id]
        for client, deltas in by_client.items():
            self._numbers[client] = self._numbers.get(client, 0) + 1 + self.skipped
            self.skipped = 0
            self._send(client, Deltas(_joined(deltas), self._numbers[client]))

    def _advance(self, running: _Running) -> StepDeltas:
        submit = running.submit
        number = pack_ints([submit.number])
        if self.fail_after is not None and running.sent >= self.fail_after[0]:
            note = Note(
                0, finish_reason="error", error="the step failed", error_kind=self.fail_after[1]
            )
            return StepDeltas(number, ends=pack_ints([0]), notes=(note,))
        token_id = running.output[running.sent]
        running.sent += 1
        self.metrics["generation_tokens"] += 1
        finish_reason: FinishReason | None = None
        if token_id in submit.stop_token_ids and running.sent >= submit.sampling.min_tokens:
            finish_reason = "stop"
        elif running.sent == len(running.output):
            finish_reason = "length"
        logprobs: tuple[RowLogprobs, ...] = ()
        if submit.sampling.logprobs >= 0:
            ids = [token_id, *range(60, 60 + submit.sampling.logprobs)]
            values = tuple(-0.5 - 0.25 * i for i in range(len(ids)))
            if self.share is not None and submit.sampling.structure is not None:
                ids, values = _shared(submit, self.share)
            logprobs = (RowLogprobs(pack_ints(ids), values, 1),)
        prompt = _prompt_logprobs(submit) if running.sent == 1 else ()
        embedding = b""
        if submit.sampling.embeds:
            state = self.embedding(unpack_ints(submit.prompt).tolist())
            embedding = np.array(state, "<f4").tobytes()
        note = Note(
            0,
            finish_reason=finish_reason,
            prompt_logprobs=prompt,
            embedding=embedding,
            prefill_s=self.prefill_s if running.sent == 1 else 0.0,
        )
        notes = (note,) if finish_reason or prompt or note.prefill_s else ()
        return StepDeltas(number, pack_ints([token_id]), pack_ints([1]), notes, logprobs)


def _shared(
    submit: Submit, share: Callable[[list[int]], float]
) -> tuple[list[int], tuple[float, ...]]:
    """Return the tokens and log-probabilities that the engine reports for a request that allows
    only two tokens.
    """
    assert submit.sampling.structure is not None
    first, second = map(int, re.findall(r"<\[(\d+)\]>", submit.sampling.structure.grammar))
    found = share(unpack_ints(submit.prompt).tolist())
    values = {first: math.log(found), second: math.log(1 - found)}
    best = sorted(values, key=lambda token: -values[token])
    ids = [best[0], *best]
    return ids, tuple(values[token] for token in ids)


def _prompt_logprobs(submit: Submit) -> tuple[PromptLogprobs, ...]:
    """Return the log-probabilities of a prompt, divided into two parts.

    Prompt token i has the log-probability -i. The most probable token at each position has the
    log-probability -0.5.
    """
    ids, num_best = unpack_ints(submit.prompt), submit.sampling.prompt_logprobs
    if num_best < 0:
        return ()
    parts = []
    for first, last in ((1, min(2, len(ids))), (2, len(ids))):
        if first >= last:
            continue
        tokens = [[ids[at], *range(60, 60 + num_best)] for at in range(first, last)]
        values = [[-float(at), *[-0.5] * num_best] for at in range(first, last)]
        parts.append(
            PromptLogprobs(
                0,
                first,
                pack_ints(np.array(tokens, np.int32).ravel()),
                np.array(values, "<f4").tobytes(),
                pack_ints(np.full(len(tokens), 9, np.int32)),
            )
        )
    return tuple(parts)


def _joined(deltas: list[StepDeltas]) -> StepDeltas:
    """Join several ``StepDeltas``, each of one request, into one."""
    counts = [len(unpack_ints(delta.token_ids)) for delta in deltas]
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    reports = [delta.logprobs or (None,) * n for delta, n in zip(deltas, counts, strict=True)]
    return StepDeltas(
        b"".join(delta.numbers for delta in deltas),
        b"".join(delta.token_ids for delta in deltas),
        b"" if ends == list(range(1, len(ends) + 1)) else pack_ints(ends),
        tuple(
            msgspec.structs.replace(note, index=i)
            for i, delta in enumerate(deltas)
            for note in delta.notes
        ),
        sum(reports, ()) if any(delta.logprobs for delta in deltas) else (),
    )
