"""A group generates tokens for prompts that a group on another node has computed. The nodes share
no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.wire import block_fetches
from dist_aclgraph.actors.wire.addresses import Place
from dist_aclgraph.actors.wire.block_fetches import BlockFetches
from dist_aclgraph.actors.wire.block_server import BlockServer, BlockSource, tiers_of
from dist_aclgraph.actors.wire.messages import GroupEntry, GroupList
from dist_aclgraph.actors.wire.peers import PeersKey, open_server
from dist_aclgraph.config import Config
from dist_aclgraph.kv.group_files import GroupFiles
from dist_aclgraph.kv.tiers import KVTiers, cache_identity
from dist_aclgraph.planning.planner import Planner
from tests.actors.kv_sockets import LOOPBACK
from tests.actors.leftovers import wait_until
from tests.actors.serving_ranks import NODE, TOKEN, WAIT_S, ServingRanks, serving_ranks
from tests.checkpoints import add_next_token_module, make_prompts, make_reference
from tests.deployments import Answer, greedy_params, make_deployment_config, tokens_of
from tests.lockstep import lockstep
from tests.slow import rare

PROMPTS, OTHERS = make_prompts([100, 65, 180, 97]), make_prompts([97, 180, 66, 99], seed=1)
BLOCK, TOKENS, ANSWER_S = 16, 24, 240.0
NUM_FULL = sum(len(prompt) // BLOCK for prompt in PROMPTS)
PREFILL, DECODE = "0", "1"


def configure(
    checkpoint: Path, folder: Path, tp: int, dcp: int, secret: str | None, drafts: int
) -> Config:
    folder.mkdir(exist_ok=True)
    kv = {
        "num_blocks": 128, "block_size": BLOCK, "host_path": str(folder), "host_gib": 0.1,
        "peers_key_file": secret,
    }  # fmt: skip
    return make_deployment_config(
        checkpoint,
        kv=kv,
        parallel={"tp": tp, "dcp": dcp},
        speculative={"num_tokens": drafts},
    )


@dataclass
class Pair:
    """A group that computes prompts, and a group on another node that generates the answers.

    Attributes:
        wanted: the output tokens of all prompts, computed by the first group alone.
        peer: the first group, if it belongs to another service.
    """

    prefill: ServingRanks
    decode: ServingRanks
    server: BlockServer
    fetches: BlockFetches
    client: EngineClient
    wanted: list[list[int]]
    peer: BlockSource | None

    def answer(self, prefix: str, prompts: Sequence[list[int]]) -> list[list[int]]:
        answers = [Answer() for _ in prompts]
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            params = greedy_params(TOKENS)
            self.client.submit(f"{prefix}{index}", prompt, params, [], answer.take, peer=self.peer)
        return tokens_of(ANSWER_S, answers)

    def copied(self, group: str) -> dict[str, int]:
        blocks: dict[str, int] = self.client.query("metrics")[group]["kv_copied_blocks"]
        return blocks


def files_of(config: Config, nodes: Mapping[str, Config]) -> GroupFiles:
    ranks_per_node = config.parallel.world_size // len(nodes)
    node_ids = [node_id for node_id in nodes for _ in range(ranks_per_node)]
    files = GroupFiles.of(config, Planner.from_config(config).facts, node_ids)
    assert files is not None
    return files


@contextmanager
def serving_pair(
    checkpoint: Path,
    folder: Path,
    prefill_tp: int = 1,
    nodes: tuple[int, int] = (1, 1),
    dcp: tuple[int, int] = (1, 1),
    secret: str | None = None,
    drafts: int = 0,
) -> Iterator[Pair]:
    """Args:
    prefill_tp: number of ranks of the first group. The second group has one rank on each node.
    nodes: numbers of nodes of the first and of the second group.
    dcp: numbers of shards of a request's cache in the first and in the second group.
    secret: file with a secret that both groups know. If it is given, the groups belong to different
        services.
    """
    from_nodes, to_nodes = (
        {
            f"{name}{n}": configure(checkpoint, folder / f"{name}{n}", tp, shards, secret, drafts)
            for n in range(count)
        }
        for name, tp, count, shards in (
            ("there", prefill_tp, nodes[0], dcp[0]),
            ("here", nodes[1], nodes[1], dcp[1]),
        )
    )
    there, here = from_nodes["there0"], to_nodes["here0"]
    from_files = files_of(there, from_nodes)
    with ExitStack() as stack:
        places = files_of(here, to_nodes).places_beside(0)
        fetches = BlockFetches(here, "here0", TOKEN, places)
        stack.callback(fetches.close)
        prefill = stack.enter_context(serving_ranks(there, folder / "there0", nodes=from_nodes))
        decode = stack.enter_context(serving_ranks(here, folder / "here0", fetches, to_nodes))
        answers = [
            prefill.submit(f"alone{index}", prompt, greedy_params(TOKENS))
            for index, prompt in enumerate([*PROMPTS, *OTHERS])
        ]
        wanted = tokens_of(ANSWER_S, answers)
        at, place = Place("there0", str(folder), LOOPBACK), from_files.places[0]
        server = open_server(there, at, TOKEN, tiers_of(there, place))
        stack.callback(server.close)
        addresses = (server.address, *prefill.servers)
        source = BlockSource(addresses, cache_identity(there), place, from_files.holders)
        if (key := PeersKey.read(there)) is not None:
            client = EngineClient([decode.address], TOKEN, node_id=NODE, link_s=WAIT_S)
            stack.callback(client.close)
            offer = key.offer(source, 0.0)
            assert offer is not None
            yield Pair(prefill, decode, server, fetches, client, wanted, key.open(offer, 0.0))
            return
        first = GroupEntry(PREFILL, prefill.address, 128, BLOCK, prefill_from=64, blocks=source)
        groups = GroupList(1, (first, GroupEntry(DECODE, decode.address, 128, BLOCK)))
        for service in (prefill, decode):
            service.loop.set_groups(groups)
        client = EngineClient([prefill.address, decode.address], TOKEN, node_id=NODE, link_s=WAIT_S)
        stack.callback(client.close)
        wait_until(lambda: client.capacity().prefill == 1, "no roles are known")
        wait_until(lambda: len(client.query("metrics")) == 2, "an engine is silent")
        yield Pair(prefill, decode, server, fetches, client, wanted, None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fetched_prompts_are_continued_and_a_lost_source_costs_time_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_pair(checkpoint, tmp_path) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        loaded = pair.copied(DECODE)
        assert (loaded["loaded"], loaded["missed"]) == (NUM_FULL, 0)
        assert pair.fetches.counts.blocks == NUM_FULL

        # For new prompts, the source sends half of the blocks, and then stops answering.
        left = iter(range(NUM_FULL // 2))
        send = KVTiers.file_bytes

        def send_some(tiers: KVTiers, name: bytes, max_bytes: int) -> bytes:
            if next(left, None) is None:
                pair.server._is_closing = True
                return b""
            return send(tiers, name, max_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(block_fetches, "SILENCE_S", 5.0)
            patch.setattr(KVTiers, "file_bytes", send_some)
            assert pair.answer("struck", OTHERS) == pair.wanted[len(PROMPTS) :]
        assert NUM_FULL < pair.fetches.counts.blocks <= NUM_FULL + NUM_FULL // 2


@pytest.mark.parametrize(
    ("architecture", "prefill_tp"),
    [rare("Qwen3ForCausalLM", 2), rare("Qwen3NextForCausalLM", 1)],
)
@pytest.mark.timeout(900)
def test_other_divisions_of_heads_and_recurrent_states_are_fetched(
    npu: Any, tmp_path: Path, architecture: str, prefill_tp: int
) -> None:
    checkpoint = tmp_path / "checkpoint"
    make_reference(architecture, checkpoint)
    with serving_pair(checkpoint, tmp_path, prefill_tp) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        counts = pair.copied(DECODE)
        assert counts["loaded"] > 0 and counts["missed"] == 0
        assert pair.fetches.counts.blocks == NUM_FULL


@pytest.mark.parametrize(
    ("architecture", "shards"), [rare("DeepseekV3ForCausalLM", 2), rare("Qwen3NextForCausalLM", 1)]
)
@pytest.mark.timeout(900)
def test_prompts_are_computed_if_no_file_of_the_first_group_can_be_used(
    npu: Any, tmp_path: Path, architecture: str, shards: int
) -> None:
    """The two groups divide caches into different numbers of shards, or the first group divides
    recurrent states between ranks.
    """
    make_reference(architecture, tmp_path / "checkpoint")
    with serving_pair(tmp_path / "checkpoint", tmp_path, 2, dcp=(shards, 1)) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        counts = pair.copied(DECODE)
        assert (counts["loaded"], counts["missed"]) == (0, 0)
        assert (pair.fetches.counts.blocks, pair.fetches.counts.failures) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("prefill_tp", "nodes"),
    [(2, (2, 2)), rare(1, (1, 2)), rare(2, (1, 2)), rare(2, (2, 1))],
    ids=str,
)
def test_groups_on_several_nodes_fetch_from_each_other(
    checkpoint: Path, tmp_path: Path, prefill_tp: int, nodes: tuple[int, int]
) -> None:
    """Each node has its own files. The engine cannot look up the files of other nodes itself."""
    with serving_pair(checkpoint, tmp_path, prefill_tp, nodes) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        counts = pair.copied(DECODE)
        assert (counts["loaded"], counts["missed"]) == (NUM_FULL, 0)
        assert pair.fetches.counts.failures == 0
        metrics = pair.client.query("metrics")[DECODE]
        assert (metrics["kv_failed_fetches"], metrics["kv_fetched_bytes"] > 0) == (0, nodes[1] > 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_service_on_two_nodes_fetches_from_the_two_nodes_of_another_service(
    checkpoint: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "key"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef" * 4)
    with serving_pair(checkpoint, tmp_path, 2, (2, 2), secret=str(secret)) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        (metrics,) = pair.client.query("metrics").values()
        counts = metrics["kv_copied_blocks"]
        assert (counts["loaded"], counts["missed"]) == (NUM_FULL, 0)
        assert (metrics["kv_failed_fetches"], metrics["kv_fetched_bytes"] > 0) == (0, True)
        assert (pair.fetches.counts.failures, pair.fetches.counts.blocks) == (0, NUM_FULL)


@pytest.mark.parametrize(
    ("architecture", "dcp", "drafts"),
    [
        rare("DeepseekV3ForCausalLM", 2, 0),
        rare("DeepseekV3ForCausalLM", 1, 2),
        rare("Qwen3NextForCausalLM", 1, 1),
    ],
)
@pytest.mark.timeout(900)
def test_shards_latents_and_recurrent_states_are_fetched_between_several_nodes(
    npu: Any, tmp_path: Path, architecture: str, dcp: int, drafts: int
) -> None:
    checkpoint, shards = tmp_path / "checkpoint", (dcp, dcp)
    make_reference(architecture, checkpoint)
    if drafts:
        add_next_token_module(checkpoint)
    with serving_pair(checkpoint, tmp_path, 2, (2, 2), shards, drafts=drafts) as pair:
        assert pair.answer("split", PROMPTS) == pair.wanted[: len(PROMPTS)]
        counts = pair.copied(DECODE)
        assert counts["loaded"] > 0 and counts["missed"] == 0
        assert pair.client.query("metrics")[DECODE]["kv_fetched_bytes"] > 0


def test_each_data_parallel_rank_finds_the_copies_of_its_node(npu: Any, tmp_path: Path) -> None:
    make_reference("DeepseekV3ForCausalLM", tmp_path / "checkpoint")
    kv = {"num_blocks": 128, "block_size": BLOCK, "host_gib": 0.1}
    nodes = {
        name: make_deployment_config(
            tmp_path / "checkpoint",
            kv={**kv, "host_path": str(tmp_path / name)},
            parallel={"dp": 2, "ep": 2},
        )
        for name in ("first", "second")
    }
    for name in nodes:
        (tmp_path / name).mkdir()
    with lockstep(nodes["first"], nodes) as group:
        answers = group.generate(PROMPTS, greedy_params(TOKENS))
        saved = [copies.counts.saved for copies in group.scheduler.copies.ranks]
        assert all(saved), "a rank has computed nothing"
        group.restart()
        again = group.generate(PROMPTS, greedy_params(TOKENS), "again")
        assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
        assert all(copies.counts.loaded for copies in group.scheduler.copies.ranks)
