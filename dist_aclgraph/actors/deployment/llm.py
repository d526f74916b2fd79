"""LLM: a whole deployment as one Python object, with the methods of vLLM's ``LLM`` class."""

from __future__ import annotations

import itertools
import queue
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from rich.console import Console
from rich.progress import Progress, TextColumn

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.client.outage import Recovery
from dist_aclgraph.actors.deployment.deployment_protocol import Deployment, StartDeployment
from dist_aclgraph.actors.deployment.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from dist_aclgraph.actors.deployment.prompts import (
    GivenPrompt,
    Prompt,
    as_prompt,
    check_absent,
    listed,
    token_ids,
)
from dist_aclgraph.actors.wire.messages import error_of
from dist_aclgraph.config import Config, load_with_options
from dist_aclgraph.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidParameterError,
    RequestTooLongError,
)
from dist_aclgraph.files.hub import with_local_model
from dist_aclgraph.sampling import (
    SamplingParams,
    check_truncation,
    chosen_seed,
    seed_of_choice,
    truncated,
)
from dist_aclgraph.shapes.model_task import Task, read_task
from dist_aclgraph.steps.delta import RequestDelta
from dist_aclgraph.text.chat_template import ChatOptions
from dist_aclgraph.text.embedding import EMBEDDING, embeddings_of
from dist_aclgraph.text.output import OutputText, end_ids, with_token_ids
from dist_aclgraph.text.rerank import RerankPrompts, paired
from dist_aclgraph.text.sampling_defaults import read_sampling_defaults
from dist_aclgraph.text.structure import GrammarCompiler, with_structure
from dist_aclgraph.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass
class _RunningOutput:
    """An output that is being generated."""

    request: RequestOutput
    output: CompletionOutput
    params: SamplingParams
    text: OutputText
    cache_salt: str

    @property
    def engine_id(self) -> str:
        return f"{self.request.request_id}-{self.output.index}"


