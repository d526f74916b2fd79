"""Runs one rank of a tensor-parallel group alone. Counts the rank's operators, and the bytes of its
graph pools.

The rank has the weights and shapes of rank 0, but there are no other ranks. Instead of each
collective, the rank runs a local operator with the same shapes. So the sizes of tensors are right,
but their values are meaningless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_aclgraph.comm.groups import ALONE, CommGroup, RankGroups
from dist_aclgraph.config import Config
from dist_aclgraph.device.npu import Npu, open_npu, runtime
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.engine.model_runner import TORCH_DTYPES, ModelRunner
from dist_aclgraph.kv.tiers import KVTiers
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.models.dummy_weights import DummyCheckpoint
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.planning.buckets import candidate_families
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.shapes.families import read_model_spec

DUMMY_BLOCKS = 2
UPDATED = "npu_fused_infer_attention_score"  # the attention operator whose lengths the host updates


class LoneGroup(CommGroup):
    """A group with a single member. Its collectives return tensors of the right shapes, but with
    wrong values.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(1)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of graph pools on one rank, in bytes.

    Attributes:
        alone: for each graph, the size of a pool that only this graph uses.
        needs: for each graph, the maximum number of bytes that its tensors use at the same time.
        shared: size of one pool that all graphs use, if the largest graph is captured first.
    """

    alone: dict[str, int]
    needs: dict[str, int]
    shared: int


class OneRank:
    """Rank 0 of a group of ``config.parallel.tp`` ranks.

    Attributes:
        npu: the device. torch computes on the host with one thread.
    """

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(1)
        self.npu: Npu = open_npu(config.device, 0)
        self._max_len = config.max_model_len or 0
        tp = config.parallel.tp
        group = LoneGroup(tuple(range(tp)), 0) if tp > 1 else ALONE
        self._model = Decoder(
            read_model_spec(config.model),
            RankGroups(tp=group, ep=ALONE),
            DummyCheckpoint(
                TORCH_DTYPES[config.dtype], device=self.npu.device, quantises=config.makes_int8
            )
            if config.weights == "dummy"
            else Checkpoint(
                config.model,
                TORCH_DTYPES[config.dtype],
                quantises=config.makes_int8,
            ),
            device=self.npu.device,
            max_len=self._max_len,
            drafts=config.speculative.num_tokens > 0,
            fusions=Fusions.decide(config, Chip(self.npu.name, self.npu.cann), installed_name()),
            int8_latents=config.kv.dtype == "int8",
        )

    def pool_sizes(self, config: Config) -> PoolSizes:
        """Capture each graph into a separate pool, and then all graphs into one pool."""
        graphs = _graphs_of(config)
        runner = self.make_runner(config, graphs)
        alone, needs = {}, {}
        for graph in graphs:
            runner.warm_up(graph)
            runtime().reset_peak_memory_stats()
            before = runtime().memory_allocated()
            alone[str(graph)] = runner.capture(graph).bytes
            needs[str(graph)] = runtime().max_memory_allocated() - before
            runner.release(graph)
        for graph in graphs:
            runner.capture(graph)
        shared = runner.pool_memory.total_bytes
        for graph in graphs:
            runner.release(graph)
        return PoolSizes(alone, needs, shared)

    def count_launches(
        self, config: Config, batch: int, graph: BatchDescriptor | None = None
    ) -> LaunchCount:
        """Count the launches of a decode step. The step begins with token ids and ends with the
        most probable next tokens.

        Args:
            graph: the full graph whose launches are counted; None means the decode graph.
        """
        graph = graph or BatchDescriptor(batch, batch, 1, "FULL")
        runner = self.make_runner(config, [graph])
        runner.warm_up(graph)
        launches = LaunchCount()
        with launches:
            runner.capture(graph)
        runner.release(graph)
        return launches

    def make_runner(
        self,
        config: Config,
        graphs: Sequence[BatchDescriptor],
        num_blocks: int = DUMMY_BLOCKS,
        tiers: KVTiers | None = None,
    ) -> ModelRunner:
        return ModelRunner(
            config,
            self.npu,
            self._model,
            # On some chips, the attention operator counts one block for each padding request. So
            # there must be at least one block per request.
            num_blocks=max(num_blocks, *(graph.num_reqs for graph in graphs)),
            max_len=self._max_len,
            graphs=graphs,
            owns_output=True,
            tiers=tiers,
        )


class LaunchCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that cause work on the device. Views and allocations are not counted.

    Attributes:
        count: number of these operators.
        num_updates: number of operators with attention lengths that the host updates at each
            replay.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.num_updates = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if has_work(func, tree_leaves((args, kwargs)), tree_leaves(outputs)):
            self.count += 1
            self.num_updates += _name(func).startswith(UPDATED)
        return outputs


def has_work(func: Any, inputs: list[Any], outputs: list[Any]) -> bool:
    """Return whether an operator writes to memory. Operators that only create views or allocate
    memory do not write.
    """
    name = _name(func)
    if name.startswith(("empty", "new_empty")) or name.endswith("workspace"):
        return False
    writes: bool = func._schema.is_mutable or func._overloadname == "out"
    return writes or not _storages(outputs) <= _storages(inputs)


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _storages(values: list[Any]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


def _graphs_of(config: Config) -> list[BatchDescriptor]:
    """Return all graphs that a configuration captures if resources suffice, largest first."""
    graphs = [
        family.describe(bucket, config.scheduler.max_num_seqs)
        for family in candidate_families(config)
        for bucket in family.buckets
    ]
    return sorted(graphs, key=lambda graph: -graph.num_tokens)
