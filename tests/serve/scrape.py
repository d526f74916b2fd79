"""Reads the samples of /metrics. The key of a sample is its name and the values of its labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SAME = ("model_name", "replica")
Path = tuple[str, ...]


def scrape(service: Any, **asked: Any) -> dict[Path, float]:
    """Return all samples except times of creation. Keys of histogram buckets contain ``/le=``.

    Args:
        service: an object whose ``http`` is a client of the service.
        asked: further arguments for the request.
    """
    http: httpx.Client = service.http
    text = http.get("/metrics", **asked).text
    found: dict[Path, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in SAME}
            name = sample.name.removeprefix("dist_aclgraph_")
            if family.type == "histogram":
                name = f"{name}/le={labels.pop('le', '')}"
            elif name.endswith("_created"):
                continue
            # The label "engine" comes first, "rank" second, and the other labels follow in the
            # order of their names.
            ordered = sorted(labels, key=lambda k: (k != "engine", k != "rank", k))
            found[name.removesuffix("_total"), *(labels[k] for k in ordered)] = sample.value
    return found


def leaves(tree: Mapping[str, Any], path: Path = ()) -> dict[Path, float]:
    """Return the numbers in the status page's JSON object. A number that is also in /metrics has
    the same key as in the result of ``scrape``.
    """
    found: dict[Path, float] = {}
    for key, value in tree.items():
        if path and path[0] == "rank_info" and len(path) == 2:
            found[*path, key, *(value[label] for label in sorted(value))] = 1.0
        elif isinstance(value, dict):
            found |= leaves(value, (*path, key))
        else:
            found[*path, key] = value
    return found
