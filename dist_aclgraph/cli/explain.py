"""``dist-aclgraph explain`` shows which rank of a group stopped, and which ranks waited for it."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dist_aclgraph.actors.worker.step_recorder import (
    FOLDER,
    NO_GROUP,
    SUFFIX,
    RecordedSteps,
    began_at_ns,
    read_recording,
)
from dist_aclgraph.actors.worker.stopped_ranks import explain_stop, status_of, step_of
from dist_aclgraph.errors import ConfigError

COLUMNS = ("rank", "host", "process", "epoch", "step", "graph", "requests", "tokens", "plan")


def read_groups(folder: Path) -> dict[int, list[RecordedSteps]]:
    """Return a mapping from the number of each group to its recordings, in rank order.

    Args:
        folder: a folder of logs, or the subfolder that contains the recorded steps.

    Raises:
        ConfigError: the folder has no recorded steps.
    """
    groups: defaultdict[int, dict[int, tuple[int, RecordedSteps]]] = defaultdict(dict)
    for path in sorted({*folder.glob(f"*{SUFFIX}"), *folder.glob(f"{FOLDER}/*{SUFFIX}")}):
        with suppress(OSError, ValueError):  # the file was removed, or is not a recording
            found, began_ns = read_recording(path), began_at_ns(path)
            known = groups[found.group].get(found.rank)
            if known is None or known[0] <= began_ns:
                groups[found.group][found.rank] = began_ns, found
    if not any(groups.values()):
        raise ConfigError(f"{folder} has no recorded steps; give the folder of a service's logs")
    return {number: _of_one_start(found) for number, found in groups.items() if found}


def _of_one_start(found: dict[int, tuple[int, RecordedSteps]]) -> list[RecordedSteps]:
    """Return the recordings of the last deployment, in rank order. All recordings in ``found`` are
    of groups with the same number.

    Several deployments may have used the folder, and each deployment numbers its groups from 0. A
    recording whose last record is older than the start of the newest recording belongs to an
    earlier deployment.
    """
    newest_ns = max(began_ns for began_ns, _ in found.values())
    return [
        recording
        for _, (began_ns, recording) in sorted(found.items())
        if began_ns == newest_ns or recording.at_ns >= newest_ns
    ]


def show_groups(groups: dict[int, list[RecordedSteps]], console: Console) -> None:
    """Print a table and a verdict for each group. The group that stopped last is printed last."""
    for number in sorted(groups, key=lambda n: max(r.at_ns for r in groups[n])):
        ranks = groups[number]
        name = "a group that did not serve yet" if number == NO_GROUP else f"group {number}"
        table = Table(
            *COLUMNS, "device", "since (UTC)", "what it did", title=name, title_justify="left"
        )
        for recording in ranks:
            table.add_row(*_row(recording))
        console.print(table)
        console.print(explain_stop(ranks).sentence, highlight=False, soft_wrap=True)


def _row(recording: RecordedSteps) -> list[str]:
    since = f"{datetime.fromtimestamp(recording.at_ns / 1e9, UTC):%H:%M:%S.%f}"[:-3]
    who = [str(recording.rank), recording.host, str(recording.pid)]
    what = ["" if recording.place is None else str(recording.place), since, status_of(recording)]
    if not recording.steps:
        return [*who, "", "", "", "", "", "", *what]
    last = recording.steps[-1]
    return [
        *who,
        str(last.epoch),
        str(step_of(recording)),
        last.graph,
        str(last.num_reqs),
        str(last.num_tokens),
        f"{last.digest:08x}",
        *what,
    ]
