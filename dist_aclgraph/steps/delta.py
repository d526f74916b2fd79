"""What a step brought to one request, as it travels from the engine to whoever asked."""

from __future__ import annotations

from typing import Literal

import msgspec

from dist_aclgraph.ints import unpack_ints
from dist_aclgraph.steps.step import RowLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step brought to one request. With ``finish_reason`` set it is the last one.

    A stop token, where one ended the request, is the last of ``token_ids``.
    """

    request_id: str
    token_ids: bytes = b""  # int32 [num_new_tokens]
    finish_reason: FinishReason | None = None
    logprobs: tuple[RowLogprobs | None, ...] = ()  # [num_new_tokens], or empty if not asked for
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str = ""  # one sentence, where finish_reason is "error"
    error_kind: str = ""  # class name from errors.py

    @property
    def tokens(self) -> list[int]:
        """The new tokens as numbers."""
        tokens: list[int] = unpack_ints(self.token_ids).tolist()
        return tokens
