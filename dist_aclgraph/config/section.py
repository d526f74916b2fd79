"""The base class of every section of the configuration."""

from __future__ import annotations

import pydantic


class Section(pydantic.BaseModel):
    """A part of the configuration. It is immutable, and refuses unknown keys."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )
