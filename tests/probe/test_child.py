"""The child process of a probe answers one question: with a value, with a number, or with the name
of an error.
"""

import pytest
import torch

from dist_aclgraph.errors import DeviceError
from dist_aclgraph.probe.child import ask
from dist_aclgraph.probe.question import Answer, Bench, Between, Probe
from dist_aclgraph.probe.row import MAX_TEXT


def outcome_of(call, says="yes"):
    return ask(Probe("a", "a?", call, says), Bench())


def raising(error):
    def call(bench):
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "found", "code"),
    [
        (RuntimeError("aclnnMm failed, error code is 161002"), "refused", 161002),
        (RuntimeError("[ERROR] 2026-11-25-10:00:00 call failed, error code is 561002"), "refused",
         561002),
        (RuntimeError("the capture is invalid (107025)"), "refused", 107025),
        (DeviceError("no"), "refused", None),
        (RuntimeError("AICORE exception, error code is 507015"), "stopped the device", 507015),
        (RuntimeError("FORCE STOP, error code is 107022"), "stopped the device", 107022),
        (AttributeError("no npu_x"), "missing", None),
        (ValueError("no"), "failed (ValueError)", None),
    ],
)  # fmt: skip
def test_an_error_is_an_answer(error, found, code):
    outcome = outcome_of(raising(error))

    assert (outcome.found, outcome.code) == (found, code)
    assert str(error) in outcome.text and outcome.us is not None


def test_a_number_has_its_unit():
    outcome = outcome_of(lambda bench: 12.5, Between(0, 20, "us"))

    assert (outcome.found, outcome.number) == ("12.5 us", 12.5)


def test_small_values_are_compared_by_their_own_size():
    small, bench = torch.tensor([[1.0, -2.0], [0.0, 0.0]]) / 1000, Bench(torch)

    found = [bench.compare(small * factor, small, 0.03).found for factor in (1.01, 1.05)]

    assert found == ["equal", "different"]


def test_details_are_bounded():
    outcome = outcome_of(lambda bench: Answer("yes", "x" * 100_000))

    assert (outcome.found, len(outcome.text)) == ("yes", MAX_TEXT)
