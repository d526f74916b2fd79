"""MC2: operators that bring tokens to their experts; their limits, and when they pay off.

The limits are those of the operators' documents; none was tried on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from dist_aclgraph.config import HcclExpansion
from dist_aclgraph.config.chips import generation_of
from dist_aclgraph.planning.chip import Chip

MIB = 1 << 20
MAX_EXPERTS, MAX_TOP_K = 1024, 16
MAX_EXPERTS_CANN_8 = 512  # of an A2


def mc2_buffer_mb(num_rows: int, hidden: int, ep: int, num_local: int, top_k: int) -> int:
    """Return HCCL's buffer in MB that dispatch and combine need, by their documents.

    Args:
        num_rows: most tokens of one rank.
        num_local: experts of one rank.
    """
    row = 2 * hidden
    dispatch = _aligned(_aligned(row, 32) + 64, 512)
    combine = _aligned(row, 512)
    needed = 2 * num_rows * (dispatch * ep * num_local + combine * top_k)
    return needed // MIB + 1


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


@dataclass(frozen=True)
class Product:
    """One generation of NPUs.

    Attributes:
        max_rows: tokens of one rank.
        hidden_sizes: widths of a token.
        pays_from_ep, pays_to_local: ranks, and experts of a rank, for which other projects use MC2.
        takes_scales: whether the weights of experts travel with the tokens, and back.
    """

    name: str
    ep_sizes: frozenset[int]
    max_rows: int
    hidden_sizes: range
    pays_from_ep: int = 2
    pays_to_local: int = MAX_EXPERTS
    takes_scales: bool = False


PRODUCTS = (
    Product(
        "A2",
        frozenset({2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256}),
        256,
        range(32, 7168 + 1, 32),
        pays_from_ep=16,
        pays_to_local=24,
        takes_scales=True,
    ),
    Product("A3", frozenset(range(2, 769)), 512, range(1024, 8192 + 1)),
)


@dataclass(frozen=True, kw_only=True)
class Mc2:
    """MC2 in one deployment; every attribute is the same on all its ranks.

    Attributes:
        element_bytes: of activations.
        buffer_mb: HCCL's buffer of MC2's own domain; None means as much as a batch needs.
    """

    ep: int
    num_experts: int
    top_k: int
    hidden: int
    element_bytes: int
    chip: Chip
    expansion: HcclExpansion
    buffer_mb: int | None = None

    @cached_property
    def product(self) -> Product | None:
        return next((p for p in PRODUCTS if p.name == generation_of(self.chip.name)), None)

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep

    @property
    def max_rows(self) -> int:
        """Largest number of tokens per rank that the operators accept, with any buffer."""
        return self.product.max_rows if self.product else 0

    def needed_mb(self, num_rows: int) -> int:
        """Return the buffer in MB for batches of so many tokens per rank."""
        return mc2_buffer_mb(num_rows, self.hidden, self.ep, self.num_local, self.top_k)

    def obstacle(self, num_rows: int) -> str | None:
        """Return why ``num_rows`` tokens per rank cannot use MC2, None if they can."""
        return next(self._obstacles(num_rows), None)

    def loss(self) -> str | None:
        """Return why MC2 does not pay off where it is possible, None if it does."""
        product = self.product
        assert product is not None
        if self.ep >= product.pays_from_ep and self.num_local <= product.pays_to_local:
            return None
        return (
            f"on {product.name} it pays from {product.pays_from_ep} ranks on with at most "
            f"{product.pays_to_local} experts each"
        )

    def _obstacles(self, num_rows: int) -> Iterator[str]:
        product = self.product
        if product is None:
            yield f"its limits on {self.chip.name} are not known"
            return
        if self.element_bytes != 2:
            yield "it takes float16 and bfloat16, and dtype is float32"
        if product.name == "A3" and self.expansion == "AIV":
            yield "on A3 it hangs with device.hccl_expansion AIV; FFTS and AICPU are possible"
        if self.ep not in product.ep_sizes:
            sizes = ", ".join(map(str, sorted(product.ep_sizes)[:12]))
            yield f"parallel.ep is {self.ep}; {product.name} takes {sizes}"
        if self.chip.is_cann_8 and product.name == "A2":
            if self.ep % 8:
                yield f"parallel.ep is {self.ep}; A2 takes multiples of 8 with CANN 8"
            if self.num_experts > MAX_EXPERTS_CANN_8:
                yield f"the model has {self.num_experts} experts; A2 takes at most 512 with CANN 8"
        widths = product.hidden_sizes
        if self.hidden not in widths:
            yield (
                f"the model's hidden size is {self.hidden}; {product.name} takes {widths[0]} to "
                f"{widths[-1]} in steps of {widths.step}"
            )
        if self.num_experts > MAX_EXPERTS or self.top_k > MAX_TOP_K:
            yield (
                f"the model has {self.num_experts} experts, {self.top_k} for each token; it takes "
                f"at most {MAX_EXPERTS} and {MAX_TOP_K}"
            )
        if num_rows > product.max_rows:
            yield f"{num_rows} tokens of one rank; {product.name} takes {product.max_rows}"
        needed = self.needed_mb(num_rows)
        if self.buffer_mb is not None and needed > self.buffer_mb:
            yield (
                f"device.mc2_buffer_mb is {self.buffer_mb}; {num_rows} tokens of one rank need "
                f"{needed}"
            )
