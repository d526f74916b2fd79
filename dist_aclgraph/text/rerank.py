"""Scores the relevance of documents with a generative model such as Qwen3-Reranker: makes the
prompt, and reads the score from the answer.

The model says whether a document is relevant to a query: its answer is one token, yes or no. The
score is the probability of yes. For the score, only these two tokens are possible answers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import llguidance

from dist_aclgraph.errors import InvalidParameterError, UnsupportedModelError
from dist_aclgraph.sampling import SamplingParams, Structure
from dist_aclgraph.text.tokenizer import Tokenizer

# The model was trained with exactly these texts.
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
BODY = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankPrompts:
    """Makes a prompt from each pair of a query and a document, and reads the score from the answer.

    Attributes:
        params: parameters of a request. The method ``score`` reads the answer to this request.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find the tokens of the answers.

        Raises:
            UnsupportedModelError: the tokenizer has no token for an answer.
        """
        self._tokenizer = tokenizer
        self._yes, self._no = answer_tokens(tokenizer)
        self._head = tokenizer.encode(HEAD, add_special_tokens=False)
        self._tail = tokenizer.encode(TAIL, add_special_tokens=False)
        self.params = choice_params(self._yes, self._no)

    def encode(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        max_tokens: int,
        most: int | None = None,
    ) -> list[int]:
        """Return the prompt of a pair.

        Args:
            instruction: the task for which the document must be relevant; None means a web search.
            max_tokens: maximum number of tokens of the text between the prompt's fixed parts. If
                ``most`` is set, this limit has no effect.
            most: maximum number of tokens of the prompt; if the prompt would have more, the end of
                the document is cut off. None sets no limit.

        Raises:
            RequestTooLongError: the text has more than ``max_tokens`` tokens.
            InvalidParameterError: even without the document, the number of tokens of the prompt
                exceeds ``most``.
        """

        def encode(document: str) -> list[int]:
            text = BODY.format(
                instruction=INSTRUCTION if instruction is None else instruction,
                query=query,
                document=document,
            )
            limit = max_tokens if most is None else sys.maxsize
            return self._tokenizer.encode(text, add_special_tokens=False, max_tokens=limit)

        body = encode(document)
        if most is not None:
            num_fixed = len(self._head) + len(self._tail)
            if most < (least := num_fixed + len(encode(""))):
                raise InvalidParameterError(
                    f"truncate_prompt_tokens is {most}; the prompt without its document has "
                    f"{least} tokens",
                    "truncate_prompt_tokens",
                )
            body = body[: most - num_fixed]
        return [*self._head, *body, *self._tail]

    def score(self, logprobs: Mapping[int, float]) -> float:
        """Return the probability of yes.

        Args:
            logprobs: the log-probabilities at the answer's only token, by token id.
        """
        yes, no = logprobs[self._yes], logprobs[self._no]
        return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def choice_params(first: int, second: int) -> SamplingParams:
    """Return parameters of a request whose answer is one of two tokens. The answer reports the
    log-probabilities of both tokens.

    A grammar allows only the two tokens. The reported log-probabilities are then a distribution
    over these two tokens. With ``allowed_token_ids``, the log-probabilities would be a distribution
    over all tokens.
    """
    grammar = f"start: <[{first}]> | <[{second}]>"
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=2,
        structure=Structure(grammar=llguidance.LLMatcher.grammar_from_lark(grammar)),
        ignore_eos=True,
    )


def paired(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of queries and documents.

    One query is paired with every document. The n-th of several queries is paired with the n-th
    document.

    Raises:
        InvalidParameterError: the lists have different lengths.
    """
    if len(queries) == 1:
        queries = [*queries] * len(documents)
    if len(queries) != len(documents):
        raise InvalidParameterError(
            f"there are {len(queries)} queries and {len(documents)} documents; give one query, or "
            "as many queries as documents",
            "text_1",
        )
    return list(zip(queries, documents, strict=True))


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens of yes and of no. No thread is started.

    Raises:
        UnsupportedModelError: the vocabulary has no token for an answer.
    """
    yes, no = (tokenizer.token(answer) for answer in ("yes", "no"))
    if yes is None or no is None:
        raise UnsupportedModelError(
            f"task is rerank, but {'yes' if yes is None else 'no'!r} is no token of this model; "
            "it must be one, as in Qwen3-Reranker"
        )
    return yes, no
