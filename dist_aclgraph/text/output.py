"""OutputText: ids in, text out, until a stop string or the end."""

from __future__ import annotations

from collections.abc import Sequence

from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.text.detokenizer import Detokenizer
from dist_aclgraph.text.stops import StopMatcher
from dist_aclgraph.text.tokenizer import Tokenizer


class OutputText:
    """The text of one request as it grows. ``is_stopped`` says that a stop string was found."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(params.stop)

    @property
    def is_stopped(self) -> bool:
        return self._matcher.matched is not None

    def feed(self, ids: Sequence[int]) -> str:
        return self._matcher.feed(self._detokenizer.feed(ids))

    def finish(self) -> str:
        """Return the last piece: everything that was held back and turned out to be text."""
        last = self._matcher.feed(self._detokenizer.finish())
        return last + self._matcher.finish()


def end_ids(tokenizer: Tokenizer, params: SamplingParams) -> tuple[int, ...]:
    """Return every id that ends a request's output: the model's own and the requested ones.

    Raises:
        InvalidParameterError: a requested one lies outside the vocabulary.
    """
    tokenizer.check_ids(params.stop_token_ids, "stop_token_ids")
    own = () if params.ignore_eos else tokenizer.eos_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))
