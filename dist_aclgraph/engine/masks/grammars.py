"""Grammars of requests, compiled by llguidance for the model's vocabulary.

The ingress has already compiled each grammar once, in a process with limits
(``text/structure.py``). A grammar that exceeds these limits never reaches a worker. So a
compilation in a worker takes a few seconds at most. A separate thread compiles the grammar. During
the compilation, the library does not hold Python's global lock. So the request waits for its
grammar, but no step waits. The library holds the lock while it prepares the vocabulary, so the
vocabulary is prepared before the first step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import llguidance

from dist_aclgraph.sampling import Structure
from dist_aclgraph.text.grammars import Vocabulary, make_limits, open_tokenizer

T = TypeVar("T")
MAX_KEPT_BYTES = 1 << 28  # maximum number of bytes of all grammars that are kept for later requests
# Maximum number of kept grammars. The memory of a kept grammar grows while requests use it, because
# its lexer gets more states. We measured up to 100 MB for the maximum number of states.
MAX_KEPT = 64
# We measured that a compiled grammar usually needs at most 500 bytes for each character of its
# text. Some grammars need much more, for example a grammar that accepts the multiples of a large
# number.
BYTES_OF_CHAR = 500


class Grammars:
    """Owns the compiled grammars of a rank.

    Args:
        read_vocabulary: reads the checkpoint's tokenizer. The constructor starts this call in a
            separate thread. If the call fails, the compilation of the first grammar raises the
            error.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._tokenizer = self._thread.submit(lambda: open_tokenizer(read_vocabulary()))
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow-masks")
        self._executor = llguidance.LLExecutor(1)
        self._second: tuple[llguidance.LLMatcher, int] | None = None  # see ``consume``
        self._kept: OrderedDict[tuple[str, str], Future[llguidance.LLMatcher]] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}  # number of bytes of each grammar in ``_kept``
        self._num_bytes = 0  # sum of the values of ``_sizes``

    def shares(self, structure: Structure) -> bool:
        """Return whether ``compile`` returns the same matcher to several requests."""
        kept = self._kept.get((structure.salt, structure.grammar))
        return kept is None or not kept.cancelled()

    def stop_sharing(self, structure: Structure) -> None:
        """From now on, compile the grammar of ``structure`` separately for each request.

        All copies of a matcher share the states of one lexer, and the library limits the number of
        these states. When all requests together have reached the limit, all copies fail, although
        each request alone needs fewer states.
        """
        key = (structure.salt, structure.grammar)
        if key in self._kept:
            nothing: Future[llguidance.LLMatcher] = Future()
            nothing.cancel()
            self._kept[key] = nothing

    def compile(self, structure: Structure) -> Future[llguidance.LLMatcher]:
        """Return a future of the matcher for a structure's grammar. If the grammar is new, begin to
        compile it.

        The caller must copy the matcher. While ``shares`` returns true, all requests with the same
        grammar and salt get the same matcher.

        If the grammar is invalid, the matcher reports an error.
        """
        grammar = structure.grammar
        key = (structure.salt, grammar)
        if key in self._kept:
            self._kept.move_to_end(key)
            if not self.shares(structure):
                return self._thread.submit(self._compile, grammar)
            return self._kept[key]
        self._kept[key] = coming = self._thread.submit(self._compile, grammar)
        self._sizes[key] = size = max(structure.num_bytes, BYTES_OF_CHAR * len(grammar))
        self._num_bytes += size
        self._forget_oldest(key)
        return coming

    def submit_slow(self, work: Callable[[list[int]], T], output: list[int]) -> Future[T]:
        """Queue work that can take seconds. One separate thread does all of this work, in the order
        of the calls.
        """
        return self._slow.submit(work, output)

    def consume(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        """Add an allowed token to a matcher without holding Python's global lock; return whether
        this succeeded.

        The library releases the lock only in a call that adds tokens to several matchers. So the
        call also adds a token to a second matcher. The second matcher has no other purpose.
        """
        if self._second is None:
            tokenizer = self._tokenizer.result()
            second = llguidance.LLMatcher(tokenizer, 'start: "a"', log_level=0)
            self._second = second, tokenizer.tokenize_str("a")[0]
        added, _ = self._executor.consume_token_par([(matcher, token), self._second])
        self._second[0].reset()
        return added

    def _forget_oldest(self, newest: tuple[str, str]) -> None:
        """Drop the oldest grammars until the remaining grammars are within the limits. A grammar
        that is not compiled yet is kept, because a request waits for it.
        """
        for key, kept in list(self._kept.items()):
            if self._num_bytes <= MAX_KEPT_BYTES and len(self._kept) <= MAX_KEPT:
                break
            if kept.done() and key != newest:
                del self._kept[key]
                self._num_bytes -= self._sizes.pop(key)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        tokenizer = self._tokenizer.result()
        return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=make_limits())
