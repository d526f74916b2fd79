"""A group reads the KV that a group with another layout has written to files, and gives the same
tokens. If the two layouts cannot share files, the reading group computes the prompts.

For each model, the tests try all pairs of a writing layout and a reading layout, including pairs of
equal layouts.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_aclgraph.config import Config
from dist_aclgraph.kv.tiers import host_root
from tests.checkpoints import add_next_token_module
from tests.deployments import greedy_params, make_deployment_config
from tests.lockstep import lockstep
from tests.parity.conftest import NUM_TOKENS
from tests.slow import rare, slow

BLOCK = 16
QWEN, V3, HYBRID = "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"


class Layout(NamedTuple):
    tp: int
    drafts: int = 0
    dcp: int = 1
    interleave: int = 1


LAYOUTS = {
    # The model has two key-value heads, so with four ranks, two ranks have the same head.
    QWEN: [Layout(1), Layout(2), Layout(4), Layout(4, dcp=2)],
    V3: [
        Layout(1),
        Layout(4),
        Layout(1, drafts=1),
        Layout(2, drafts=2),
        Layout(2, drafts=1, dcp=2),
        Layout(2, drafts=1, dcp=2, interleave=BLOCK),
    ],
    HYBRID: [Layout(1), Layout(2), Layout(1, drafts=2), Layout(2, drafts=1)],
}


def may_read(architecture: str, writer: Layout, reader: Layout) -> bool:
    """Whether ``docs/use/kv-copies.md`` says that groups with these layouts share files."""
    shards = [(each.dcp, each.interleave, each.drafts > 0) for each in (writer, reader)]
    return shards[0] == shards[1] and (architecture != HYBRID or writer.tp == reader.tp)


def configure(model: Path, layout: Layout, folder: Path) -> Config:
    folder.mkdir()
    return make_deployment_config(
        model,
        parallel={"tp": layout.tp, "dcp": layout.dcp, "cp_interleave": layout.interleave},
        speculative={"num_tokens": layout.drafts},
        kv={"block_size": BLOCK, "num_blocks": 256, "host_path": str(folder), "host_gib": 0.1},
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", [slow(QWEN), rare(V3), rare(HYBRID)])
def test_every_layout_reads_the_files_of_every_layout(
    references: Any, tmp_path: Path, architecture: str
) -> None:
    reference, model = references(architecture), tmp_path / "model"
    shutil.copytree(reference.directory, model)
    if architecture == HYBRID:
        add_next_token_module(model)
    layouts = LAYOUTS[architecture]
    with ExitStack() as stack:
        configs, groups = {}, {}
        for index, layout in enumerate(layouts):
            configs[layout] = configure(model, layout, tmp_path / str(index))
            groups[layout] = stack.enter_context(lockstep(configs[layout]))
        for layout, group in groups.items():
            answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
            assert [answer.tokens for answer in answers] == reference.tokens, layout
            shutil.copytree(host_root(configs[layout]), kept(configs[layout]))
        for writer, reader in product(layouts, layouts):
            files, group = host_root(configs[reader]), groups[reader]
            shutil.rmtree(files)
            shutil.copytree(kept(configs[writer]), files)
            group.restart()
            answers = group.generate(reference.prompts, greedy_params(NUM_TOKENS))
            counts = group.scheduler.copies.counts()
            assert [answer.tokens for answer in answers] == reference.tokens, (writer, reader)
            assert counts["missed"] == 0, (writer, reader)
            most = num_full_blocks(reader, reference.prompts)
            # There are fewer slots for checkpoints of states than KV blocks. So a checkpoint may be
            # overwritten before it is copied.
            least = 1 if architecture == HYBRID else most
            can_read = may_read(architecture, writer, reader)
            assert counts["loaded"] in (range(least, most + 1) if can_read else (0,)), (
                writer,
                reader,
                counts,
            )


def kept(config: Config) -> Path:
    """Return the folder with the files that a group wrote when it computed the prompts."""
    return Path(f"{config.kv.host_path}-kept")


def num_full_blocks(layout: Layout, prompts: list[list[int]]) -> int:
    return sum((len(prompt) - 1) // (BLOCK * layout.dcp) for prompt in prompts)
