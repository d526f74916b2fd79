"""Describes the cache of one rank as a list of tensors, and computes the size of the cache. No
other module computes this size.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.config import Config
from dist_aclgraph.context.state_slots import StateSlots
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.int8_latents import int8_row_bytes
from dist_aclgraph.shapes.model_facts import ModelFacts

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MIN_BLOCKS = 2  # minimum number of blocks: the dummy block, and one block for requests


def elements_per_token(facts: ModelFacts, tp: int) -> int:
    """Return how many elements one TP rank keeps for each token in each layer.

    The elements are the keys and values of the rank's heads. With latent attention, the elements
    are the latent and the rotated key, which all heads share. Every rank keeps the whole latent and
    the whole rotated key.

    Raises:
        ConfigError: the heads cannot be divided evenly among the ranks.
    """
    if facts.mla:
        return facts.latent_size
    return 2 * kv_heads_per_rank(facts.num_kv_heads, tp) * facts.head_dim


def how_to_shrink_weights(config: Config) -> str:
    """Return advice for the end of an error message: how to change the configuration so that each
    rank's weights become smaller.
    """
    more = "parallel.tp or parallel.ep" if config.parallel.ep > 1 else "parallel.tp"
    return f"raise {more}" + ("" if config.makes_int8 else ", or set quantization=w8a8")


@dataclass(frozen=True)
class PagedTensor:
    """A tensor, divided into blocks, that stores data of each token for some of the layers.

    Attributes:
        num_layers: number of layers that have the tensor.
        width: number of elements of a token in one layer, on one rank.
        is_whole: whether every rank stores the data of all tokens, even if the cache is sharded.
        is_int8: whether the elements are int8. If false, the elements have the type
            ``KVCacheSpec.dtype``.
    """

    num_layers: int
    width: int
    is_whole: bool = False
    is_int8: bool = False


@dataclass(frozen=True)
class StateTensor:
    """A tensor, divided into slots, that stores recurrent states of requests for some of the
    layers.

    Attributes:
        num_layers: number of layers that have the tensor.
        bytes: size of a slot in one layer, on one rank.
    """

    num_layers: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The shape of one rank's cache, over all layers.

    Attributes:
        paged: tensors that are divided into blocks. All layers use the same block ids.
        states: tensors that are divided into slots, for layers with recurrent state.
        num_shards: number of ranks among which the tokens of each request are divided. Each of
            these ranks has one block for each block id.
        dtype: type of the cache's elements, by its name in the configuration.
    """

    paged: tuple[PagedTensor, ...]
    block_size: int
    num_shards: int = 1
    dtype: str = "bfloat16"
    states: tuple[StateTensor, ...] = ()
    num_slots: int = 0

    @classmethod
    def from_config(cls, config: Config, facts: ModelFacts) -> KVCacheSpec:
        """Return the shape of one rank's cache. If the deployment uses drafts, the cache includes
        the layer of the next-token module.

        Raises:
            ConfigError: the heads cannot be divided evenly among the ranks.
        """
        tp, linear = config.parallel.tp, facts.linear
        num_layers = facts.num_paged_layers + (1 if config.speculative.num_tokens else 0)
        states: tuple[StateTensor, ...] = ()
        if linear is not None:
            each = linear.state_bytes(tp, config.dtype, DTYPE_BYTES[config.dtype])
            states = (StateTensor(len(linear.layers), each),)
        paged = [PagedTensor(num_layers, elements_per_token(facts, tp))]
        if config.kv.dtype == "int8":
            width = int8_row_bytes(facts.latent_size, DTYPE_BYTES[config.dtype])
            paged = [PagedTensor(num_layers, width, is_int8=True)]
        if facts.indexer is not None:
            num_indexers = len(facts.indexer.layers.intersection(range(num_layers)))
            paged.append(PagedTensor(num_indexers, facts.indexer.head_dim, is_whole=True))
        return cls(
            paged=tuple(paged),
            states=states,
            num_slots=StateSlots.from_config(config).count if states else 0,
            block_size=config.kv.block_size,
            num_shards=config.parallel.dcp,
            dtype=config.dtype,
        )

    @property
    def tokens_per_block(self) -> int:
        """Number of tokens with the same block id: ``block_size`` tokens on each shard."""
        return self.block_size * self.num_shards

    @property
    def bytes_per_block(self) -> int:
        """Size of one block in all layers together, on each rank."""
        return sum(
            (self.tokens_per_block if tensor.is_whole else self.block_size)
            * tensor.num_layers
            * tensor.width
            * (1 if tensor.is_int8 else DTYPE_BYTES[self.dtype])
            for tensor in self.paged
        )

    @property
    def bytes_per_slot(self) -> int:
        """Size of one state slot in all layers together, on each rank."""
        return sum(tensor.num_layers * tensor.bytes for tensor in self.states)

    @property
    def state_bytes(self) -> int:
        """Size of all state slots in all layers together, on each rank."""
        return self.num_slots * self.bytes_per_slot

    def total_bytes(self, num_blocks: int) -> int:
        """Return the size in bytes of the cache on each rank: all blocks and all state slots."""
        return num_blocks * self.bytes_per_block + self.state_bytes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def longest_request(self, num_blocks: int, max_model_len: int) -> int:
        """Return the maximum length of a request: the smaller number of ``max_model_len`` and the
        length for which the cache has room.
        """
        blocks = num_blocks - 1  # number of blocks without the dummy block
        # A request can have one token more than its blocks have room for, because the KV of its
        # last token is never written.
        return min(max_model_len, blocks * self.tokens_per_block + 1)

    def choose_num_blocks(self, config: Config, free_bytes: int, max_model_len: int) -> int:
        """Return the number of blocks, which is the same on every rank. If no number is configured,
        the result is the number of blocks that fit in memory, but at most the number that requests
        can use.

        Args:
            free_bytes: number of free bytes on the rank with the least free memory.
            max_model_len: the maximum length of a request in tokens, from the configuration, or
                from the model if the configuration sets none.

        Raises:
            ConfigError: the recurrent states do not fit; or fewer than two blocks fit; or fewer
                blocks fit than ``kv.num_blocks``; or the blocks are too few for one request of the
                configured ``max_model_len``.
        """
        kv = config.kv
        affordable = self.blocks_that_fit(free_bytes, kv.memory_fraction, kv.max_bytes)
        if kv.num_blocks is None:
            useful = config.scheduler.max_num_seqs * self.blocks_for(max_model_len) + 1
            num_blocks = min(affordable, useful)
        elif kv.num_blocks > affordable:
            raise ConfigError(
                f"kv.num_blocks is {kv.num_blocks}; the tightest rank has room for {affordable} "
                f"blocks of {self.bytes_per_block} bytes: lower it, or raise kv.memory_fraction"
            )
        else:
            num_blocks = kv.num_blocks
        longest = self.longest_request(num_blocks, max_model_len)
        # If no length is configured, a small cache is not an error, but limits the length of
        # requests.
        if config.max_model_len is not None and longest < max_model_len:
            remedy = (
                "raise kv.memory_fraction, lower scheduler.max_num_batched_tokens, "
                f"{how_to_shrink_weights(config)}"
                if kv.num_blocks is None
                else "raise kv.num_blocks"
            )
            raise ConfigError(
                f"max_model_len is {max_model_len}; {num_blocks} KV blocks of "
                f"{self.tokens_per_block} tokens hold requests of {longest}: lower it, or {remedy}"
            )
        return num_blocks

    def blocks_that_fit(self, free_bytes: int, memory_fraction: float, max_bytes: int) -> int:
        """Return how many blocks, including the dummy block, fit in a rank's memory beside the
        state slots.

        All ranks of a group must use the same number of blocks, so the smallest result is used.

        Raises:
            ConfigError: the states do not fit, or fewer than two blocks fit.
        """
        budget = min(int(free_bytes * memory_fraction), max_bytes)
        if budget < self.state_bytes:
            raise ConfigError(
                f"{self.num_slots} states of {self.bytes_per_slot} bytes do not fit in {budget} "
                f"bytes (of {free_bytes} free): lower scheduler.max_num_seqs, kv.checkpoints or "
                "speculative.num_tokens, or use more NPUs"
            )
        budget -= self.state_bytes
        num_blocks = budget // self.bytes_per_block
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"only {num_blocks} KV blocks of {self.bytes_per_block} bytes fit in {budget} "
                f"bytes (of {free_bytes} free); at least {MIN_BLOCKS} are needed: raise "
                "kv.memory_fraction or kv.max_bytes, lower kv.block_size or "
                "scheduler.max_num_batched_tokens, or use more NPUs"
            )
        return num_blocks
