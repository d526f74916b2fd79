"""The indexer of sparse attention: its shape, and the layers that have an indexer.

An indexer keeps a small key for each token, and chooses the keys to which a query attends. A layer
without an indexer uses the keys that the nearest earlier layer with an indexer has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.shapes.model_config import MAX_HEADS, MAX_LAYERS, ModelConfig

MAX_INDEX_HEADS, INDEX_DIM = 64, 128  # limits of npu_lightning_indexer
# Further limits of npu_lightning_indexer.
MAX_TOP_K, MAX_LONG_TOP_K, LONG_TOP_K_STEP = 2048, 8192, 1024
MAX_INDEX_BLOCK = 1024  # maximum number of index keys in a block, in npu_lightning_indexer
INTERLEAVES = ("GlmMoeDsaForCausalLM",)  # architectures whose ``interleaves`` is true by default
KINDS = {"F": "full", "S": "shared"}  # letters of index_topk_pattern


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer of sparse attention.

    Attributes:
        num_heads: number of heads of an index query; all heads use the same index key.
        head_dim: number of elements of an index key.
        top_k: maximum number of keys to which a query attends.
        interleaves: whether the two elements of a rotated pair of index heads are neighbours in the
            checkpoint. If false, element i forms a pair with element ``i + n / 2``, where n is the
            number of rotated elements.
        layers: indices of the layers with an indexer. The indices of next-token layers follow the
            indices of the decoder's layers.
    """

    num_heads: int
    head_dim: int
    top_k: int
    interleaves: bool
    layers: frozenset[int]

    def check(self, block_size: int, dcp: int) -> None:
        """Check that the operator accepts the blocks of index keys.

        Raises:
            ConfigError: the blocks are too large.
        """
        if block_size * dcp > MAX_INDEX_BLOCK:
            raise ConfigError(
                f"kv.block_size is {block_size} and parallel.dcp {dcp}; every rank keeps the index "
                f"keys of all shards, in blocks of up to {MAX_INDEX_BLOCK} tokens: set "
                f"kv.block_size to {MAX_INDEX_BLOCK // dcp // 16 * 16} or less"
            )


def read_indexer_spec(config: ModelConfig) -> IndexerSpec | None:
    """Read the indexer of a model of any architecture; None if the model has no indexer.

    Raises:
        ModelError: a key is missing, or has an impossible value.
    """
    if not config.has("index_head_dim"):
        return None
    return IndexerSpec(
        num_heads=config.integer("index_n_heads", most=MAX_HEADS),
        head_dim=config.integer("index_head_dim"),
        top_k=config.integer("index_topk"),
        interleaves=config.flag("indexer_rope_interleave", config.architecture in INTERLEAVES),
        layers=_layers(config),
    )


def check_indexer(config: ModelConfig, indexer: IndexerSpec) -> None:
    """Check that the operator accepts the sizes of an indexer.

    Raises:
        UnsupportedModelError: the operator does not accept a size.
    """
    if indexer.head_dim != INDEX_DIM or indexer.num_heads > MAX_INDEX_HEADS:
        raise config.unsupported(
            f"index_n_heads is {indexer.num_heads} and index_head_dim {indexer.head_dim}; the "
            f"operator takes up to {MAX_INDEX_HEADS} heads of {INDEX_DIM} elements"
        )
    top_k = indexer.top_k
    if top_k > MAX_TOP_K and (top_k > MAX_LONG_TOP_K or top_k % LONG_TOP_K_STEP):
        raise config.unsupported(
            f"index_topk is {top_k}; the operator takes 1 to {MAX_TOP_K}, and multiples of "
            f"{LONG_TOP_K_STEP} up to {MAX_LONG_TOP_K}"
        )


def _layers(config: ModelConfig) -> frozenset[int]:
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = _kinds(config, num_layers)
    if len(kinds) != num_layers or set(kinds) - set(KINDS.values()) or kinds[0] != "full":
        raise ModelError(
            f"{config.path}: the kinds of indexers are {', '.join(kinds):.80}; they must be full "
            f"or shared for each of {num_layers} layers, and full for the first layer"
        )
    # The layer of a next-token module has an indexer.
    drafts = range(num_layers, num_layers + config.num_draft_layers)
    return frozenset((*(i for i, kind in enumerate(kinds) if kind == "full"), *drafts))


def _kinds(config: ModelConfig, num_layers: int) -> tuple[str, ...]:
    """Return for each layer whether it has an indexer ("full") or uses the keys of an earlier layer
    ("shared"). config.json describes the layers by a list, by letters, or by a period.
    """
    if kinds := config.texts("indexer_types"):
        return kinds
    pattern = config.raw.get("index_topk_pattern")
    if isinstance(pattern, str):
        return tuple(KINDS.get(letter, letter) for letter in pattern)
    if pattern is not None:
        return config.texts("index_topk_pattern")
    step = config.integer("index_topk_freq", 1, most=MAX_LAYERS)
    first = config.integer("index_skip_topk_offset", 2, least=0, most=MAX_LAYERS) - 1
    return tuple("shared" if max(i - first, 0) % step else "full" for i in range(num_layers))
