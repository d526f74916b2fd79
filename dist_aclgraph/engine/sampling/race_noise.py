"""Random numbers for the exponential race with which a token is sampled (ADR 13).

Each number is a function of (seed, position, token).

So the numbers are the same on every rank, in any batch and after a retry. The host sends one key
for each token that must be sampled. From this key, the device computes the numbers of all tokens of
the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.engine.sampling.token_counts import ToDevice

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_TABLE_SEED = 0x5EED
_SMALLEST = 2.0**-32
# This factor keeps the uniform random number u below 1, because the result for u = 1 would be
# infinite (``log_exponentials``).
_LESS_THAN_ONE = 1 - 2.0**-23


def mix_seeds(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the mixed seeds of rows, [n], for ``make_keys``.

    The function is SplitMix64's finaliser (Steele, Lea and Flood, 2014).
    """
    return _finalise(seeds.astype(np.uint64) + _GOLDEN)


def make_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return one key for each pair of a mixed seed and a position. The keys are uniformly
    distributed over 32 bits.

    The finaliser's input is the XOR of the mixed seed and a number computed from the position. A
    key is the upper half of the finaliser's result.
    """
    mixed = _finalise(seeds ^ (positions.astype(np.uint64) * _GOLDEN + _GOLDEN))
    return (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


class RaceNoise:
    """Owns a random factor and a random summand for each token, int32 [vocab] each. Factors and
    summands do not depend on seeds.

    A key (``make_keys``) is hashed for each token in two steps: first h = key * factor + summand,
    then h * (2h + 1). Both steps are modulo 2^32, because products and sums of int32 wrap. The
    second step is the permutation of RC6 (Rivest, Robshaw, Sidney, Yin, 1998). Without this step,
    every hash would be a linear function of the key.
    """

    def __init__(self, vocab_size: int, to_device: ToDevice) -> None:
        chance = np.random.Generator(np.random.PCG64(_TABLE_SEED))
        table = chance.integers(-(1 << 31), 1 << 31, (2, vocab_size)).astype(np.int32)
        table[0] |= 1  # with an odd factor, different keys have different products
        self._factors, self._summands = map(to_device, table)
        self._largest = to_device(np.array([-_SMALLEST], np.float32))  # greatest -u

    def log_exponentials(self, keys: Tensor) -> Tensor:
        """Return [n, vocab] float32: logarithms of random numbers with exponential distribution.

        The token with the largest difference ``logit - number`` wins the race. The probability that
        a token wins is its softmax probability.

        Args:
            keys: [n, 1] int32.
        """
        h = torch.addcmul(self._summands, keys, self._factors)
        h = h.addcmul(h, h, value=2).bitwise_and_(0x7FFFFFFF)
        # u is uniformly distributed, and the result is log(-log(1 - u)). The token with the
        # smallest result wins the race, so small results need the best resolution. With this
        # formula, small results have u near 0. Near 0, neighbouring values of u differ by 2^-31;
        # near 1, they differ by 2^-24. One operator converts the integers, multiplies and adds.
        minus_u = torch.add(self._largest, h, alpha=-_LESS_THAN_ONE / (1 << 31))
        return minus_u.log1p_().neg_().log_()
