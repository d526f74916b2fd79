"""Grammars of requests, compiled by llguidance for the model's vocabulary.

The ingress has already compiled each grammar once, in a process with limits
(``text/structure.py``). So a worker needs at most seconds to compile it. A thread compiles, and the
library releases Python's lock meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from dist_aclgraph.text.grammars import Vocabulary, make_limits, open_tokenizer

# Maximum number of characters of all grammars that are kept for further requests. We measured that
# a compiled grammar needs up to 500 bytes for each of its characters.
MAX_KEPT_CHARS = 1 << 19


class Grammars:
    """Owns the compiled grammars of a rank.

    Args:
        read_vocabulary: reads the checkpoint's tokenizer; called on a thread when the first grammar
            is compiled.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._read_vocabulary = read_vocabulary
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self._num_chars = 0  # characters of all grammars in ``_compiled``

    def compile(self, grammar: str, salt: str) -> Future[llguidance.LLMatcher]:
        """Begin to compile a grammar. If the grammar is invalid, the matcher contains an error.

        Args:
            salt: compiled grammars are shared only between requests with the same salt.
        """
        return self._thread.submit(self._compile, grammar, salt)

    def _compile(self, grammar: str, salt: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._read_vocabulary())
        key = (salt, grammar)
        if key in self._compiled:
            self._compiled.move_to_end(key)
        else:
            self._compiled[key] = llguidance.LLMatcher(
                self._tokenizer, grammar, log_level=0, limits=make_limits()
            )
            self._num_chars += len(grammar)
            while self._num_chars > MAX_KEPT_CHARS and len(self._compiled) > 1:
                (_, oldest), _ = self._compiled.popitem(last=False)
                self._num_chars -= len(oldest)
        return self._compiled[key].deep_copy()
