"""Names of weights in checkpoints that store several matrices as one."""

from __future__ import annotations

from dataclasses import replace

from dist_aclgraph.shapes.model_spec import RowRange, WeightNames

QKV = (".q_proj.", ".k_proj.", ".v_proj.")
GATE_UP = (".gate_proj.", ".up_proj.")


def join_gate_up(names: WeightNames, width: int) -> WeightNames:
    return join(names, ".gate_up_proj.", GATE_UP, (width, width))


def join(
    names: WeightNames, stored: str, parts: tuple[str, ...], counts: tuple[int, ...]
) -> WeightNames:
    """Return names for a checkpoint that stores several tensors as one.

    Args:
        stored: a part of the name of the stored tensor.
        parts: parts of the usual names, in the order in which the stored tensor has their rows.
        counts: for each part, its number of rows in the stored tensor.
    """
    ranges = (
        RowRange(part, sum(counts[:index]), count, sum(counts))
        for index, (part, count) in enumerate(zip(parts, counts, strict=True))
    )
    return replace(
        names,
        changes=(*names.changes, *((part, stored) for part in parts)),
        ranges=(*names.ranges, *ranges),
    )
