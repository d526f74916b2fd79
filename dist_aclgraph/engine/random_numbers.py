"""Random numbers as a function of (seed, position): the same on every device, batch and retry."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return one number in [0, 1) for each pair.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed and position in turn; 24 bits,
    because float32 holds no more.
    """
    with np.errstate(over="ignore"):
        mixed = _finalise(seeds.astype(np.uint64) + _GOLDEN)
        mixed = _finalise(mixed ^ (positions.astype(np.uint64) * _GOLDEN + _GOLDEN))
    return ((mixed >> np.uint64(40)).astype(np.float64) / (1 << 24)).astype(np.float32)


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
