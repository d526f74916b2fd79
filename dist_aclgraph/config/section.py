"""The base class of every section of the configuration."""

from __future__ import annotations

from typing import Any

import pydantic


class Section(pydantic.BaseModel):
    """A part of the configuration. It is immutable, and refuses unknown keys."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_keys(cls, value: Any) -> Any:
        """Replace null by an empty section. YAML returns null for a section that contains only
        comments.
        """
        return {} if value is None else value
