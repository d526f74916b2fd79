"""The stages of a rank's start. Each stage is an object that creates the object of the next stage.

``join_rank`` returns a ``JoinedRank``, ``JoinedRank.load`` returns a ``LoadedRank``, and
``LoadedRank.make_runner`` returns a ``RunningRank``. ``RunningRank.leave`` returns a
``LoadedRank``, which can join another group. torch_npu reads environment variables once, during its
import. Ray must set these variables before the import, so torch_npu is imported inside functions.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dist_aclgraph.actors.worker.rank_facts import JoinedDevice, LoadedWeights
from dist_aclgraph.actors.worker.stream_ledger import StreamLedger
from dist_aclgraph.config import Config
from dist_aclgraph.device.bad_memory import MemoryRange, lies_in
from dist_aclgraph.device.host_cores import bind_this_process, format_cores
from dist_aclgraph.device.kind import DeviceKind, resolve_kind
from dist_aclgraph.device.versions import installed_name
from dist_aclgraph.environment import is_soft_partition, launch_blocking, visible_devices
from dist_aclgraph.errors import DeviceError, DeviceFault, NotBoundError
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.kv.tiers import CachePlace, KVTiers
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.planning.budget import StreamOffer, max_piecewise_sizes, reserved_streams
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.commands import GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.planning.exchange import ExchangeRule
from dist_aclgraph.planning.memory import RankMemory
from dist_aclgraph.planning.modes import GraphSupport, check_partition, normalise_mode
from dist_aclgraph.planning.plan import CaptureCost
from dist_aclgraph.planning.way_back import LOSES_KV
from dist_aclgraph.shapes.int4_formats import read_int4_formats
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.model_facts import ModelFacts
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.servable import read_servable_spec
from dist_aclgraph.topology import GroupRank, ParallelLayout, Ranks, WorldRank

if TYPE_CHECKING:
    from dist_aclgraph.comm.groups import RankGroups
    from dist_aclgraph.comm.marks import CollectiveMarks
    from dist_aclgraph.device.npu import Npu
    from dist_aclgraph.engine.model_runner import ModelRunner
    from dist_aclgraph.layers.experts import ExpertSetup
    from dist_aclgraph.models.decoder import Decoder

logger = logging.getLogger(__name__)
# A function with two arguments: the number of bytes that are loaded, and the number of bytes of all
# weights.
NoteProgress = Callable[[int, int], None]


def join_rank(
    config: Config,
    rank: WorldRank,
    group_rank: GroupRank,
    rendezvous: str,
    meeting: socket.socket | None = None,
) -> JoinedRank:
    """Open the device and join the lockstep group that meets at ``rendezvous``.

    Args:
        meeting: the socket that listens at ``rendezvous``. Only rank 0 of a group on several nodes
            has this socket; None for other ranks.

    Raises:
        ConfigError: the chip is unknown or does not fit the configuration, or CANN has no HIXL.
    """
    from dist_aclgraph.comm.marks import NO_MARKS, DeviceMarks
    from dist_aclgraph.device.npu import open_npu

    # ``normalise_mode`` raises an error if the environment of this process forbids the graph mode.
    normalise_mode(config.graph.mode, GraphSupport(), launch_blocking=launch_blocking())
    spec = read_servable_spec(config)
    # The process is bound before torch_npu starts its threads, because threads inherit the cores.
    cores = _bind_cores(config, rank)
    npu = open_npu(config.device, rank, deterministic=needs_fixed_sums(config, spec))
    check_partition(config.graph.mode, is_soft=is_soft_partition())
    chip = Chip(npu.name, npu.cann)
    _check_chip(config, spec, chip, npu.kind, rank)
    if config.fetches_by_hixl:
        from dist_aclgraph.device.hixl import import_hixl

        import_hixl()  # a missing HIXL must be reported before the weights are loaded
    exchange = ExchangeRule.from_config(config, spec, chip)
    streams = StreamLedger(npu)
    has_mc2 = exchange.mc2_buffer_mb is not None
    layout = ParallelLayout.from_config(config.parallel, mc2=has_mc2).within_group
    num_passes = 1 + config.speculative.num_tokens
    marks = DeviceMarks(npu, num_passes) if config.logging.record_collectives else NO_MARKS
    groups = _join_groups(config, layout, group_rank, exchange, rendezvous, meeting, marks)
    streams.book("joining HCCL groups")
    return JoinedRank(config, spec, rank, group_rank, npu, groups, layout, exchange, streams, cores)


def _bind_cores(config: Config, rank: WorldRank) -> frozenset[int]:
    """Bind this process to the cores near its NPU. Return the cores; none if the process is not
    bound.
    """
    if resolve_kind(config.device.kind) != "npu":
        return frozenset()
    try:
        cores = bind_this_process(config.device)
    except NotBoundError as e:
        logger.warning("rank %s is not bound to cores: %s", rank, e)
        return frozenset()
    logger.info("rank %s is bound to the cores %s", rank, format_cores(cores))
    return cores


def _join_groups(
    config: Config,
    layout: ParallelLayout,
    group_rank: GroupRank,
    exchange: ExchangeRule,
    rendezvous: str,
    meeting: socket.socket | None,
    marks: CollectiveMarks,
) -> RankGroups:
    from dist_aclgraph.comm.groups import join_lockstep_group, make_groups

    timeouts, size = config.timeouts, layout.world_size
    buffer_mb = config.device.hccl_buffer_mb
    if size > 1:
        join_lockstep_group(
            rendezvous, group_rank, size, timeouts.join_s, meeting, buffer_mb=buffer_mb
        )
    return make_groups(
        layout,
        group_rank,
        buffer_mb=buffer_mb,
        mc2_buffer_mb=exchange.mc2_buffer_mb,
        watchdog_s=timeouts.watchdog_s,
        marks=marks,
    )


def _check_chip(
    config: Config, facts: ModelFacts, chip: Chip, kind: DeviceKind, rank: WorldRank
) -> None:
    whose = f"the NPU of rank {rank}"
    if kind == "emulated":
        if config.device.emulator.strict:
            chip.check_attention(config, facts, whose)
        return
    chip.check_assumed(config, whose)
    chip.check_attention(config, facts, whose)


@contextmanager
def _host_threads(num_processes: int) -> Iterator[None]:
    """Limit torch's threads within this context, because ``num_processes`` processes share the
    cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def needs_fixed_sums(config: Config, facts: ModelFacts) -> bool:
    """Return whether collectives must compute the same sum in every run and on every
    rank.

    Each rank decides by itself which experts its tokens use, and which drafts are accepted. Ranks
    with the same tokens must make the same decisions. If the sums of these ranks differed in the
    last bit, the ranks might make different decisions.
    """
    if config.device.deterministic is not None:
        return config.device.deterministic
    decides_itself = facts.moe or config.speculative.num_tokens > 0
    return config.parallel.tp * config.parallel.pcp > 1 and decides_itself


@dataclass(frozen=True)
class JoinedRank:
    """A rank with an open device and its communication groups."""

    config: Config
    spec: ModelSpec
    rank: WorldRank
    group_rank: GroupRank
    npu: Npu
    groups: RankGroups
    layout: ParallelLayout  # layout of the lockstep group
    exchange: ExchangeRule
    streams: StreamLedger
    cores: frozenset[int]  # the cores that this process is bound to; empty if it is not bound

    @property
    def device(self) -> JoinedDevice:
        """The facts about the device that the controller gets."""
        cores = f", bound to {len(self.cores)} cores of the host" if self.cores else ""
        return JoinedDevice(self.npu.description + cores, self.exchange.ranks_of_node)

    @property
    def domains(self) -> tuple[Ranks, ...]:
        """The communication domains that contain this rank."""
        return self.layout.domains_of(self.group_rank)

    def join_again(self, rendezvous: str, meeting: socket.socket | None) -> JoinedRank:
        """Join a new group of the same layout, after the rank has left its previous group.

        Weights and layers stay the same objects, but the layers use the communicators of the new
        group.
        """
        streams = StreamLedger(self.npu)
        self.groups.become(
            _join_groups(
                self.config,
                self.layout,
                self.group_rank,
                self.exchange,
                rendezvous,
                meeting,
                self.groups.marks,
            )
        )
        streams.book("joining HCCL groups")
        return replace(self, streams=streams)

    def load(self, note_progress: NoteProgress, num_neighbours: int) -> LoadedRank:
        """Load this rank's weights.

        Args:
            num_neighbours: number of ranks on this node that load at the same time, including this
                rank.

        Raises:
            ConfigError: the device memory is too small for the weights and the KV cache.
        """
        from dist_aclgraph.engine.model_runner import TORCH_DTYPES
        from dist_aclgraph.models.checkpoint import Checkpoint
        from dist_aclgraph.models.decoder import Decoder
        from dist_aclgraph.models.dummy_weights import DummyCheckpoint
        from dist_aclgraph.models.loading import WeightSource

        config, spec = self.config, self.spec
        before = self.npu.memory().free_bytes
        memory = self._check_needs(before)
        total, done = memory.weight_bytes, 0

        def note(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            note_progress(min(done, total), total)

        note(0)
        dtype, device = TORCH_DTYPES[config.dtype], self.npu.device
        quantises = config.makes_int8
        int4 = read_int4_formats(read_model_config(config.model, config.model_overrides))
        checkpoint: WeightSource
        if config.weights == "dummy":
            checkpoint = DummyCheckpoint(
                dtype, device=device, quantises=quantises, names=spec.names, int4=int4
            )
        else:
            checkpoint = Checkpoint(
                config.model,
                dtype,
                device=device,
                quantises=quantises,
                names=spec.names,
                int4=int4,
            )
            self._log_ignored(checkpoint.count_ignored())
        chip = Chip(self.npu.name, self.npu.cann)
        fusions = Fusions.decide(config, chip, installed_name())
        with _host_threads(1 if self.cores else num_neighbours):
            model = Decoder(
                spec,
                self.groups,
                checkpoint,
                device=self.npu.device,
                max_len=spec.max_model_len(config),
                drafts=config.speculative.num_tokens > 0,
                note=note,
                experts=self._make_expert_setup(),
                fusions=fusions,
                int8_latents=config.kv.dtype == "int8",
            )
        self.npu.synchronize()
        self.npu.give_back()  # returns the temporary memory of loading to the device
        note_progress(total, total)
        taken_bytes = before - self.npu.memory().free_bytes
        weights = LoadedWeights(taken_bytes, fusions.report())
        return LoadedRank(self, model, weights, memory.eager_bytes)

    def _log_ignored(self, num_tensors: int) -> None:
        if num_tensors and self.rank == 0:
            parts = ", ".join(part.removesuffix(".") for part in self.spec.names.ignored)
            logger.info("not loaded: %d tensors of other parts (%s)", num_tensors, parts)

    def _check_needs(self, free_bytes: int) -> RankMemory:
        """Check that the weights and the KV cache fit in memory, before any weight is read.

        Returns:
            The memory account of this rank.
        """
        config, spec = self.config, self.spec
        # HCCL's buffers are not counted, because their documented size was never confirmed.
        memory = RankMemory.from_config(config, spec, free_bytes, has_hccl_buffers=False)
        memory.check_fits(config, f"the NPU of rank {self.rank}")
        KVCacheSpec.from_config(config, spec).choose_num_blocks(
            config, memory.free_bytes, spec.max_model_len(config)
        )
        return memory

    def _make_expert_setup(self) -> ExpertSetup:
        from dist_aclgraph.layers.experts import ExpertSetup
        from dist_aclgraph.layers.shared_experts import SideStream

        side = (
            SideStream()
            if self.spec.has_shared_experts and self.config.graph.overlap_shared_experts
            else None
        )
        self.streams.book("side stream of shared experts, and the pool that all streams are of")
        return ExpertSetup(
            self.groups,
            self.config.parallel.expert_capacity,
            side,
            self.exchange.mc2.operators if self.exchange.mc2 is not None else None,
            self.config.parallel.redundant_experts,
        )


@dataclass(frozen=True)
class LoadedRank:
    """A rank whose weights are loaded."""

    joined: JoinedRank
    model: Decoder
    weights: LoadedWeights
    eager_bytes: int  # estimate of the temporary memory of the largest eager step

    def join_again(self, rendezvous: str, meeting: socket.socket | None) -> LoadedRank:
        """See ``JoinedRank.join_again``."""
        return replace(self, joined=self.joined.join_again(rendezvous, meeting))

    def make_runner(
        self, num_blocks: int, max_len: int, graphs: list[BatchDescriptor]
    ) -> RunningRank:
        """Create a runner with buffers for ``graphs``, and a small KV cache for trial steps."""
        from dist_aclgraph.device.npu import translated
        from dist_aclgraph.engine.model_runner import ModelRunner
        from dist_aclgraph.layers.context_parallel import ContextParallel

        joined, config = self.joined, self.joined.config
        groups = joined.groups
        place = CachePlace.of(config, joined.spec, groups.tp.rank, groups.dcp.rank)
        with translated("allocating the buffers of graphs"):
            runner = ModelRunner(
                config,
                joined.npu,
                self.model,
                num_blocks=num_blocks,
                max_len=max_len,
                graphs=graphs,
                owns_output=joined.groups.tp.rank == joined.groups.pcp.rank == 0,
                choose_exchange=joined.exchange.choose,
                context=ContextParallel.of(joined.groups),
                tiers=None if place is None else KVTiers.open(config, place),
                state_tiers=None if place is None else KVTiers.open_states(config, place),
            )
        joined.streams.book("main, update and capture streams")
        return RunningRank(self, runner)


@dataclass(frozen=True)
class RunningRank:
    """A rank that runs steps and captures graphs."""

    loaded: LoadedRank
    runner: ModelRunner

    @property
    def joined(self) -> JoinedRank:
        return self.loaded.joined

    def leave(self) -> LoadedRank:
        """Leave the group, whose other ranks might be dead.

        The device must be stopped before this call. The graphs, caches and communicators are freed;
        the weights stay.

        Raises:
            DeviceError: the device does not recover.
        """
        from dist_aclgraph.comm.groups import leave_lockstep_group

        self.joined.npu.restart(resumes_groups=False)
        # Graphs are freed first, because graphs contain addresses of the group's communicators.
        self.runner.close()
        leave_lockstep_group()
        return self.loaded

    def locate(self, memory: Sequence[MemoryRange]) -> DeviceFault:
        """Return the kind of a memory fault. The kind says what the faulty memory is used for.

        Returns ``uce`` if the use is unknown, e.g. for memory outside torch's allocator.
        """
        caches = [
            MemoryRange(t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.runner.caches.tensors()
        ]
        if not memory or not lies_in(memory, self.joined.npu.tensor_memory()):
            return "uce"
        return "uce_kv" if lies_in(memory, caches) else "uce_tensor"

    def resume(self, *, keeps_kv: bool = True) -> None:
        """Make the device usable again after an abort.

        Graphs stay valid. With ``keeps_kv``, the KV cache also stays valid; otherwise the cache is
        set to zero.

        Raises:
            DeviceError: the device does not recover, or memory that is still needed is faulty.
        """
        npu = self.joined.npu
        if memory := npu.bad_memory():
            fault = self.locate(memory)
            if keeps_kv or fault not in LOSES_KV:
                raise DeviceError(f"memory is faulty, though no error reported it ({fault})")
        npu.restart()
        self.runner.forget_steps()
        if not keeps_kv:
            self.runner.caches.zero()

    def make_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache. The number of blocks must be the same on every rank."""
        from dist_aclgraph.device.npu import translated

        with translated("allocating the KV cache"):
            self.runner.make_cache(num_blocks)

    def book_domains(self) -> None:
        """Record the number of streams that HCCL domains use. To be called before ``offer``."""
        sizes = " and ".join(str(len(ranks)) for ranks in self.joined.domains) or "no"
        mode = self.joined.config.device.expansion
        self.joined.streams.book(f"HCCL domains of {sizes} ranks, expanded by {mode}")

    def offer(self) -> StreamOffer:
        """Return this rank's offer of resources for graphs.

        Call this method after the first eager steps, because eager steps create the HCCL domains
        and side streams. Call the method before the first capture, because captures reduce the
        number of free streams. With software queues, this number stays low even after graphs were
        released.
        """
        joined = self.joined
        # Free the temporary memory of eager steps. Otherwise this memory would be subtracted twice:
        # here, and below as ``eager_bytes``.
        joined.npu.give_back()
        # Before graphs are captured, the caches of the trial steps are freed, and larger caches
        # replace them. The larger caches have recurrent states of the same size, so the bytes of
        # the present states count as free. The present KV blocks do not count as free: torch may
        # keep their memory reserved.
        free_bytes = joined.npu.memory().free_bytes + self.runner.caches.state_bytes
        free_bytes -= self.loaded.eager_bytes
        chips = ",".join(map(str, visible_devices() or (os.getpid(),)))
        return StreamOffer(
            rank=joined.rank,
            available=joined.npu.available_streams(),
            counts_graphs=self.runner.free_streams is not None,
            reserve=reserved_streams(joined.config),
            free_bytes=max(0, free_bytes),
            device=joined.npu.name,
            cann=joined.npu.cann,
            card=f"{socket.gethostname()}:{chips}",
            max_sizes=max_piecewise_sizes(joined.npu.name),
            taken=dict(joined.streams.taken),
        )

    def move(self, command: GraphCommand) -> CaptureCost:
        """Do one action of a graph transaction. Return the cost of a captured graph; 0 for other
        actions.
        """
        assert command.graph is not None
        if command.action == "capture":
            return self.runner.capture(command.graph)
        if command.action == "prepare":
            self.runner.warm_up(command.graph)
        elif command.action == "commit":
            self.runner.commit(command.graph)
        else:
            self.runner.release(command.graph)
        return CaptureCost()
