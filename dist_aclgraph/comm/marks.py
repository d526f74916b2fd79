"""Marks that show which collective a rank's device has reached.

Each collective has a place (pass, layer and part), and each place has a code. Before a collective,
the device copies the code of its place to memory of the host. A captured graph contains these
copies; at a replay, the host launches no copies. A thread of the host can read the last copied code
even while another thread waits for the device.
"""

from __future__ import annotations

import torch

from dist_aclgraph.comm.collective_place import (
    BEFORE,
    EMBEDDING,
    NUM_CODES_OF_PASS,
    NUM_STEPS,
    CollectivePlace,
    Kind,
)
from dist_aclgraph.device.npu import Npu, translated


class CollectiveMarks:
    """A base class that records no marks. The subclass ``DeviceMarks`` records marks; it is used if
    ``logging.record_collectives`` is true.
    """

    def begin_step(self, step: int) -> None:
        """Queue a mark behind all work that is already queued. The mark says that the device begins
        this step.
        """

    def begin_pass(self, first_layer: int) -> None:
        """Set the pass to which the next collectives belong. If ``first_layer`` is 0, a pass
        through the decoder's layers begins. Otherwise the next pass through the next-token module
        begins.
        """

    def enter(self, layer: int, part: int) -> None:
        """Set the layer and the part of the layer to which the next collectives belong; see
        ``CollectivePlace``.
        """

    def before(self, kind: Kind) -> None:
        """Queue a mark behind all work that is already queued. The mark says that the device begins
        a collective.
        """

    def read(self) -> tuple[int, int] | None:
        """Return the last step that the device has begun, modulo ``NUM_STEPS``, and the code of the
        last collective of this step. The code is 0 before the step's first collective. Return None
        if no marks are recorded. Any thread may call this method.
        """
        return None


NO_MARKS = CollectiveMarks()


class DeviceMarks(CollectiveMarks):
    """Owns the codes of the places on the device, and the pinned memory to which the device copies
    a code.

    Args:
        num_passes: maximum number of passes of a step: one for the decoder, and one for each draft.
    """

    def __init__(self, npu: Npu, num_passes: int) -> None:
        ints = {"dtype": torch.int32, "device": npu.device}
        self._steps = torch.zeros((NUM_STEPS, 2), **ints)  # type: ignore[call-overload]
        self._steps[:, 0] = torch.arange(1, NUM_STEPS + 1, **ints)  # type: ignore[call-overload]
        self._codes = torch.arange(num_passes * NUM_CODES_OF_PASS, **ints)  # type: ignore[call-overload]
        self._landing = npu.pinned((2,), torch.int32)
        self._seen = self._landing.numpy()
        self._draft_pass, self._layer, self._part, self._number = 0, EMBEDDING, BEFORE, 0

    def begin_step(self, step: int) -> None:
        with translated("marking the begin of a step"):
            self._landing.copy_(self._steps[step % NUM_STEPS], non_blocking=True)

    def begin_pass(self, first_layer: int) -> None:
        self._draft_pass = self._draft_pass + 1 if first_layer else 0
        self.enter(EMBEDDING, BEFORE)

    def enter(self, layer: int, part: int) -> None:
        self._layer, self._part, self._number = layer, part, 0

    def before(self, kind: Kind) -> None:
        place = CollectivePlace(self._draft_pass, self._layer, self._part, self._number, kind)
        self._number += 1
        code = min(place.code, len(self._codes) - 1)
        self._landing[1:].copy_(self._codes[code : code + 1], non_blocking=True)

    def read(self) -> tuple[int, int] | None:
        step, code = self._seen.tolist()
        return (step - 1, code) if step else None
