"""Deployments on the emulated NPU, and the requests that tests send to them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import cloudpickle

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.outage import Recovery
from dist_aclgraph.actors.cluster.choose_starter import choose_starter
from dist_aclgraph.actors.deployment.deployment import RayDeployment, start
from dist_aclgraph.actors.host.process_starter import ProcessStarter
from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs
from tests.actors.leftovers import wait_until

ANSWER_S = 180.0
# Time limits of a start, in seconds, for a machine that other programs keep busy. The default
# limits are for hosts that only serve.
LONG_STARTS = {"timeouts.place_s": 300, "timeouts.join_s": 300, "timeouts.negotiate_s": 300}


@dataclass
class Answer:
    """What a client has received for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    embedding: bytes = b""
    finish_reason: str | None = None
    error: str = ""
    error_kind: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def take(self, delta: RequestDelta) -> None:
        self.tokens += unpack_ints(delta.token_ids).tolist()
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            self.prompt_logprobs = [row for part in delta.prompt_logprobs for row in part.rows()]
        self.embedding = self.embedding or delta.embedding
        self.began.set()
        if delta.finish_reason is not None:
            self.finish_reason, self.error = delta.finish_reason, delta.error
            self.error_kind = delta.error_kind
            self.ended.set()


def tokens_of(timeout_s: float, answers: list[Answer]) -> list[list[int]]:
    """Wait for each answer, at most ``timeout_s`` seconds each; check its number of tokens; return
    the tokens.
    """
    for answer in answers:
        assert answer.ended.wait(timeout_s), "no answer"
        assert answer.finish_reason == "length", answer.error
    return [answer.tokens for answer in answers]


def make_deployment_config(model: Path | str, **overrides: Any) -> Config:
    """Return the configuration of a small float32 deployment.

    Each argument in ``overrides`` replaces one key of the configuration. A dict replaces only the
    given keys of a section.
    """
    raw: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "scheduler": {"max_num_seqs": 12, "max_num_batched_tokens": 512},
        "device": {"kind": "emulated", "emulator": {"strict": False}},
        "kv": {"num_blocks": 64},
    }
    for key, value in overrides.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return make_config(raw)


_starters: list[ProcessStarter] = []  # at most one: the starter of the session's Ray cluster


@contextmanager
def session_starter(config: Config) -> Iterator[ProcessStarter]:
    """While the context is open, one ``ProcessStarter`` starts the processes of all deployments.

    The starter's fork server then imports torch only once for all these processes.
    """
    with closing(choose_starter(config)) as starter:
        _starters.append(starter)
        yield starter
        _starters.remove(starter)


def forked_actor(kind: type, **options: Any) -> Any:
    """Return a class of Ray actors, as ``ray.remote`` does. The session's fork server forks the
    actors' processes. Without the fork server, each process would import Ray and the test's module
    again.
    """
    cloudpickle.register_pickle_by_value(sys.modules[kind.__module__])
    command = _starters[-1].command(make_deployment_config("unused")) if _starters else None
    environment = {} if command is None else {"py_executable": command}
    return ray.remote(num_cpus=0, runtime_env=environment, **options)(kind)


def start_deployment(config: Config) -> RayDeployment:
    """Start a deployment on the Ray cluster of the session."""
    return start(config, starter=_starters[-1] if _starters else None)


@dataclass
class Serving:
    deployment: RayDeployment
    client: EngineClient

    def submit(self, name: str, prompt: list[int], params: SamplingParams) -> Answer:
        answer = Answer()
        self.client.submit(name, prompt, params, [], answer.take)
        return answer

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, prefix: str = "r"
    ) -> list[Answer]:
        """Send all prompts at the same time, and return the answers when all are complete."""
        answers = [self.submit(f"{prefix}{i}", p, params) for i, p in enumerate(prompts)]
        for answer in answers:
            assert answer.ended.wait(ANSWER_S), "no answer"
            assert answer.finish_reason == "length", answer.error
        return answers

    def report(self) -> dict[str, Any]:
        return self.deployment.report()


def greedy_params(count: int, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **others)


def deployed(test: Any) -> Any:
    """Mark a test that starts deployments on the session's Ray cluster."""
    return pytest.mark.cluster(pytest.mark.usefixtures("ray_cluster")(test))


@contextmanager
def serving(config: Config) -> Iterator[Serving]:
    """Start a deployment on the Ray cluster of the session, and stop it at the end."""
    deployment = start_deployment(config)
    try:
        reach = deployment.reach()
        client = EngineClient(
            reach.addresses,
            reach.token,
            node_id=reach.node_id,
            link_s=config.timeouts.link_s,
            recovery=Recovery.from_config(config, deployment.outlook),
        )
        try:
            # Until an engine has answered, the client sends all requests to the other engines.
            engines = client._known
            wait_until(lambda: all(each.link.is_welcome for each in engines()), "no answer")
            yield Serving(deployment, client)
        finally:
            client.close()
    finally:
        deployment.shut_down()
