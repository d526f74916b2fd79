"""The names and properties of the chips that plans support, and a function that compares CANN
versions.

A chip's memory size in this module is the total that torch reports. Driver and firmware use the
rest of the chip's memory.
Source: logs in public issues of vllm-ascend. In the logs, a die of 64 GB has at least
65,452,113,920 bytes (some dies have a few MiB more), and an Ascend910B4 has 29.50 GiB.
"""

from __future__ import annotations

import re
from typing import NamedTuple

DIE_64_GB_MB, DIE_32_GB_MB = 62_420, 30_208
NODE_NPUS = 8  # the number of devices that plans assume for a server with unknown chips


class ChipFamily(NamedTuple):
    """Chips whose names have the same prefix, and their common properties.

    Attributes:
        node_npus: number of devices of a usual server. An A3 has eight packages with two dies each.
    """

    prefix: str
    generation: str
    memory_mb: int
    node_npus: int


# A chip belongs to the first family in this list whose prefix matches the chip's name.
CHIP_FAMILIES = (
    ChipFamily("Ascend910B4-1", "A2", DIE_64_GB_MB, 8),
    ChipFamily("Ascend910B4", "A2", DIE_32_GB_MB, 8),
    ChipFamily("Ascend910B", "A2", DIE_64_GB_MB, 8),
    ChipFamily("Ascend910_93", "A3", DIE_64_GB_MB, 16),
)


def family_of(chip: str) -> ChipFamily | None:
    """Return the family of a chip, or None if the chip is unknown."""
    return next((family for family in CHIP_FAMILIES if chip.startswith(family.prefix)), None)


def generation_of(chip: str) -> str:
    """Return the generation of the chip with this name; for an unknown chip, return the name."""
    family = family_of(chip)
    return family.generation if family else chip


def is_cann_before(cann: str, *version: int) -> bool:
    """Return whether the CANN version ``cann`` is older than ``version``. An unknown version ("")
    counts as older: the stricter limits of older versions are safe for every version. A release
    candidate such as 8.5.RC1 is treated like 8.5.0, as in the emulator (``cann_before`` in
    ``target.h``).
    """
    numbers = re.match(r"([0-9]*)\.?([0-9]*)\.?([0-9]*)", cann)
    assert numbers is not None, "an empty text matches"
    return tuple(int(number or 0) for number in numbers.groups()) < version
