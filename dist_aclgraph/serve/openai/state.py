"""The state that the routes of one ingress replica share."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from starlette.types import Scope

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.outage import AskOutlook, Recovery
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.actors.wire.peers import PeersKey
from dist_aclgraph.config import Config
from dist_aclgraph.errors import (
    EngineUnavailableError,
    InvalidParameterError,
    RequestTooLongError,
    UnknownModelError,
)
from dist_aclgraph.formats.choice import choose_format
from dist_aclgraph.logs import SeldomEvent
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.observe.metrics import Metrics
from dist_aclgraph.serve.observe.request_account import ACCOUNT
from dist_aclgraph.serve.observe.status import StatusNumbers
from dist_aclgraph.serve.observe.traces import Traces
from dist_aclgraph.serve.openai.body import BodyBudget, IgnoredFields
from dist_aclgraph.serve.openai.completion_slots import CompletionSlots
from dist_aclgraph.serve.openai.errors import WrongTaskError
from dist_aclgraph.serve.openai.inbox import Inbox, Outbox
from dist_aclgraph.serve.resume.journal import JOURNAL, Chance, Journal
from dist_aclgraph.shapes.model_task import Task, read_task
from dist_aclgraph.text.output import with_token_ids
from dist_aclgraph.text.rerank import RerankPrompts
from dist_aclgraph.text.sampling_defaults import read_sampling_defaults
from dist_aclgraph.text.structure import MAX_PROCESSES, GrammarCompiler, Thinking, with_structure
from dist_aclgraph.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 1 << 20  # maximum number of a prompt's log-probabilities in one response
MAX_QUEUE_S = 10.0  # maximum number of seconds that a grammar waits for its compilation
WRITING: tuple[Task, ...] = ("generate", "rerank")  # for these tasks, the model generates tokens

logger = logging.getLogger(__name__)


class ApiState:
    """Owns the ingress's metrics, history, traces, source of seeds, and engine client.

    The caller owns the tokenizer.

    Args:
        replica: index of this ingress among the replicas.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        client: EngineClient,
        *,
        replica: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.task = read_task(config)
        self.reranker = RerankPrompts(tokenizer) if self.task.name == "rerank" else None
        self.client = client
        self.peers = PeersKey.read(config)
        self.refused_tickets = SeldomEvent(logger, "kv_ticket_refused", logging.WARNING)
        self.created_s = int(time.time())
        self.sampling_defaults = read_sampling_defaults(config)
        self.context_len = config.max_model_len or tokenizer.context_len
        self.answers = choose_format(
            tokenizer.template_source,
            tokenizer.added_token,
            tools=config.serve.tool_format,
            reasoning=config.serve.reasoning_format,
        )
        self.grammars = GrammarCompiler(tokenizer)
        # Grammars are compiled on these threads, so that the event loop's threads stay free.
        self._compiling = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="compile-grammar")
        self.is_draining = False
        self.slots = CompletionSlots.from_config(config, lambda: client.num_groups)
        self.ignored_fields = IgnoredFields()
        self.bodies = BodyBudget(config.serve.max_bodies_mib << 20)
        self.metrics = Metrics(config.name, client, has_aliases=config.serve.vllm_metrics)
        self.metrics.track(
            "body_bytes",
            "Memory of the bodies of requests in progress and of their journals.",
            lambda: self.bodies.num_bytes,
        )
        self.metrics.track(
            "body_limit_bytes",
            "Limit of body_bytes (serve.max_bodies_mib).",
            lambda: self.bodies.max_bytes,
        )
        self.metrics.track(
            "restarts_per_hour",
            "Lost groups that may be started again within an hour (recovery.restarts_per_hour).",
            lambda: config.recovery.restarts_per_hour,
        )
        endpoint = config.serve.traces
        self.traces = Traces(endpoint, config.name) if endpoint is not None else None
        self.status = StatusNumbers(config.name, self.metrics, client)
        # With None, Python takes the seed from the system. A configured seed is below 2**31. Adding
        # ``replica << 31`` makes the seeds of all replicas different.
        seed = None if config.seed is None else config.seed + (replica << 31)
        self._seeds = random.Random(seed)
        self._boxes: tuple[Inbox, Outbox] | None = None

    def boxes(self) -> tuple[Inbox, Outbox]:
        """Return the inbox of the running event loop, and the outbox for the requests that this
        loop submits.
        """
        loop = asyncio.get_running_loop()
        if self._boxes is None or self._boxes[0].loop is not loop:
            self._boxes = Inbox(loop), Outbox(loop, self.client.wake)
        return self._boxes

    def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait at most ``seconds`` until running requests have ended."""
        self.is_draining = True
        deadline_s = time.monotonic() + seconds
        while self.slots.taken and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def close(self) -> None:
        """Disconnect from the engines, and send the last traces."""
        self.client.close()
        if self.traces is not None:
            self.traces.close()

    def raise_if_dead(self) -> None:
        """Raise an error if the deployment will serve no more requests."""
        self.client.raise_if_dead()

    def admit(self, model: str | None, tasks: tuple[Task, ...] = WRITING) -> None:
        """Raise an error if a request for ``model`` cannot be accepted now.

        Args:
            tasks: the tasks of the endpoint. If the model has none of these tasks, the request is
                refused.
        """
        if model is not None and model not in self.config.names:
            raise UnknownModelError(
                f"the model {model[:200]!r} does not exist; this server has {self.config.name!r}",
                "model",
            )
        if model is not None and self.task.name not in tasks:
            raise WrongTaskError(
                f"the model {model!r} has the task {self.task.name}; this endpoint needs a model "
                f"of the task {' or '.join(tasks)}",
                "model",
            )
        if self.is_draining:
            raise EngineUnavailableError("the server is stopping")

    def fit(
        self, num_prompt_tokens: int, asked: int | None, default: int | None, param: str
    ) -> int:
        """Return the number of tokens that a request may generate.

        Raises:
            RequestTooLongError: the prompt and the requested tokens together exceed the context.
                The message contains both numbers.
        """
        room = self.context_len - num_prompt_tokens
        wanted = asked if asked is not None else min(default or room, max(room, 1))
        if num_prompt_tokens + wanted > self.context_len:
            raise RequestTooLongError(
                f"This model's maximum context length is {self.context_len} tokens. However, you "
                f"requested {num_prompt_tokens + wanted} tokens ({num_prompt_tokens} in the "
                f"{param}, {wanted} in the completion). Please reduce the length of the {param} "
                "or of the completion.",
                param,
            )
        return wanted

    async def params_with_token_ids(
        self,
        params: Sequence[SamplingParams],
        thinking: Thinking | None = None,
        *,
        salt: str = "",
        param: str = "structured_outputs",
    ) -> list[SamplingParams]:
        """Return the parameters in the engine's form: texts are encoded as token ids, and the
        grammar is compiled.

        Args:
            thinking: the tokens that begin and end the answer's reasoning.
            salt: the request's ``cache_salt``.
            param: the request's field for the output format; used in error messages.

        Raises:
            InvalidParameterError: a token lies outside the vocabulary, or a grammar is wrong.
            EngineUnavailableError: too many other grammars wait for their compilation.
        """
        first = params[0]
        is_structured = first.structured_outputs is not None or first.thinking_tokens is not None
        if not (first.bad_words or is_structured):
            return [with_token_ids(self.tokenizer, first), *params[1:]]

        def convert() -> SamplingParams:
            found = with_token_ids(self.tokenizer, first)
            return with_structure(found, self.grammars, thinking, salt=salt, param=param)

        # Run ``convert`` on a thread, because it encodes texts, and waits for the compiling
        # process.
        source = first.structured_outputs
        is_known = source is None or self.grammars.knows(source, salt)
        found = await (asyncio.to_thread(convert) if is_known else self._compile(convert))
        return [
            replace(each, bad_word_ids=found.bad_word_ids, structure=found.structure)
            for each in params
        ]

    async def _compile(self, convert: Callable[[], SamplingParams]) -> SamplingParams:
        """Convert parameters on the threads that compile grammars, if a thread is free in time."""
        coming, is_late = self._compiling.submit(convert), False

        def give_up() -> None:
            nonlocal is_late
            is_late = coming.cancel()  # false if the thread has already begun the work

        timer = asyncio.get_running_loop().call_later(MAX_QUEUE_S, give_up)
        try:
            return await asyncio.wrap_future(coming)
        except asyncio.CancelledError:
            if not is_late:  # the client is gone
                raise
            raise EngineUnavailableError(
                f"the grammars of other requests have been compiled for {MAX_QUEUE_S:g} s; try "
                "again later"
            ) from None
        finally:
            timer.cancel()

    def check_prompt_logprobs(
        self,
        asked: int | None,
        prompts: Sequence[list[int]],
        num_choices: int,
        param: str = "prompt_logprobs",
    ) -> None:
        """Raise an error if all choices together have too many prompt log-probabilities.

        Args:
            param: the field that asks for log-probabilities; used in error messages.
        """
        if asked is None:
            return
        count = (asked + 1) * sum(map(len, prompts)) * num_choices
        if count > MAX_PROMPT_LOGPROBS:
            raise InvalidParameterError(
                f"{param} {asked} are {count} numbers for these prompts; at most "
                f"{MAX_PROMPT_LOGPROBS} are given in one answer",
                param,
            )

    def open_journal(self, scope: Scope) -> Journal:
        """Return a request's journal. The journal has entries if a previous process began the
        answer.
        """
        chance = Chance.draw(self._seeds.randrange(2**31))
        open_it = scope.get("extensions", {}).get(JOURNAL)
        if open_it is None:
            return Journal(chance)
        journal: Journal = open_it(chance)
        journal.count_in(self.bodies)
        if journal.is_resumed and (account := scope.get(ACCOUNT)) is not None:
            account.resume(journal.chance.created_s)
        return journal

    @staticmethod
    def new_id(prefix: str) -> str:
        return f"{prefix}-{secrets.token_hex(12)}"


def open_state(
    config: Config,
    tokenizer: Tokenizer,
    reach: Reach,
    ask: AskOutlook,
    replica: int = 0,
) -> ApiState:
    """Connect to a deployment's engines; ``close`` of the returned state disconnects.

    Args:
        reach: contains the addresses at which clients reach the deployment, and ``node_id``, which
            must be this process's node.
        ask: a function that asks the deployment's controller whether groups will serve, and at
            which time.
        replica: see ``ApiState``.
    """
    client = EngineClient(
        reach.addresses,
        reach.token,
        node_id=reach.node_id,
        link_s=config.timeouts.link_s,
        recovery=Recovery.from_config(config, ask),
    )
    config = config.model_copy(update={"max_model_len": reach.max_model_len})
    return ApiState(config, tokenizer, client, replica=replica)