class LLM:
    """Owns a deployment from construction to ``close``. The object is a context manager.

    Args:
        model: a model's directory, a model's name, a configuration, or the path of a configuration
            file.
        overrides: values by dotted key, e.g. ``{"parallel.tp": 2}``; they override ``options``.
        start: a function that starts the deployment, by default on Ray.
        options: options of vLLM, e.g. ``tensor_parallel_size=2``, ``enforce_eager=True``; see the
            list in ``vllm_options.py``.

    Raises:
        ConfigError: our configuration has no such option, or a value is not allowed.
        DistAclGraphError: the deployment did not start; none of its processes is running.
    """

    def __init__(
        self,
        model: str | Path | Config,
        overrides: Mapping[str, Any] | None = None,
        *,
        start: StartDeployment | None = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Config):
            if overrides or options:
                raise InvalidParameterError("options and overrides need a model or a path")
            config = model
        else:
            config = load_with_options(model, options, overrides)
        self.config = with_local_model(config)
        self.tokenizer = Tokenizer.of(self.config)
        self._task = read_task(self.config)
        self._grammars = GrammarCompiler(self.tokenizer)
        self._sampling_defaults = read_sampling_defaults(self.config)
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
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return the outputs for each prompt, in the order of the prompts.

        Args:
            prompts: one prompt or several prompts. A prompt is a text, a list of token ids,
                ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. A mapping may also have
                ``cache_salt``: only prompts with the same salt share cached blocks.
            sampling_params: one object for all prompts, or one object for each prompt. None uses
                the parameters that the model recommends.
            use_tqdm: whether to show the progress on stderr if stderr is a terminal.
            lora_request: must be None, because LoRA is not offered.
            priority: has no effect.

        Raises:
            InvalidParameterError: a prompt has neither text nor token ids.
            RequestTooLongError: the prompt and ``max_tokens`` together exceed the context.
            DistAclGraphError: a request failed; the other requests are aborted.
        """
        self._check_task("generate", "generate", "rerank")
        check_absent(lora_request=lora_request)
        given = [as_prompt(prompt) for prompt in listed(prompts)]
        return self._run(given, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Return the outputs for a conversation, or for several conversations; see ``generate``.

        Args:
            lora_request: must be None, because LoRA is not offered.
            chat_template: name of one of the checkpoint's templates.
            chat_template_content_format: has no effect. The code of the template shows whether the
                template reads texts or lists of parts.
            chat_template_kwargs: variables of the template, e.g. ``{"enable_thinking": False}``.
            mm_processor_kwargs: must be None.

        Raises:
            InvalidParameterError: the model has no template, or its template refuses the messages.
        """
        self._check_task("chat", "generate", "rerank")
        check_absent(lora_request=lora_request, mm_processor_kwargs=mm_processor_kwargs)
        options = ChatOptions(
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=chat_template,
            variables=chat_template_kwargs or {},
        )
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if is_one else messages)
        texts = [self.tokenizer.render_chat(each, options) for each in conversations]
        prompts = [
            GivenPrompt(text, self._encode(text, add_special_tokens=False)) for text in texts
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        pooling_params: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts; see ``generate``.

        Args:
            dimensions: number of elements to keep, from the first one on; None keeps all elements.
            truncate_prompt_tokens: see ``SamplingParams``.
            pooling_params: must be None.

        Raises:
            InvalidParameterError: the model's task is not ``embed``, or ``dimensions`` is not
                between 1 and the model's hidden size.
        """
        self._check_task("embed", "embed")
        check_absent(lora_request=lora_request, pooling_params=pooling_params)
        size = self._task.hidden_size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise InvalidParameterError(
                f"dimensions is {dimensions}; it must lie between 1 and {size}", "dimensions"
            )
        given = [as_prompt(prompt) for prompt in listed(prompts)]
        params = replace(EMBEDDING, truncate_prompt_tokens=truncate_prompt_tokens)
        found = self._run(given, params, use_tqdm)
        rows = embeddings_of(
            [request.state for request in found],
            dimensions=dimensions,
            normalizes=self._task.normalizes,
        )
        return [
            EmbeddingRequestOutput(
                request.request_id, request.prompt_token_ids, EmbeddingOutput(row.tolist())
            )
            for request, row in zip(found, rows, strict=True)
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        pooling_params: None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the relevance of documents for queries, in the order of the documents.

        Args:
            text_1: one query for all documents, or a list with one query for each document.
            text_2: one or more documents.
            instruction: text that says which documents are relevant; the default is for web search.
            truncate_prompt_tokens: maximum number of tokens of a prompt; -1 means the context's
                limit. If a prompt is longer, the end of its document is cut off.
            pooling_params: must be None.

        Raises:
            InvalidParameterError: the model's task is not ``rerank``; or there are several queries,
                and their number differs from the number of documents.
        """
        self._check_task("score", "rerank")
        check_absent(lora_request=lora_request, pooling_params=pooling_params)
        check_truncation(truncate_prompt_tokens)
        most = self._context_len - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        reranker = RerankPrompts(self.tokenizer)
        queries = [text_1] if isinstance(text_1, str) else text_1
        documents = [text_2] if isinstance(text_2, str) else text_2
        prompts = [
            reranker.encode(query, document, instruction, max_tokens=self._context_len, most=most)
            for query, document in paired(queries, documents)
        ]
        found = self._run([GivenPrompt(ids=ids) for ids in prompts], reranker.params, use_tqdm)
        scored = []
        for request in found:
            (logprobs,) = request.outputs[0].logprobs or [{}]
            score = reranker.score({token: each.logprob for token, each in logprobs.items()})
            scored.append(
                ScoringRequestOutput(
                    request.request_id, request.prompt_token_ids, ScoringOutput(score)
                )
            )
        return scored

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model recommends."""
        return SamplingParams(**self._sampling_defaults)

    def report(self) -> dict[str, Any]:
        """Return the plan, the buckets with their counters, the number of eager steps for each
        reason, and the ranks' memory.
        """
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

    def _check_task(self, method: str, *tasks: Task) -> None:
        if self._task.name not in tasks:
            raise InvalidParameterError(
                f"{method} needs a model of the task {' or '.join(tasks)}; this model has the task "
                f"{self._task.name}, which the key task sets"
            )

    def _open_client(self) -> EngineClient:
        if self._client is None:
            raise EngineUnavailableError("this LLM is closed")
        return self._client

    def _run(
        self,
        prompts: Sequence[GivenPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shows_progress: bool,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts."""
        client = self._open_client()
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, Sequence):
            each = [self._prepare_params(own) for own in params]
        else:
            each = [self._prepare_params(params)] * len(prompts)
        if len(each) != len(prompts):
            raise InvalidParameterError(f"{len(prompts)} prompts but {len(each)} parameters")
        waiting: deque[_RunningOutput] = deque()
        requests = []
        for prompt, own in zip(prompts, each, strict=True):
            choices = self._prepare(prompt, own)
            requests.append(choices[0].request)
            waiting += choices
        arrived: queue.SimpleQueue[RequestDelta] = queue.SimpleQueue()
        running: dict[str, _RunningOutput] = {}
        try:
            with _progress(len(waiting), shows_progress) as show:
                while waiting or running:
                    # Submit at most as many requests as the engine's queue accepts. Submit the next
                    # request when another request ends.
                    while waiting and len(running) < self.config.scheduler.max_waiting:
                        choice = waiting.popleft()
                        running[choice.engine_id] = choice
                        client.submit(
                            choice.engine_id,
                            choice.request.prompt_token_ids,
                            choice.params,
                            end_ids(self.tokenizer, choice.params),
                            arrived.put,
                            cache_salt=choice.cache_salt,
                        )
                    delta = arrived.get()
                    if delta.request_id not in running:
                        continue
                    has_ended = self._advance(running[delta.request_id], delta)
                    if has_ended:
                        del running[delta.request_id]
                        # if a stop string has ended the output, the engine still runs the request
                        client.abort(delta.request_id)
                    show(has_ended, len(delta.tokens))
        except EngineDeadError:
            if self._deployment is not None:
                self._deployment.raise_if_dead()  # raises an error with the cause, if known
            raise
        finally:
            for engine_id in running:
                client.abort(engine_id)
        return requests

    def _prepare_params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with token ids and a compiled grammar."""
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(
                f"sampling_params has {params!r:.80}; it must have SamplingParams",
                "sampling_params",
            )
        # ``clone`` checks the values again, because the user may have changed attributes.
        checked = params.clone()
        found = with_token_ids(self.tokenizer, checked)
        return with_structure(found, self._grammars)

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return all token ids of a text, without truncation."""
        return self.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, max_tokens=sys.maxsize
        )

    def _prepare(self, given: GivenPrompt, params: SamplingParams) -> list[_RunningOutput]:
        """Check a prompt, and return one ``_RunningOutput`` for each of ``params.n`` outputs."""
        ids = self._encode(given.text or "") if given.ids is None else token_ids(given.ids)
        self.tokenizer.check_ids(ids, "prompt")
        if not ids:
            raise InvalidParameterError("a prompt must hold at least one token", "prompt")
        # The recommended number of tokens is only an upper limit; the user did not ask for this
        # number.
        is_recommended = params.max_tokens == self._sampling_defaults.get("max_tokens")
        asked = None if is_recommended else params.max_tokens
        ids = truncated(ids, params.truncate_prompt_tokens, self._context_len, asked)
        room = self._context_len - len(ids)
        wanted = asked or max(1, min(params.max_tokens or room, room))
        if wanted > room:
            raise RequestTooLongError(
                f"the maximum context length is {self._context_len} tokens; the prompt has "
                f"{len(ids)} and {wanted} more were asked for",
                "prompt",
            )
        seed = chosen_seed(params)
        seed = self._seeds.randrange(2**31) if seed is None else seed
        request = RequestOutput(str(next(self._ids)), given.text, ids)
        choices = []
        for index in range(params.n):
            own = replace(params, max_tokens=wanted, seed=seed_of_choice(seed, index))
            if index:
                # Only the first choice requests the prompt's log-probabilities.
                own = replace(own, prompt_logprobs=None)
            output = CompletionOutput(index, logprobs=None if own.logprobs is None else [])
            request.outputs.append(output)
            text = OutputText(self.tokenizer, ids, own)
            choices.append(_RunningOutput(request, output, own, text, given.cache_salt))
        return choices

    def _advance(self, choice: _RunningOutput, delta: RequestDelta) -> bool:
        """Append the new tokens of ``delta``. Return whether the choice has ended."""
        if delta.finish_reason == "error":
            raise error_of(delta)
        if delta.finish_reason == "abort":
            raise EngineUnavailableError("the engine ended the request")
        request, output = choice.request, choice.output
        piece = choice.text.add_tokens(delta.tokens, delta.logprobs, delta.finish_reason)
        output.add(piece, self.tokenizer, has_text=choice.params.detokenize)
        request.add_prompt_logprobs(delta.prompt_logprobs, self.tokenizer)
        request.state = request.state or delta.embedding
        request.num_cached_tokens = max(request.num_cached_tokens, delta.num_cached_tokens)
        output.stop_reason = choice.text.stop_reason
        return output.finished()


def start_on_ray(config: Config) -> Deployment:
    """Start a deployment on this process's Ray cluster, or on a local Ray."""
    from dist_aclgraph.actors.deployment import deployment  # imports Ray, which takes seconds

    return deployment.start(config)


@contextmanager
def _progress(total: int, is_wanted: bool) -> Iterator[Any]:
    """Yield a function ``show(has_ended, num_tokens)`` that updates the progress bar."""
    console = Console(file=sys.stderr)
    words = TextColumn("{task.fields[tokens]} tokens")
    bar = Progress(
        *Progress.get_default_columns(),
        words,
        console=console,
        transient=True,
        disable=not (is_wanted and console.is_terminal),
    )
    tokens = 0
    with bar:
        task = bar.add_task("Answering", total=total, tokens=0)

        def show(has_ended: bool, num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            bar.update(task, advance=int(has_ended), tokens=tokens)

        yield show
