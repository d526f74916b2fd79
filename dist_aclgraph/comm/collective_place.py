"""The place of a collective in a step, as one number that a device can copy to the host.

A rank's device runs the collectives of a step in ascending order of these numbers. All ranks of a
group run the collectives of a step in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "mc2_dispatch", "mc2_combine"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The parts of a layer. The embedding and the head count as layers with one part.
PARTS = ("before attention", "in attention", "after attention")
BEFORE, INSIDE, AFTER = range(len(PARTS))
EMBEDDING = -1
HEAD = 253  # larger than the number of layers of any model
NUM_STEPS = 256  # A rank records its last 256 steps. A record has the step's number modulo 256.

_KINDS_BITS, _NUMBER_BITS, _PART_BITS, _LAYER_BITS = 3, 4, 2, 8
_STAGE_BITS = _KINDS_BITS + _NUMBER_BITS
_PASS_BITS = _STAGE_BITS + _PART_BITS + _LAYER_BITS
# The largest value of ``number``. All later collectives of the part also get this value.
MAX_NUMBER = 2**_NUMBER_BITS - 1
NUM_CODES_OF_PASS = 2**_PASS_BITS


@dataclass(frozen=True, order=True)
class CollectivePlace:
    """The place of one collective.

    Attributes:
        draft_pass: 0 for the decoder; n for the n-th pass of the next-token module.
        layer: index of the layer in the checkpoint, ``EMBEDDING`` or ``HEAD``.
        part: index in ``PARTS``.
        number: index among the collectives of the part.
    """

    draft_pass: int
    layer: int
    part: int
    number: int
    kind: Kind

    @property
    def code(self) -> int:
        # The layer is at least -1 (EMBEDDING). The sum layer + 2 is positive, so that no code is 0.
        stage = (self.draft_pass << _LAYER_BITS | self.layer + 2) << _PART_BITS | self.part
        number = min(self.number, MAX_NUMBER)
        code: int = (stage << _NUMBER_BITS | number) << _KINDS_BITS | KINDS.index(self.kind)
        return code

    @classmethod
    def of_code(cls, code: int) -> CollectivePlace:
        """Return the place with this code. Raises ValueError if no place has this code."""
        kind, stage = code % 2**_KINDS_BITS, code >> _STAGE_BITS
        number, part = code >> _KINDS_BITS & MAX_NUMBER, stage % 2**_PART_BITS
        layer = (stage >> _PART_BITS) % 2**_LAYER_BITS
        if code < 0 or kind >= len(KINDS) or part >= len(PARTS):
            raise ValueError(f"{code} is no place of a collective")
        return cls(code >> _PASS_BITS, layer - 2, part, number, KINDS[kind])

    def __str__(self) -> str:
        of_pass = f"draft {self.draft_pass}, " if self.draft_pass else ""
        where = f"layer {self.layer} {PARTS[self.part]}"
        if self.layer in (EMBEDDING, HEAD):
            where = "the embedding" if self.layer == EMBEDDING else "the head"
        return f"{self.kind} {self.number + 1} of {of_pass}{where}"
