"""StopMatcher: finds stop strings in a text that arrives piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text before the first stop string. The result does not depend on the division of the
    text into pieces.

    Text that may be the beginning of a stop string is held back. Of several matches, the match that
    ends first counts. If several matches end at the same position, the longest of these matches
    counts.

    Args:
        includes_stop: whether the returned text includes the stop string.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = len(self._stops[0]) if self._stops else 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str, *, may_match: bool = True) -> str:
        """Add a piece; return the text that certainly belongs to the output.

        Args:
            may_match: if false, stop strings that end in this piece are ignored.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._find(text, len(self._held)) if may_match else None
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._includes_stop else text[:start]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back; call this if the text has ended without a stop
        string.
        """
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Return start and text of the first stop string that ends after the held-back text."""
        found = [(text.find(stop, max(0, num_held + 1 - len(stop))), stop) for stop in self._stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _partial(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
