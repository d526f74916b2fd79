"""The purpose of a model (to generate text, to compute embeddings, or to score relevance), read
from the files of its checkpoint.

Models for embeddings have the files of sentence-transformers. modules.json lists the steps from a
text to its embedding. The folder of the pooling step describes the tokens from which the embedding
is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ModelError, UnsupportedModelError
from dist_aclgraph.shapes.json_files import read_json_object, read_json_objects
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.weight_files import is_headless, tensor_files

Task = Literal["generate", "embed", "rerank"]
TASKS: tuple[Task, ...] = ("generate", "embed", "rerank")
MODULES = "modules.json"
POOLING_PREFIX = "pooling_mode_"


@dataclass(frozen=True)
class ModelTask:
    """The purpose of a model, and the properties of its embeddings.

    Attributes:
        normalizes: whether embeddings are scaled to a Euclidean norm of 1.
        hidden_size: number of elements of an embedding.
    """

    name: Task
    normalizes: bool
    hidden_size: int


def read_task(config: Config) -> ModelTask:
    """Return the task of the configured model.

    Raises:
        ModelError: a file of the checkpoint cannot be read.
        UnsupportedModelError: the model's way to make embeddings is not supported, or the task
            needs an output head that the model does not have.
    """
    directory = Path(config.model)
    model = read_model_config(directory, config.model_overrides)
    hidden_size = model.integer("hidden_size")
    steps = _read_steps(directory)
    usual: Task = "embed" if "Pooling" in steps else "generate"
    name = usual if config.task == "auto" else config.task
    if name != "embed":
        is_tied = model.flag("tie_word_embeddings", False)
        if config.weights == "checkpoint" and not is_tied and is_headless(tensor_files(directory)):
            raise UnsupportedModelError(
                f"task is {name}, but {directory} has no output head: set task=embed"
            )
        return ModelTask(name, False, hidden_size)
    if "Pooling" not in steps:
        return ModelTask(name, True, hidden_size)
    if list(steps) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{directory / MODULES} has the steps {', '.join(steps):.200}; embeddings are made by "
            "Transformer, Pooling and Normalize only"
        )
    _check_pooling(directory / steps["Pooling"] / "config.json")
    return ModelTask(name, "Normalize" in steps, hidden_size)


def _read_steps(directory: Path) -> dict[str, str]:
    """Return a mapping from the class name of each step to the step's folder; empty if there is no
    modules.json.

    Raises:
        ModelError: modules.json cannot be read, or names a folder outside the checkpoint.
    """
    path = directory / MODULES
    if not path.exists():
        return {}
    found = {}
    for module in read_json_objects(path):
        kind, folder = module.get("type"), module.get("path")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise ModelError(f"{path} has a module without a type and a path")
        if folder and Path(folder).name != folder:
            raise ModelError(f"{path} names a folder outside the directory: {folder!r:.200}")
        found[kind.rpartition(".")[2]] = folder
    return found


def _check_pooling(path: Path) -> None:
    pooling = read_json_object(path)
    modes = _pooling_modes(pooling)
    if modes != ["lasttoken"]:
        raise UnsupportedModelError(
            f"{path} pools by {', '.join(modes) or 'nothing':.200}; only lasttoken is supported"
        )


def _pooling_modes(pooling: Mapping[str, Any]) -> list[str]:
    """Return the names of the enabled pooling modes.

    Older files have one boolean key for each mode; newer files have one key with the names.
    """
    if (named := pooling.get("pooling_mode")) is not None:
        return [str(mode) for mode in (named if isinstance(named, list) else [named])]
    return [
        key.removeprefix(POOLING_PREFIX)
        for key, value in pooling.items()
        if key.startswith(POOLING_PREFIX) and value is True
    ]
