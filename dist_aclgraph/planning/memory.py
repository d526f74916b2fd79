"""The device memory of one rank, divided into the parts that need it. The sizes are computed from
shapes, before the model is loaded.

The computed sizes of weights and step buffers are exactly the sizes that the runtime allocates. The
sizes of HCCL's buffers were not measured. According to the vendor's document, each communicator has
two buffers of HCCL_BUFFSIZE, one for input and one for output. The sizes of activations are
estimates, which may be too high, but should not be too low.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dist_aclgraph.arrays.packing import aligned, pack_parts
from dist_aclgraph.config import Config
from dist_aclgraph.context.prompt_parts import MAX_CHUNK_TOKENS
from dist_aclgraph.context.prompt_split import MAX_WHOLE_QUERIES
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.kv.cache_spec import (
    DTYPE_BYTES,
    KVCacheSpec,
    elements_per_token,
    how_to_shrink_weights,
)
from dist_aclgraph.planning.buckets import (
    BufferSizes,
    buffer_sizes,
    candidate_families,
    lazy_families,
)
from dist_aclgraph.planning.copy_slots import slot_bytes
from dist_aclgraph.planning.step_sizes import SPARE_POSITIONS, input_sizes, table_width
from dist_aclgraph.shapes.activation_sizes import activation_bytes, prompt_bytes
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.weight_sizes import weight_parts
from dist_aclgraph.topology import ParallelLayout

MIB, GIB = 1 << 20, 1 << 30
BUFFERS_OF_A_DOMAIN = 2  # number of buffers: one for input and one for output
WORD_BYTES = 4  # number of bytes of an int32 or a float32
LARGE = 4  # error messages list the parts that need at least 1 / LARGE of the device's memory
WEIGHTS = "weights"
EAGER_STEPS = "eager steps"
HCCL_BUFFERS, MC2_BUFFERS = "HCCL buffers", "MC2 buffers"
COPY_SLOTS = "copies of KV blocks"
STEP_BUFFERS, TOKEN_COUNTS = "step buffers", "token counts"


class MemoryPart(NamedTuple):
    """The name and the size in bytes of one part of the memory."""

    name: str
    bytes: int
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one device, divided into parts. Graphs and KV blocks get the memory that no
    other part needs.

    Attributes:
        device_bytes: on a worker, the device's free bytes before the model is loaded; in a
            simulation, all bytes of the device.
        parts: the memory that is in use before the first graph is captured, without the memory of
            eager steps.
        graph_bytes: estimated bytes of the graph pool. The estimate is used if the budget model
            predicts no bytes.
        eager_bytes: estimated temporary memory of the largest eager step.
    """

    device_bytes: int
    parts: tuple[MemoryPart, ...]
    graph_bytes: int = 0
    eager_bytes: int = 0

    @classmethod
    def from_config(
        cls,
        config: Config,
        model: ModelSpec,
        device_bytes: int,
        *,
        has_hccl_buffers: bool,
        mc2_buffer_mb: int | None = None,
    ) -> RankMemory:
        """Return the memory of a rank.

        Args:
            device_bytes: all bytes of the device, or its free bytes before the model is loaded.
            has_hccl_buffers: whether HCCL's buffers take a part of ``device_bytes``. On the
                emulator, the buffers are not in device memory.
            mc2_buffer_mb: size of HCCL's buffer for MC2 in MB; None if no batch uses MC2.
        """
        parallel = config.parallel
        hccl = _hccl_buffers(config, mc2_buffer_mb) if has_hccl_buffers else ()
        element_bytes, k = DTYPE_BYTES[config.dtype], config.speculative.num_tokens
        weights = weight_parts(
            model,
            tp=parallel.tp,
            ep=parallel.ep,
            redundant_experts=parallel.redundant_experts,
            element_bytes=element_bytes,
            matrix_bytes=1 if config.makes_int8 or model.holds_int8 else None,
            drafts=k > 0,
        )
        largest = _largest_graphs(config)
        num_samples = config.scheduler.max_num_seqs * (k + 1)

        def activations(tokens: int, direct: int) -> int:
            return activation_bytes(
                model,
                tp=parallel.tp,
                ep=parallel.ep,
                element_bytes=element_bytes,
                num_tokens=tokens,
                num_samples=min(tokens, num_samples),
                pcp=parallel.pcp,
                dcp=parallel.dcp,
                num_direct=direct,
            )

        eager = largest_eager_step(config)
        max_len = model.max_model_len(config)
        chunk = MAX_CHUNK_TOKENS if model.indexer is None else max(MAX_CHUNK_TOKENS, max_len)
        prompts = prompt_bytes(
            model,
            tp=parallel.tp,
            pcp=parallel.pcp,
            dcp=parallel.dcp,
            kept=elements_per_token(model, parallel.tp),
            element_bytes=element_bytes,
            num_tokens=eager.num_tokens,
            chunk_tokens=min(chunk, config.scheduler.max_num_seqs * max_len),
            int8_latents=config.kv.dtype == "int8",
        )
        return cls(
            device_bytes=device_bytes,
            parts=(
                *(MemoryPart(part.name, part.bytes, WEIGHTS) for part in weights),
                *hccl,
                *_step_buffers(config, model, largest),
                *_copy_slots(config, model),
            ),
            graph_bytes=activations(largest.num_tokens, largest.num_tokens),
            eager_bytes=activations(*eager) + prompts,
        )

    @property
    def taken_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(part.bytes for part in self.parts if WEIGHTS in (part.name, part.why))

    @property
    def needs(self) -> tuple[MemoryPart, ...]:
        """All parts except graphs and KV blocks, the largest first. All weights are one part."""
        weights = MemoryPart(WEIGHTS, self.weight_bytes)
        eager = MemoryPart(EAGER_STEPS, self.eager_bytes, "estimated from above")
        others = (part for part in self.parts if WEIGHTS not in (part.name, part.why))
        return tuple(sorted((weights, *others, eager), key=lambda part: -part.bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes that remain for graphs and KV blocks after all other parts were subtracted."""
        return max(0, self.device_bytes - self.taken_bytes - self.eager_bytes)

    def check_fits(self, config: Config, whose: str = "each NPU") -> None:
        """Raise an error if weights, buffers and eager steps together do not fit on the device.

        Raises:
            ConfigError: the message names the needed and the available bytes, the large parts, and
                how to make each large part smaller.
        """
        needed = self.taken_bytes + self.eager_bytes
        if needed <= self.device_bytes:
            return
        first, *others = self.needs
        large = [first, *(part for part in others if LARGE * part.bytes >= self.device_bytes)]
        named = (
            f"{part.name} take {part.bytes / GIB:.2f} of them: {_how_to_shrink(part, config)}"
            for part in large
        )
        raise ConfigError(
            f"weights, buffers and eager steps take {needed / GIB:.2f} GiB of {whose}, which has "
            f"{self.device_bytes / GIB:.2f}; {'; '.join(named)}"
        )


def _copy_slots(config: Config, model: ModelSpec) -> tuple[MemoryPart, ...]:
    """Return the memory part of the copy slots; empty if KV blocks are not copied to files."""
    if not config.kv.keeps_copies:
        return ()
    cache = KVCacheSpec.from_config(config, model)
    return (MemoryPart(COPY_SLOTS, slot_bytes(cache.bytes_per_block, cache.bytes_per_slot)),)


def _how_to_shrink(part: MemoryPart, config: Config) -> str:
    """Return the end of an error message: how to make a part of the memory smaller."""
    limits = config.scheduler
    # MC2 has only one domain, so the size of a single buffer can be computed from the bytes of the
    # whole part.
    own_mb = part.bytes // (BUFFERS_OF_A_DOMAIN * MIB)
    remedies = {
        EAGER_STEPS: f"lower scheduler.max_num_batched_tokens ({limits.max_num_batched_tokens})",
        HCCL_BUFFERS: f"set device.hccl_buffer_mb below {config.device.hccl_buffer_mb}",
        MC2_BUFFERS: f"set device.mc2_buffer_mb below {own_mb}",
        STEP_BUFFERS: f"lower scheduler.max_num_seqs ({limits.max_num_seqs})",
        TOKEN_COUNTS: f"lower scheduler.max_num_seqs ({limits.max_num_seqs})",
    }
    return remedies.get(part.name) or how_to_shrink_weights(config)


def _hccl_buffers(config: Config, mc2_buffer_mb: int | None) -> tuple[MemoryPart, ...]:
    """Return the parts for the communication domains of rank 0. All ranks have the same number of
    domains.
    """
    domains = ParallelLayout.from_config(config.parallel).domains_of(0)
    if not domains:
        return ()
    mb = config.device.hccl_buffer_mb
    sizes = " and ".join(str(len(domain)) for domain in domains)
    documented = "as documented, not measured"
    shared = MemoryPart(
        HCCL_BUFFERS,
        len(domains) * BUFFERS_OF_A_DOMAIN * mb * MIB,
        f"{BUFFERS_OF_A_DOMAIN} x {mb} MiB for each domain, of {sizes} ranks; {documented}",
    )
    if mc2_buffer_mb is None:
        return (shared,)
    own = MemoryPart(
        MC2_BUFFERS,
        BUFFERS_OF_A_DOMAIN * mc2_buffer_mb * MIB,
        f"{BUFFERS_OF_A_DOMAIN} x {mc2_buffer_mb} MiB for MC2's own domain; {documented}",
    )
    return shared, own


class EagerStep(NamedTuple):
    """The largest eager step of a rank.

    Attributes:
        num_tokens: number of tokens that the rank runs.
        num_direct: number of tokens for which attention reads the cache directly, through the block
            table. Each of these tokens is a separate row for attention.
    """

    num_tokens: int
    num_direct: int


def largest_eager_step(config: Config) -> EagerStep:
    """Return the largest eager step of a rank. In context parallelism, a rank runs all tokens of
    short requests, but only two chunks of each long request.
    """
    limits, pcp = config.scheduler, config.parallel.pcp
    direct = min(limits.max_num_batched_tokens, limits.max_num_seqs * MAX_WHOLE_QUERIES)
    if pcp == 1:
        return EagerStep(limits.max_num_batched_tokens, direct)
    split = limits.max_num_batched_tokens - direct
    # A rank runs two chunks of each long request, and the lengths of chunks differ by at most one
    # token.
    share = direct + -(-split // pcp) + 2 * limits.max_num_seqs
    return EagerStep(min(share, limits.max_num_batched_tokens), direct)


def _largest_graphs(config: Config) -> BufferSizes:
    """Return sizes of buffers that are large enough for the largest graph of each kind."""
    max_num_seqs = config.scheduler.max_num_seqs
    families = (*candidate_families(config), *lazy_families(config))
    return buffer_sizes(
        [family.describe(family.buckets[-1], max_num_seqs) for family in families], max_num_seqs
    )


def _step_buffers(config: Config, spec: ModelSpec, largest: BufferSizes) -> tuple[MemoryPart, ...]:
    """Return how many bytes step buffers and token counts need.

    Step buffers are the inputs and outputs of the largest graphs, the cos and sin tables of all
    positions, and the state of sampling and drafting.
    """
    element_bytes, k = DTYPE_BYTES[config.dtype], config.speculative.num_tokens
    num_rows, vocab_size = config.scheduler.max_num_seqs, spec.vocab_size
    num_tokens, num_reqs, num_samples = largest
    max_len = spec.max_model_len(config)
    # The outputs are the logits, the greatest logit of each row, and, with drafts, the hidden
    # states that the draft model reads.
    outputs = num_samples * (vocab_size + 1) + (num_tokens * spec.hidden_size if k else 0)
    rope_dim = spec.latent.rope_dim if spec.latent else spec.head_dim
    tables = 2 * spec.num_rope_tables * (max_len + SPARE_POSITIONS) * rope_dim
    sizes = input_sizes(
        num_tokens,
        num_reqs,
        k,
        has_state=spec.linear is not None,
        has_lens=spec.indexer is not None,
    )
    _, inputs = pack_parts(sizes)
    width = table_width(max_len, Shards.from_config(config).tokens_per_block, k)
    # The inputs also include the block table, the index of every token, and the numbers of accepted
    # drafts.
    inputs += num_reqs * width + num_tokens + num_reqs
    # The state of sampling: the token table, one random factor and one random summand for each
    # token of the vocabulary, and the largest random number.
    sampling = max(num_samples, num_rows) + vocab_size + 2 * vocab_size + 1
    # The state of drafting, for each row and the spare row: drafts, the last token, and the number
    # of accepted drafts.
    if k:
        sampling += aligned((num_rows + 1) * k) + 2 * (num_rows + 1)
    counts = num_rows * vocab_size
    return (
        MemoryPart(
            STEP_BUFFERS,
            (outputs + tables) * element_bytes + (inputs + sampling) * WORD_BYTES,
            "inputs, logits, rotary tables and what sampling keeps",
        ),
        MemoryPart(TOKEN_COUNTS, counts * WORD_BYTES, "of each row, for penalties"),
    )
