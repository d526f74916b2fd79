"""Latents in int8 in the KV cache: the size of a row, and the models that can have such a cache.

Each token's latent is quantised when it is written, and the operator reads the scales from the rows
of the cache. So no calibration is needed.
"""

from __future__ import annotations

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError

TILE = 128  # number of values that share a scale
ROPE_DIM = 64  # the operator accepts only this number of rotated elements
SCALE_BYTES = 4  # float32


def int8_row_bytes(latent_size: int, element_bytes: int) -> int:
    """Return the bytes of a token in one layer: values in int8, the rotated key, and the scales.

    Args:
        latent_size: number of elements of the latent and the rotated key together.
        element_bytes: bytes of an element of the rotated key.
    """
    values = latent_size - ROPE_DIM
    return values + ROPE_DIM * element_bytes + values // TILE * SCALE_BYTES


def check_kv_dtype(config: Config, *, is_latent: bool) -> None:
    """Refuse ``kv.dtype: int8`` if no operator of attention can read such a cache.

    Args:
        is_latent: whether the model has latent attention.

    Raises:
        ConfigError: the message has the reason and the key to change.
    """
    if config.kv.dtype != "int8":
        return
    if not is_latent:
        raise ConfigError(
            "kv.dtype is int8; only the latents of latent attention (DeepSeek, Kimi K2, GLM-5) are "
            "stored in int8: set kv.dtype=auto"
        )
    if config.parallel.dcp > 1:
        raise ConfigError(
            f"kv.dtype is int8 and parallel.dcp {config.parallel.dcp}; attention to latents in "
            "int8 gives no sums, which are needed to merge shards: set kv.dtype=auto, whose shards "
            "take less memory than int8 without parallel.dcp"
        )
