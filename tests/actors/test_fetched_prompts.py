"""A group continues prompts that a group on another node has computed. The nodes share no files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from dist_aclgraph.config import Config
from dist_aclgraph.kv.tiers import CachePlace, KVTiers, cache_identity
from dist_aclgraph.planning.planner import Planner
from tests.actors.kv_sockets import LOOPBACK
from tests.actors.leftovers import wait_until
from tests.actors.serving_ranks import NODE, TOKEN, WAIT_S, ServingRanks, serving_ranks
from tests.checkpoints import make_prompts, make_reference
from tests.deployments import Answer, greedy_params, make_deployment_config, tokens_of
from tests.slow import rare

PROMPTS, OTHERS = make_prompts([100, 65, 180, 97]), make_prompts([97, 180, 66, 99], seed=1)
BLOCK, TOKENS, ANSWER_S = 16, 24, 240.0
NUM_FULL = sum(len(prompt) // BLOCK for prompt in PROMPTS)
PREFILL, DECODE = "0", "1"


def configure(checkpoint: Path, folder: Path, tp: int) -> Config:
    folder.mkdir()
    kv = {"num_blocks": 128, "block_size": BLOCK, "host_path": str(folder), "host_gib": 0.1}
    return make_deployment_config(checkpoint, kv=kv, parallel={"tp": tp})


@dataclass
class Pair:
    """A group that computes prompts, and a group that continues them on another node.

    Attributes:
        wanted: the tokens of all prompts, as the first group alone computes them.
    """

    prefill: ServingRanks
    decode: ServingRanks
    server: BlockServer
    fetches: BlockFetches
    client: EngineClient
    wanted: list[list[int]]

    def answer(self, prefix: str, prompts: Sequence[list[int]]) -> list[list[int]]:
        answers = [Answer() for _ in prompts]
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            params = greedy_params(TOKENS)
            self.client.submit(f"{prefix}{index}", prompt, params, [], answer.take)
        return tokens_of(ANSWER_S, answers)

    def copied(self, group: str) -> dict[str, int]:
        blocks: dict[str, int] = self.client.query("metrics")[group]["kv_copied_blocks"]
        return blocks


@contextmanager
def serving_pair(checkpoint: Path, folder: Path, prefill_tp: int = 1) -> Iterator[Pair]:
    there = configure(checkpoint, folder / "there", prefill_tp)
    here = configure(checkpoint, folder / "here", 1)
    place = CachePlace.of(there, Planner.from_config(there).facts)
    assert place is not None
    with ExitStack() as stack:
        fetches = BlockFetches(here, "another node", TOKEN)
        stack.callback(fetches.close)
        prefill = stack.enter_context(serving_ranks(there, folder / "there"))
        decode = stack.enter_context(serving_ranks(here, folder / "here", fetches))
        answers = [
            prefill.submit(f"alone{index}", prompt, greedy_params(TOKENS))
            for index, prompt in enumerate([*PROMPTS, *OTHERS])
        ]
        wanted = tokens_of(ANSWER_S, answers)
        at = Place(NODE, str(folder), LOOPBACK)
        server = BlockServer(at, TOKEN, tiers_of(there, place))
        stack.callback(server.close)
        source = BlockSource(server.address, cache_identity(there), place)
        first = GroupEntry(PREFILL, prefill.address, 128, BLOCK, prefill_from=64, blocks=source)
        groups = GroupList(1, (first, GroupEntry(DECODE, decode.address, 128, BLOCK)))
        for service in (prefill, decode):
            service.loop.set_groups(groups)
        client = EngineClient([prefill.address, decode.address], TOKEN, node_id=NODE, link_s=WAIT_S)
        stack.callback(client.close)
        wait_until(lambda: client.capacity().prefill == 1, "no roles are known")
        wait_until(lambda: len(client.query("metrics")) == 2, "an engine is silent")
        yield Pair(prefill, decode, server, fetches, client, wanted)


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

        # The source sends half of the blocks of other prompts, and is then silent.
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
