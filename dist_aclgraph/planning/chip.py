"""Limits of a chip and its CANN release. The limits are checked before the model is loaded.

The rules come from the documents and the tiling code of operators (FusedInferAttentionScore, the
operators that write the cache). The rules were not tested on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dist_aclgraph.config import Config
from dist_aclgraph.config.chips import generation_of, is_cann_before
from dist_aclgraph.config.device import UNKNOWN_CANN
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.heads import PARTED_HEAD, heads_per_rank, kv_heads_per_rank
from dist_aclgraph.shapes.model_facts import ModelFacts

MAX_SPLIT_FUSE_DIM, MAX_SPLIT_FUSE_BLOCK, MAX_LATENT_BLOCK = 256, 512, 512


@dataclass(frozen=True)
class Chip:
    """Properties of one device, as its runtime reports them.

    Attributes:
        name: name of the chip, e.g. Ascend910B1.
        cann: version of CANN, e.g. 9.1.0; "" if unknown, for example without CANN's set_env.sh.
    """

    name: str
    cann: str

    def is_cann_before(self, *version: int) -> bool:
        """Whether CANN is older than ``version``; true if the version is unknown."""
        return is_cann_before(self.cann, *version)

    @property
    def is_cann_8(self) -> bool:
        return self.is_cann_before(9)

    def check_attention(self, config: Config, facts: ModelFacts, whose: str) -> None:
        """Raise an error if attention on this chip does not support the model's type, its head size
        or the block size.

        Args:
            whose: a text that names the device, for messages.

        Raises:
            ConfigError: the message names key, value, limit and remedy.
        """
        problem = next(self._problems(config, facts), None)
        if problem is not None:
            raise ConfigError(f"{problem} ({whose}: {self.name}, CANN {self.cann or UNKNOWN_CANN})")

    def check_assumed(self, config: Config, whose: str) -> None:
        """Check that the chip has the generation that the plan assumes, because prices and limits
        differ between generations.

        Raises:
            ConfigError: the message names the key to set.
        """
        assumed, found = generation_of(config.device.chip), generation_of(self.name)
        if found != assumed:
            raise ConfigError(
                f"{whose} is an {self.name} ({found}); plans assume an {config.device.chip} "
                f"({assumed}): set device.soc={self.name}"
            )

    def counts_shared_blocks(self, config: Config, facts: ModelFacts) -> bool:
        """Return whether the attention operator refuses a batch if the KV lengths of all its
        requests together need more blocks than the cache has.

        A block that n requests share counts n times. The operator also counts the lengths of
        padding requests.
        """
        parallel = config.parallel
        # Ranks that share a cache exchange their queries. Each call of the attention operator gets
        # the query heads of all these ranks.
        head_ranks = max(1, parallel.dcp // parallel.pcp)
        splits = (
            self._has_split_fuse(config, facts, head_ranks)
            and facts.head_dim <= MAX_SPLIT_FUSE_DIM
            and config.kv.block_size <= MAX_SPLIT_FUSE_BLOCK
        )
        return not facts.mla and not splits

    def accepts_float16(self, config: Config, facts: ModelFacts) -> bool:
        """Return whether the model's attention accepts float16 on this chip."""
        return facts.indexer is not None or self._has_split_fuse(config, facts)

    def _has_split_fuse(self, config: Config, facts: ModelFacts, head_ranks: int = 1) -> bool:
        """Return whether the attention operator uses the tiling that is new in CANN 9. For calls
        that this tiling does not support, CANN 9 uses the tiling of CANN 8.

        Args:
            head_ranks: number of ranks whose query heads are in one call of the operator.
        """
        tp = config.parallel.tp
        heads = heads_per_rank(facts.num_heads, tp, is_latent=facts.mla)
        shares_keys = heads * head_ranks > kv_heads_per_rank(facts.num_kv_heads, tp)
        return not self.is_cann_8 and not facts.mla and shares_keys

    def _remedy_of_heads(self, facts: ModelFacts) -> str:
        """Return a remedy for head sizes that only the tiling of CANN 9 supports."""
        if facts.head_dim > MAX_SPLIT_FUSE_DIM or facts.num_heads == facts.num_kv_heads:
            return "use another model"
        if self.is_cann_8:
            return "install CANN 9"
        return "lower parallel.tp, so that several query heads of a rank share keys"

    def _problems(self, config: Config, facts: ModelFacts) -> Iterator[str]:
        block_size, dim = config.kv.block_size, facts.head_dim
        has_split_fuse = self._has_split_fuse(config, facts)
        if config.dtype == "float32":
            yield "dtype is float32; attention takes bfloat16 and float16: set dtype=bfloat16"
        if facts.indexer:
            return  # Sparse attention accepts float16, bfloat16 and all block sizes.
        if config.dtype == "float16" and not self.accepts_float16(config, facts):
            yield "dtype is float16; attention of this model takes bfloat16: set dtype=bfloat16"
        if facts.mla:
            if self.is_cann_before(8, 5, 1) and config.parallel.dcp > 1:
                yield (
                    f"parallel.dcp is {config.parallel.dcp}; latent attention gives no sums, "
                    "which are needed to merge shards: set parallel.dcp=1, or install "
                    "CANN 8.5.1 or newer"
                )
            if self.is_cann_8 and facts.latent_head_dim > PARTED_HEAD:
                yield (
                    f"the model's heads are {facts.latent_head_dim} wide; latent attention takes "
                    f"{PARTED_HEAD} on CANN 8: install CANN 9"
                )
            if self.is_cann_8 and block_size not in (16, 128):
                yield f"kv.block_size is {block_size}; latent attention takes 16 and 128: set 128"
            elif block_size > MAX_LATENT_BLOCK:
                yield (
                    f"kv.block_size is {block_size}; latent attention takes multiples of 16 up to "
                    f"{MAX_LATENT_BLOCK}: set 128"
                )
            return
        counts_shared = self.counts_shared_blocks(config, facts)
        if config.recovery.exact and counts_shared:
            # The attention operator counts a shared block several times. If the cache is full, the
            # operator refuses a batch with the padding of a graph. Then the step runs without a
            # graph, with other shapes, and the results can be rounded differently.
            yield (
                "recovery.exact is true; attention of this model refuses padding that needs more "
                "blocks than the cache has: set it to false"
                + (", or install CANN 9" if self.is_cann_8 else "")
            )
        if config.parallel.dcp * config.parallel.pcp > 1 and counts_shared:
            # The attention operator gets a prompt as several rows. A row is one token of the
            # prompt, or one of the pieces into which the prompt is split. All of these rows use the
            # same blocks.
            yield (
                f"parallel.dcp is {config.parallel.dcp} and parallel.pcp {config.parallel.pcp}; "
                "attention of this model refuses rows that need more blocks than the cache has, "
                "and counts a shared block once for each row: set both to 1"
                + (", or install CANN 9" if self.is_cann_8 else "")
            )
        if has_split_fuse and dim <= MAX_SPLIT_FUSE_DIM:
            if block_size > MAX_SPLIT_FUSE_BLOCK and block_size % 128:
                yield (
                    f"kv.block_size is {block_size}; attention takes multiples of 16 up to "
                    f"{MAX_SPLIT_FUSE_BLOCK}, and of 128 beyond: set 128"
                )
            return
        if dim not in (64, 128):
            remedy = self._remedy_of_heads(facts)
            yield f"the model's head size is {dim}; attention takes 64 and 128: {remedy}"
        if block_size % 128:
            yield f"kv.block_size is {block_size}; attention takes multiples of 128: set 128"
