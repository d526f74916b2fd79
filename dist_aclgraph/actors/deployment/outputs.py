"""The results of ``LLM``; the classes have the fields of vLLM's outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs
from dist_aclgraph.text.output import TextPiece
from dist_aclgraph.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token at one position.

    Attributes:
        rank: 1 for the most probable token at this position, 2 for the next, and so on.
        decoded_token: the text that this token would add to the output.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output for a prompt.

    Attributes:
        index: index of this output among the ``n`` outputs for the prompt.
        text: the text before the stop token or the stop string.
        token_ids: ids of the generated tokens, including the stop token.
        cumulative_logprob: sum of the log-probabilities of all generated tokens; None if
            ``logprobs`` is None.
        logprobs: for each generated token, the log-probabilities of this token and of the most
            probable tokens; None if not requested.
        finish_reason: "stop" or "length".
        stop_reason: the requested stop string or stop token that ended the text; None if the text
            ended for another reason.
        lora_request: always None.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: None = None

    def add(self, piece: TextPiece, tokenizer: Tokenizer, *, has_text: bool) -> None:
        """Append the new text and tokens of one delta."""
        self.text += piece.text if has_text else ""
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        if self.logprobs is not None:
            self.logprobs += (as_logprobs(row, tokenizer) for row in piece.logprobs)
            added = sum(row.logprobs[0] for row in piece.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + added

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        prompt: text of the prompt; None if the prompt was given as token ids.
        prompt_logprobs: one entry per token of the prompt. The first entry is None; each later
            entry is like an entry of ``CompletionOutput.logprobs``. None if not requested.
        outputs: the ``SamplingParams.n`` outputs.
        num_cached_tokens: number of prompt tokens that were in the prefix cache.
        state: the hidden state at the prompt's last token, float32 [hidden]; empty if it was not
            requested.
        metrics, lora_request, encoder_prompt, encoder_prompt_token_ids: fields of vLLM that are
            always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    num_cached_tokens: int = 0
    state: bytes = field(default=b"", repr=False)
    metrics: None = field(default=None, repr=False)
    lora_request: None = field(default=None, repr=False)
    encoder_prompt: None = field(default=None, repr=False)
    encoder_prompt_token_ids: None = field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(output.finished() for output in self.outputs)

    def add_prompt_logprobs(self, parts: Iterable[PromptLogprobs], tokenizer: Tokenizer) -> None:
        """Set the prompt's log-probabilities. Only the first call with log-probabilities has an
        effect.
        """
        rows = [as_logprobs(row, tokenizer) for part in parts for row in part.rows()]
        if rows and self.prompt_logprobs is None:
            self.prompt_logprobs = [None, *rows]


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The relevance of a document for a query, from 0 to 1."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The prompt that contains a query and a document, and the document's score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def as_logprobs(row: RowLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return log-probabilities by token id. The first key is the token that is at this position of
    the output or of the prompt.
    """
    return {
        token_id: Logprob(logprob, rank, tokenizer.own_text(token_id))
        for token_id, (logprob, rank) in row.ranked().items()
    }
