"""For the emulated NPU, our patch replaces functions of vllm-ascend. The new functions return the
right results.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

PATCH = Path(__file__).resolve().parents[3] / "emulator" / "for_vllm_ascend" / "sitecustomize.py"


def load_patch():
    """Import the patch, and return its module. Remove the import hook that the patch installs."""
    spec = importlib.util.spec_from_file_location("vllm_ascend_patch", PATCH)
    patch = importlib.util.module_from_spec(spec)
    hooks = list(sys.meta_path)
    spec.loader.exec_module(patch)
    sys.meta_path[:] = hooks
    return patch


def test_slots_are_places_in_the_blocks_of_their_requests():
    blocks = torch.tensor([[5, 2, 0], [7, 0, 0], [1, 3, 4]], dtype=torch.int32)
    table = SimpleNamespace(
        block_size=4,
        block_table=SimpleNamespace(gpu=blocks.npu()),
        slot_mapping=SimpleNamespace(gpu=torch.full((12,), 99, device="npu")),
    )
    starts = torch.tensor([0, 3, 4, 9, 0], dtype=torch.int32)
    positions = torch.tensor([3, 4, 5, 2, 0, 1, 2, 3, 9, 0])  # the last one is padding

    load_patch().compute_slot_mapping(table, 3, starts.npu(), positions.npu())

    want = [23, 8, 9, 30, 4, 5, 6, 7, 17, -1, -1, -1]
    assert table.slot_mapping.gpu.tolist() == want
