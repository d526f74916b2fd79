"""The tools of ``make test-vllm-ascend``, as far as they work without vLLM."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

from tools.test_vllm_ascend import LENGTHS, PATCH, differences, prompts, write_metadata


def test_prompts_have_tokens_of_the_tiny_model() -> None:
    assert [len(ids) for ids in prompts()] == list(LENGTHS)
    assert all(3 <= token < 832 for ids in prompts() for token in ids)


def test_plugins_of_a_work_tree_are_found(tmp_path: Path) -> None:
    write_metadata(tmp_path)

    found = importlib.metadata.distributions(path=[str(tmp_path)])

    points = {(p.group, p.value) for distribution in found for p in distribution.entry_points}
    assert ("vllm.platform_plugins", "vllm_ascend:register") in points
    assert ("vllm.general_plugins", "sitecustomize:register") in points


def test_outputs_that_differ_are_shown_with_their_prompt() -> None:
    want = [[1, 2]] * len(LENGTHS)
    assert differences(want, want) == []

    (line,) = differences([*want[:-1], [1, 3]], want)

    assert line == f"  prompt of {LENGTHS[-1]} tokens: vllm-ascend [1, 3], ours [1, 2]"


def test_the_patch_replaces_modules_that_are_only_imported() -> None:
    code = """
import importlib.util
from acl.rt import memcpy
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
import torchvision.io
assert importlib.util.find_spec("torchvision") and not importlib.util.find_spec("torchaudio_of_no")
assert InterpolationMode.BICUBIC
"""
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(PATCH)}, check=True, timeout=60
    )
