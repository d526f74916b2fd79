"""Files of API keys for tests."""

from __future__ import annotations

import os
from pathlib import Path


def write_keys(path: Path, text: str) -> Path:
    """Replace the file of API keys at ``path`` atomically; return its path. Only this user may read
    the new file.
    """
    new = path.with_name(f"{path.name}.new")
    new.touch(0o600)
    new.write_text(text)
    os.replace(new, path)
    return path
