"""Every error keeps its fields when it is pickled. Ray pickles errors to send them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from dist_aclgraph import errors
from dist_aclgraph.errors import DistAclGraphError, RequestError, WorkerError


def tree(base: type[DistAclGraphError]) -> Iterator[type[DistAclGraphError]]:
    yield base
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def make(kind: type[DistAclGraphError]) -> DistAclGraphError:
    if issubclass(kind, WorkerError):
        return kind("it broke", 3, "LOADING")
    if issubclass(kind, RequestError):
        return kind("it is wrong", "top_p")
    return kind("it broke")


@pytest.mark.parametrize("kind", list(tree(DistAclGraphError)), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind: type[DistAclGraphError]) -> None:
    error = make(kind)

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind
    assert (str(copy), vars(copy), copy.args) == (str(error), vars(error), error.args)


@pytest.mark.parametrize("kind", list(tree(DistAclGraphError)), ids=lambda kind: kind.__name__)
def test_the_docstring_of_the_module_shows_every_error(kind: type[DistAclGraphError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")


def test_a_worker_error_names_rank_and_phase() -> None:
    assert str(WorkerError("out of memory", 3, "LOADING")) == "rank 3 in LOADING: out of memory"
    assert str(WorkerError("no answer", phase="JOINING")) == "a worker in JOINING: no answer"
    assert str(WorkerError("no answer")) == "no answer"
