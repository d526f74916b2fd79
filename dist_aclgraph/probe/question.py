"""A question to a device, and the emulator's answer.

This module does not import torch. The process that starts the questions' processes imports this
module, and must work even if CANN cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dist_aclgraph.config.chips import generation_of, is_cann_before

Level = Literal["quick", "full"]

ACCEPTED, REFUSED, MISSING, STOPPED = "accepted", "refused", "missing", "stopped the device"
EQUAL, DIFFERENT = "equal", "different"


@dataclass(frozen=True)
class Bench:
    """Helper objects and functions for the child process that runs one question.

    Attributes:
        torch: the package torch; None for questions that need no device.
        ops: the package torch_npu; None if ``torch`` is None.
        npu: the open device (``device.npu.Npu``); None if ``torch`` is None.
        rank: rank of this process in the HCCL world of the question.
        ranks: number of processes of the question, which form one HCCL world.
    """

    torch: Any = None
    ops: Any = None
    npu: Any = None
    rank: int = 0
    ranks: int = 1

    def compare(self, got: Any, want: Any, tolerance: float = 0.0) -> Answer:
        """Compare a device tensor with a host tensor.

        Args:
            tolerance: the largest allowed difference, divided by the root mean square of a row;
                with 0, the tensors must be equal.
        """
        found, right = got.cpu().double(), want.double()
        if found.shape != right.shape:
            return Answer(DIFFERENT, f"shape {tuple(found.shape)}, not {tuple(right.shape)}")
        if tolerance:
            size = right.square().mean(-1, keepdim=True).sqrt()
            size[size == 0] = 1
            found, right = found / size, right / size
        if self.torch.allclose(found, right, atol=tolerance, rtol=0.0, equal_nan=True):
            return Answer(EQUAL)
        largest = (found - right).abs().max().item()
        return Answer(DIFFERENT, f"largest difference {largest:.3g}, allowed {tolerance:g}")

    def to_fractal_nz(self, weights: Any) -> Any:
        """Return a device tensor of weights in the storage format FRACTAL_NZ."""
        # The next import loads torch; only a child process may do this.
        from dist_aclgraph.device.storage_formats import to_fractal_nz

        return to_fractal_nz(weights)

    def synchronize(self) -> None:
        """Wait for the device. This call raises errors of work that was launched before."""
        self.torch.npu.synchronize()


@dataclass(frozen=True)
class Answer:
    """The answer of a device, with additional details. Only the answer is compared."""

    found: str
    text: str = ""


@dataclass(frozen=True)
class Between:
    """The expected answer is a number between two limits."""

    low: float
    high: float
    unit: str

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} {self.unit}"


@dataclass(frozen=True)
class ByCann:
    """The expected answer depends on CANN's release.

    If set, ``cann_8_5_1`` replaces ``cann_8`` for CANN 8.5.1 and later releases of CANN 8.
    ``a2_cann_8`` and ``a2_cann_9`` replace the answers for an A2.
    """

    cann_8: str
    cann_9: str
    cann_8_5_1: str | None = None
    a2_cann_8: str | None = None
    a2_cann_9: str | None = None


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
        name: a unique name with a folder, such as operators.swiglu.
        call: a function that runs the question. If the result is a number, ``says`` must be a
            ``Between``. A RuntimeError means "refused", an AttributeError means "missing".
        says: the emulator's answer. None if the question is about the machine. The answer to such a
            question is reported, but not compared.
        level: "full" questions are asked only at this level. "quick" questions are asked at every
            level.
        limit_s: time limit of ``call``, in addition to the time for loading torch_npu.
        ranks: number of processes, each with its own NPU.
        needs_device: whether the process loads torch_npu and opens a device.
        task_queue: value of torch_npu's TASK_QUEUE_ENABLE. With 0, an operator's error contains the
            operator's name.
        setting: name of the emulator's setting that contains the answer to this question.
        rule: part of the emulator's error text. Set if the emulator refuses the call, and a device
            may accept the call.
        operator: the operator that an emulator with the device's rules refuses, if the device
            refuses the question's call.
    """

    name: str
    question: str
    call: Callable[[Bench], str | float | Answer]
    says: str | Between | ByCann | None
    level: Level = "full"
    limit_s: float = 60.0
    ranks: int = 1
    needs_device: bool = True
    task_queue: Literal[0, 1] = 0
    setting: str | None = None
    rule: str | None = None
    operator: str | None = None

    def expected(self, chip: str, cann: str) -> str | Between | None:
        """Return the emulator's answer. An unknown version of CANN counts as CANN 8, as
        in plans.
        """
        says = self.says
        if not isinstance(says, ByCann):
            return says
        is_a2 = generation_of(chip) == "A2"
        if not is_cann_before(cann, 9):
            return (is_a2 and says.a2_cann_9) or says.cann_9
        answer = says.cann_8 if is_cann_before(cann, 8, 5, 1) else says.cann_8_5_1 or says.cann_8
        return (is_a2 and says.a2_cann_8) or answer
