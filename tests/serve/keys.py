"""Files of API keys for tests."""

from __future__ import annotations

import os
from pathlib import Path


def write_keys(path: Path, text: str) -> Path:
    """Replace a keys file in one step, by a file that only this user may read; return its path."""
    new = path.with_name(f"{path.name}.new")
    new.touch(0o600)
    new.write_text(text)
    os.replace(new, path)
    return path
