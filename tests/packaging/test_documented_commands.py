"""All keys and all names of configuration files are valid in the commands that comments and
documents show.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from dist_aclgraph.config import ServeConfig, load_config, parse_overrides
from dist_aclgraph.environment import API_KEY_VARIABLE
from dist_aclgraph.serve.http.access import read_access
from tests.serve.keys import write_keys

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("cluster", "configs", "docs", "examples")
KINDS = (".md", ".yaml", ".yml", ".sh", ".py")
MADE = "$(openssl rand -hex 16)"
KEY = re.compile(rf"{API_KEY_VARIABLE}=(\$\([^)]*\)|[^\s`\\]+)")
SERVE = re.compile(r"dist-aclgraph serve (configs/\S+\.yaml)((?: +[\w.]+=[^\s`]+)*)")
NO_WEIGHTS = ROOT / "configs" / "shapes"


def texts() -> list[str]:
    """Return the texts of all files that can contain commands. Lines that are continued with a
    backslash are joined.
    """
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [path for path in below if path.suffix in KINDS or path.name.startswith("Dockerfile")]
    return [re.sub(r" *\\\n#? *", " ", path.read_text()) for path in [ROOT / "README.md", *paths]]


def found(pattern: re.Pattern[str]) -> list[tuple[str, ...]]:
    return sorted({match.groups() for text in texts() for match in pattern.finditer(text)})


@pytest.mark.parametrize("key", [key for (key,) in found(KEY)])
def test_keys_are_long_enough(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, secrets.token_hex(16) if key == MADE else key)

    assert read_access(ServeConfig(), checks_host=True).keys


@pytest.mark.parametrize(("path", "arguments"), found(SERVE))
def test_served_configurations_have_weights_and_a_key(
    tmp_path: Path, path: str, arguments: str
) -> None:
    overrides = parse_overrides(arguments.split())
    if "serve.api_keys_file" in overrides:
        overrides["serve.api_keys_file"] = str(tmp_path / "keys")
        write_keys(tmp_path / "keys", secrets.token_hex(16))

    config = load_config(ROOT / path, overrides)

    read_access(config.serve, checks_host=True)
    assert NO_WEIGHTS not in Path(config.model).resolve().parents
    assert config.weights == "checkpoint"


def test_commands_are_found() -> None:
    assert found(KEY) and len(found(SERVE)) > 2
