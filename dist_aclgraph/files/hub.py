"""Finds models by their names on a hub: Hugging Face, a mirror of Hugging Face, or ModelScope.

The hubs' clients load files into their own caches, and read these environment variables:
HF_ENDPOINT (a mirror), HF_TOKEN, HF_HUB_OFFLINE and HF_HOME; MODELSCOPE_ENDPOINT,
MODELSCOPE_API_TOKEN and MODELSCOPE_CACHE.
"""

from __future__ import annotations

import re
from functools import partial
from os.path import exists
from pathlib import Path

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ONLY_SAFETENSORS, ModelError
from dist_aclgraph.extras import require

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DESCRIPTIONS = ("*.json", "*.jinja", "tiktoken.model", "tokenizer.model")
WEIGHTS = ("*.safetensors",)
MAIN_BRANCHES = {"huggingface": "main", "modelscope": "master"}
# Patterns of files that are not downloaded, for example weights in other formats.
# Two kinds of files in subfolders are downloaded: chat templates (additional_chat_templates), and
# the JSON files of an embedding model's modules. The name of a module's folder begins with a digit
# (1_Pooling).
UNUSED = ("[!0-9]*/*.json", "*/*.safetensors", "consolidated*")


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """Return the configuration with the directory of its model. If the model is on a hub, download
    the model first.

    A local directory at the path ``model`` has priority over a model of this name on the hub. The
    API's default name of a downloaded model is the name on the hub.

    Args:
        weights: whether the files of weights are downloaded.

    Raises:
        MissingPackageError: the client of ModelScope is not installed.
        ModelError: the model is not a checkpoint; or neither the hub nor the cache has its files.
    """
    name = config.model
    if exists(name) or not HUB_NAME.fullmatch(name):
        return config
    if config.hub == "modelscope":
        require("modelscope", "modelscope", "hub=modelscope")
        from modelscope.hub.snapshot_download import snapshot_download
    else:
        from huggingface_hub import snapshot_download
    needs_weights = weights and config.weights == "checkpoint"
    load = partial(
        snapshot_download,
        name,
        revision=config.revision,
        allow_patterns=[*DESCRIPTIONS, *(WEIGHTS if needs_weights else ())],
        ignore_patterns=list(UNUSED),
    )
    try:
        try:
            directory = Path(load())
        except ConnectionError:  # ModelScope's client does not search its cache by itself
            directory = Path(load(local_files_only=True))
    except Exception as e:  # an error of the hub's client, or of a library that the client uses
        reason = " ".join(str(e).split())
        revision = config.revision or MAIN_BRANCHES[config.hub]
        raise ModelError(
            f"model is {name!r}: there is no such directory, and {config.hub} gives no revision "
            f"{revision} of it: {type(e).__name__}: {reason:.400}"
        ) from e
    needed = ("config.json", *(WEIGHTS if needs_weights else ()))
    if lacking := [pattern for pattern in needed if not any(directory.glob(pattern))]:
        raise ModelError(
            f"{name} on {config.hub} has no {lacking[0]}: {ONLY_SAFETENSORS}, no GGUF files. "
            "If the hub was not reached, the cache is incomplete"
        )
    served_name = config.served_model_name or name
    return config.model_copy(update={"model": str(directory), "served_model_name": served_name})
