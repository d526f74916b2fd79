"""Models are loaded by name from a local hub. No test uses a network outside this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import make_config
from dist_aclgraph.errors import MissingPackageError
from dist_aclgraph.files.hub import with_local_model
from tests.unit.hub_server import TOKEN, Hub, running

NAME = "private/tiny"
WEIGHTS = "model-00001-of-00001.safetensors"
FILES = {
    "config.json": b'{"model": 1}',
    "tokenizer.json": b'{"tokens": 1}',
    "tiktoken.model": b"YQ== 0",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"x",
    "additional_chat_templates/tool_use.jinja": b"y",
    WEIGHTS: b"weights" * 1000,
    "model.safetensors.index.json": b"{}",
    "1_Pooling/config.json": b'{"pooling": 1}',
    "2_Dense/model.safetensors": b"unused",
    "README.md": b"unused",
    "pytorch_model.bin": b"unused",
    "original/params.json": b"unused",
    "consolidated.safetensors": b"unused",
}
NEEDED = set(FILES) - {
    "README.md", "pytorch_model.bin", "original/params.json", "consolidated.safetensors",
    "2_Dense/model.safetensors",
}  # fmt: skip
# The hubs' client libraries read the environment when they are imported, so each environment needs
# a new process.
CODE = """
import json, sys
from dist_aclgraph.config import make_config
from dist_aclgraph.errors import ModelError
from dist_aclgraph.files.hub import with_local_model
found = []
for keys, weights in json.loads(sys.argv[1]):
    try:
        config = with_local_model(make_config(keys), weights=weights)
        found.append([config.model, config.name])
    except ModelError as e:
        found.append(str(e))
print(json.dumps(found))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    gguf = {"model.Q4.gguf": b"GGUF", "README.md": b""}
    described = {**gguf, "config.json": b"{}"}
    with running(Hub({NAME: FILES, "maker/gguf": gguf, "maker/described": described})) as hub:
        yield hub


def load(hub: Hub, home: Path, *asked: tuple[dict[str, Any], bool], **variables: str) -> list[Any]:
    """Load models in a new process; return, for each, its directory and name, or its error."""
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "MODELSCOPE_CACHE": str(home),
        "MODELSCOPE_HOME": str(home),
        "MODELSCOPE_ENDPOINT": hub.address,
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(asked)],
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def files_in(directory: str) -> set[str]:
    """Return the paths of all files in ``directory``, relative to it."""
    found = [path for path in Path(directory).rglob("*") if not path.is_dir()]
    return {str(path.relative_to(directory)) for path in found}


def test_a_name_loads_the_files_that_are_needed_once(hub: Hub, tmp_path: Path) -> None:
    plain, tagged = {"model": NAME}, {"model": NAME, "revision": "v1", "served_model_name": "own"}

    described, whole, named = load(
        hub, tmp_path, (plain, False), (plain, True), (tagged, True), HF_TOKEN=TOKEN
    )
    offline, absent = load(
        hub, tmp_path, (plain, True), ({"model": "maker/absent"}, True), HF_HUB_OFFLINE="1"
    )

    assert described == whole == offline
    directory, name = whole
    assert name == NAME and named == [directory, "own"]
    assert files_in(directory) == NEEDED
    assert sorted(hub.loaded) == sorted(NEEDED) and hub.loaded[-1] == WEIGHTS
    assert re.search("gives no revision main of it: .*HF_HUB_OFFLINE=0", absent)


def test_a_model_that_the_hub_does_not_give_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    errors = load(
        hub,
        tmp_path,
        ({"model": "maker/absent"}, True),
        ({"model": "maker/gguf", "revision": "v9"}, True),
        ({"model": "maker/gguf"}, True),
        ({"model": "maker/described"}, True),
        ({"model": NAME}, True),
    )

    said = [
        "no such directory, and huggingface gives no revision main of it: RepositoryNotFound",
        "no revision v9 of it: RevisionNotFoundError",
        "has no config.json: .* no GGUF files",
        r"has no \*.safetensors: .* no GGUF files",
        "GatedRepoError",
    ]
    for error, words in zip(errors, said, strict=True):
        assert re.search(words, error), error
        assert "\n" not in error


@pytest.mark.parametrize("model", ["a/b/c", "tiny", "./tiny/model", "/tiny/model"])
def test_a_path_is_no_name(model: str) -> None:
    config = make_config({"model": model})

    assert with_local_model(config) is config


def test_a_directory_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert with_local_model(make_config({"model": NAME})).model == NAME


HAS_MODELSCOPE = find_spec("modelscope") is not None


@pytest.mark.skipif(HAS_MODELSCOPE, reason="modelscope is installed")
def test_modelscope_needs_its_extra() -> None:
    config = make_config({"model": NAME, "hub": "modelscope"})

    with pytest.raises(MissingPackageError, match=r"pip install 'dist-aclgraph\[modelscope\]'"):
        with_local_model(config)


@pytest.mark.skipif(not HAS_MODELSCOPE, reason="modelscope is not installed")
def test_modelscope_gives_the_same_files(hub: Hub, tmp_path: Path) -> None:
    keys = {"model": NAME, "hub": "modelscope"}

    described, whole, absent, other = load(
        hub,
        tmp_path,
        (keys, False),
        (keys, True),
        (keys | {"model": "maker/absent"}, True),
        (keys | {"revision": "v9"}, True),
        MODELSCOPE_API_TOKEN=TOKEN,
    )
    closed = Hub({}, address="http://127.0.0.1:9")
    (kept,) = load(closed, tmp_path, (keys, True))

    assert described == whole == kept
    directory, name = whole
    assert name == NAME
    assert files_in(directory) == NEEDED
    assert sorted(hub.loaded) == sorted(NEEDED) and hub.loaded[-1] == WEIGHTS
    assert "modelscope gives no revision master of it: " in absent
    assert "modelscope gives no revision v9 of it: " in other
