"""LLM: a whole deployment as one Python object, for scripts and benches."""

from __future__ import annotations

import itertools
import queue
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.outage import Recovery
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment, StartDeployment
from dist_aclgraph.actors.wire.messages import error_of
from dist_aclgraph.config import Config, load_config
from dist_aclgraph.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidParameterError,
    RequestTooLongError,
)
from dist_aclgraph.ints import unpack_ints
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.output import OutputText, end_ids, with_token_ids
from dist_aclgraph.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """What one prompt brought.

    Attributes:
        token_ids: generated ids, a stop token included.
        text: their text, without stop token and cut before a stop string.
        finish_reason: "stop" or "length".
        logprobs: one entry per token where asked for, else empty.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[RowLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0


class LLM:
    """Owns a deployment from construction to ``close``; a context manager.

    Args:
        config: a configuration, or the path of one.
        overrides: dotted keys over the file's values, e.g. ``{"parallel.tp": 2}``.
        start: brings the deployment up; the default uses Ray.

    Raises:
        DistAclGraphError: the deployment did not come up; nothing is left running.
    """

    def __init__(
        self,
        config: str | Path | Config,
        overrides: dict[str, Any] | None = None,
        *,
        start: StartDeployment | None = None,
    ) -> None:
        if isinstance(config, Config):
            if overrides:
                raise InvalidParameterError("overrides need the path of a configuration")
            self.config = config
        else:
            self.config = load_config(config, overrides)
        self.tokenizer = Tokenizer(self.config.model)
        self._seeds = random.Random(self.config.seed or 0)
        self._ids = itertools.count()
        self._client: EngineClient | None = None
        self._deployment: Deployment | None = (start or start_on_ray)(self.config)
        try:
            reach = self._deployment.reach()
            self._context_len = reach.max_model_len
            self._client = EngineClient(
                reach.addresses,
                reach.token,
                node_id=reach.node_id,
                link_s=self.config.timeouts.link_s,
                recovery=Recovery.from_config(self.config, self._deployment.outlook),
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        Raises:
            InvalidParameterError: a prompt is neither text nor token ids.
            RequestTooLongError: prompt and ``max_tokens`` exceed the context.
            DistAclGraphError: a request failed; the others are aborted.
        """
        client = self._open_client()
        if isinstance(prompts, str):
            raise InvalidParameterError("prompts must be a list of texts or token ids", "prompt")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidParameterError(f"{len(prompts)} prompts but {len(each)} parameters")
        jobs = [self._prepare(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        arrived: queue.SimpleQueue[RequestDelta] = queue.SimpleQueue()
        running: dict[str, tuple[Completion, OutputText]] = {}
        left = deque(jobs)
        try:
            while left or running:
                # No more than the engine's queue takes: the rest follows as requests end.
                while left and len(running) < self.config.scheduler.max_waiting:
                    completion, own = left.popleft()
                    request_id = f"llm-{next(self._ids)}"
                    prompt_ids = completion.prompt_token_ids
                    output = OutputText(self.tokenizer, prompt_ids, own)
                    running[request_id] = (completion, output)
                    client.submit(
                        request_id,
                        prompt_ids,
                        own,
                        end_ids(self.tokenizer, own),
                        arrived.put,
                    )
                delta = arrived.get()
                if delta.request_id in running and self._advance(*running[delta.request_id], delta):
                    del running[delta.request_id]
                    client.abort(delta.request_id)  # no effect unless a stop string ended it
        except EngineDeadError:
            if self._deployment is not None:
                self._deployment.raise_if_dead()  # may know of the cause
            raise
        finally:
            for request_id in running:
                client.abort(request_id)
        return [completion for completion, _ in jobs]

    def report(self) -> dict[str, Any]:
        """Return plan, buckets with their counters, eager steps by reason, ranks and memory."""
        if self._deployment is None:
            raise EngineUnavailableError("this LLM is closed")
        return self._deployment.report()

    def close(self) -> None:
        """Stop everything that was started. Idempotent."""
        client, self._client = self._client, None
        deployment, self._deployment = self._deployment, None
        try:
            if client is not None:
                client.close()
        finally:
            if deployment is not None:
                deployment.shut_down()

    def _open_client(self) -> EngineClient:
        if self._client is None:
            raise EngineUnavailableError("this LLM is closed")
        return self._client

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> tuple[Completion, SamplingParams]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(token_id, int) for token_id in ids):
            raise InvalidParameterError("a prompt must be text or a list of token ids", "prompt")
        self.tokenizer.check_ids(ids, "prompt")
        if not ids:
            raise InvalidParameterError("a prompt must hold at least one token", "prompt")
        room = self._context_len - len(ids)
        wanted = max(room, 1) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            raise RequestTooLongError(
                f"the maximum context length is {self._context_len} tokens; the prompt has "
                f"{len(ids)} and {wanted} more were asked for",
                "prompt",
            )
        seed = self._seeds.randrange(2**31) if params.seed is None else params.seed
        return Completion(ids), replace(
            with_token_ids(self.tokenizer, params), max_tokens=wanted, seed=seed
        )

    @staticmethod
    def _advance(completion: Completion, output: OutputText, delta: RequestDelta) -> bool:
        """Take new tokens; return whether the request has ended."""
        if delta.finish_reason == "error":
            raise error_of(delta)
        if delta.finish_reason == "abort":
            raise EngineUnavailableError("the engine ended the request")
        ids = unpack_ints(delta.token_ids).tolist()
        piece = output.add_tokens(ids, delta.logprobs, delta.finish_reason)
        completion.text += piece.text
        completion.token_ids += piece.token_ids
        completion.logprobs += piece.logprobs
        completion.num_cached_tokens = max(completion.num_cached_tokens, delta.num_cached_tokens)
        completion.finish_reason = piece.finish_reason
        return piece.finish_reason is not None


def start_on_ray(config: Config) -> Deployment:
    """Start a deployment on this process's Ray cluster, or on a local one."""
    from dist_aclgraph.actors.deployment import deployment  # imports Ray: seconds

    return deployment.start(config)
