"""Probes of the emulator, and of a fake device, which is the emulator with artificial answers."""

import json

import pytest

from dist_aclgraph.config import DeviceConfig, EmulatorConfig
from dist_aclgraph.device import emulator
from dist_aclgraph.probe import child
from dist_aclgraph.probe.device_rules import rules_text
from dist_aclgraph.probe.question import ACCEPTED, REFUSED
from dist_aclgraph.probe.questions import PROBES, probes_of
from dist_aclgraph.probe.row import Report
from dist_aclgraph.probe.runner import Runner
from tests import laws
from tests.probe import pretended
from tests.probe.pretended import PLANTED, STREAMS


def probe(probes, main=child.main, **emulated):
    """Return the report of a probe of the emulator."""
    emulator.build()
    device = DeviceConfig(kind="emulated", emulator=EmulatorConfig(**emulated))
    report = Report("0", "emulated", "full")
    runner = Runner("emulated", device, child=main)
    runner.run(probes, report, lambda r: None, lambda row: None)
    return report


# Questions that use the same calls as questions with artificial answers. These questions must still
# get the emulator's own answers.
NEAR_PLANTED = {"graphs.update_us_v2", "graphs.update_at_once_us"}


def asked():
    """Return the questions that the test asks: the quick questions, the questions with artificial
    answers, and ``NEAR_PLANTED``; in the profile "full", all questions.
    """
    names = {probe.name for probe in probes_of("quick")} | set(PLANTED) | NEAR_PLANTED
    return [p for p in PROBES if laws.is_full() or p.name in names]


@pytest.mark.slow
@pytest.mark.rare
def test_the_emulator_answers_as_it_says():
    report = probe(asked())

    assert [(row.name, row.found, row.text) for row in report.differences()] == []
    assert report.chip == "Ascend910B1" and report.cann == "9.1.0"
    rules = {probe.name: probe.rule for probe in PROBES if probe.rule}
    refused = [row for row in report.rows if row.name in rules and row.found == REFUSED]
    assert [(row.name, row.text) for row in refused if rules[row.name] not in row.text] == []


@pytest.mark.slow
def test_the_report_of_a_pretended_device_has_exactly_the_planted_differences():
    report = probe(asked(), pretended.main, streams=STREAMS)

    found = {row.name: row.found for row in report.differences()}
    assert set(found) == set(PLANTED)
    assert {name: found[name] for name, answer in PLANTED.items() if answer} == {
        name: answer for name, answer in PLANTED.items() if answer
    }


@pytest.mark.slow
def test_rules_made_from_a_report_make_the_emulator_answer_so(tmp_path):
    names = {"facts.chip", "facts.cann", "operators.swiglu"}
    chosen = [p for p in PROBES if p.name in names | {"rules.attention.dim_272"}]
    report = probe(chosen, pretended.main)
    rules = tmp_path / "rules.toml"
    rules.write_text(rules_text(report))

    again = probe(chosen, rules=str(rules))

    assert len(report.differences()) == 2
    assert [(r.name, r.found) for r in again.rows] == [(r.name, r.found) for r in report.rows]


@pytest.mark.slow
@pytest.mark.rare
def test_the_emulator_computes_the_calls_whose_rules_a_device_lacks(tmp_path):
    chosen = [probe for probe in PROBES if probe.rule]
    rules = tmp_path / "rules.toml"
    admitted = json.dumps(sorted({probe.rule for probe in chosen}))
    rules.write_text(f"[settings]\nadmit = {admitted}\n[answers]\n")

    report = probe(chosen, rules=str(rules))

    assert [(r.name, r.found, r.text) for r in report.rows if r.found != ACCEPTED] == []


@pytest.mark.slow
def test_an_older_cann_is_not_a_difference():
    names = {
        "facts.chip",
        "facts.cann",
        "rules.attention.block_16",
        "rules.attention.latent_lse",
        "collectives.mc2",
    }

    report = probe([p for p in PROBES if p.name in names], cann="8.5.0")

    assert {row.name: row.found for row in report.rows} == {
        "facts.chip": "Ascend910B1",
        "facts.cann": "8.5.0",
        "rules.attention.block_16": "refused",
        "rules.attention.latent_lse": "refused",
        "collectives.mc2": "refused",
    }
    assert report.differences() == []
