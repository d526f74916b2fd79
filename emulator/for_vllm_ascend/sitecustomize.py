"""Replaces packages that vllm-ascend imports, but that a machine with an emulated NPU does not
have. If this folder is on PYTHONPATH, Python imports this file when it starts (``make
test-vllm-ascend``).

vllm-ascend imports pyACL, a part of CANN, for its sleep mode. It also imports models for images.
The processors of these models need torchvision. Models for text use neither pyACL nor torchvision,
so mocks replace both.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

MOCKED = ("acl", "torchvision")


class Mocks(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        is_mocked = fullname.partition(".")[0] in MOCKED
        return ModuleSpec(fullname, self, is_package=True) if is_mocked else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Mocks())


def register() -> None:
    """Change three parts of vllm-ascend. The function runs in each process that loads vllm-ascend's
    plugins.

    The function tries to import vllm-ascend's own kernels before the model is compiled. This import
    fails, because the kernels are not built. The warm-up of ATB does nothing, because ATB's
    operators are not emulated and not needed. The slots of tokens are computed by torch, because
    triton is not installed.
    """
    import torch_npu
    from torch_npu.op_plugin.atb import _atb_ops
    from vllm_ascend.utils import enable_custom_op  # type: ignore[import-not-found]
    from vllm_ascend.worker import block_table  # type: ignore[import-not-found]

    enable_custom_op()
    _atb_ops._register_atb_extensions()
    torch_npu._npu_matmul_add_fp32 = lambda *_: None
    block_table.BlockTable.compute_slot_mapping = compute_slot_mapping


def compute_slot_mapping(table: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
    """Write the slot of each token, and -1 for slots after the last request."""
    import torch

    tokens = torch.arange(positions.shape[0], device=positions.device)
    ends = query_start_loc[1 : num_reqs + 1].long()
    rows = torch.searchsorted(ends, tokens, right=True)
    blocks = table.block_table.gpu[rows.clamp(max=num_reqs - 1), positions // table.block_size]
    slots = blocks * table.block_size + positions % table.block_size
    table.slot_mapping.gpu.fill_(-1)
    table.slot_mapping.gpu[: len(tokens)] = torch.where(rows < num_reqs, slots, -1)
