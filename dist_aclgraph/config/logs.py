"""The configuration's keys of logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dist_aclgraph.config.section import Section


class LoggingConfig(Section):
    """The logs of all processes of a deployment; docs/operate/logs.md describes the lines."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lines below this level are not written"
    )
    format: Literal["text", "json"] = Field(
        "text",
        description="text: one line of key=value pairs and words. json: one JSON object per line",
    )
    destination: Literal["files", "stderr"] = Field(
        "files",
        description="files: each process writes a file on its own node. stderr: each process "
        "writes to its stderr. The stderr of controller, engines and workers is a"
        " file in Ray's session directory",
    )
    directory: str | None = Field(
        None,
        description="directory on each node for the files; each start of a service makes a "
        "folder in it. null means $XDG_STATE_HOME/dist-aclgraph/logs, usually "
        "~/.local/state/dist-aclgraph/logs",
    )
    folder: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$",
        description="name of the folder of one start; null means the time of the start and "
        "the name of the model",
    )
    keep_folders: int = Field(
        10,
        ge=1,
        le=1000,
        description="a new folder removes the oldest other folders above this number, except "
        "folders whose processes still run",
    )
    max_file_mib: int = Field(
        16,
        ge=1,
        le=4096,
        description="a file that reaches this size in MiB is renamed, and a new one begins",
    )
    max_old_files: int = Field(
        3, ge=1, le=100, description="number of renamed files that each process keeps"
    )
    record_steps: bool = Field(
        True,
        description="keep the last 256 steps of each rank in a file, for `dist-aclgraph explain`",
    )
    record_collectives: bool = Field(
        False,
        description="the device of each rank marks each collective before it begins, also in "
        "graphs, so that `dist-aclgraph explain` names the layer and the collective in which a "
        "group stopped. Each mark is a copy of 4 bytes to the host",
    )
    access: bool = Field(
        False,
        description="write one line for each HTTP request, with its tokens, its times and its"
        " outcome; with destination files, these lines are in separate files",
    )
