"""The report of a probe is stored as a file, shown as a page, and converted to rules for the
emulator.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import dist_aclgraph
from dist_aclgraph.cli.main import cli
from dist_aclgraph.cli.probe import run_probe
from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe.device_rules import answers_of, rules_name, rules_text
from dist_aclgraph.probe.page import report_page, table
from dist_aclgraph.probe.question import ByCann, Probe
from dist_aclgraph.probe.questions import PROBES, probes_of
from dist_aclgraph.probe.questions.facts import machine_here
from dist_aclgraph.probe.row import Outcome, Report, judged, read_report, write_report
from dist_aclgraph.version import VERSION

ROOT = Path(dist_aclgraph.__file__).parent


def make_report(**outcomes):
    """Return a report of questions with the given outcomes. In the arguments' names, "__" stands
    for a dot.
    """
    by_name = {probe.name: probe for probe in PROBES}
    report = Report("1.0", "npu", "full", chip="Ascend910B3", cann="9.1.0")
    for name, outcome in outcomes.items():
        probe = by_name[name.replace("__", ".")]
        report.rows.append(judged(probe, probe.expected(report.chip, report.cann), outcome))
    return report


def test_a_report_is_read_as_it_was_written(tmp_path):
    report = make_report(operators__swiglu=Outcome("refused", code=161002, text="not here"))
    write_report(report, tmp_path / "r.json")

    assert read_report(tmp_path / "r.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1}', '{"rows": [{"name": "a"}]}'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)

    with pytest.raises(ConfigError, match="not a report"):
        read_report(path)


def test_differences_become_rules_and_rules_become_answers(tmp_path):
    report = make_report(
        facts__memory=Outcome("62433", number=62433.0, us=1.0),
        facts__streams=Outcome("700 streams", number=700.0, us=1.0),
        operators__swiglu=Outcome("refused", code=161002),
        operators__matmul=Outcome("equal"),
        graphs__accounting=Outcome("software_sq", us=1.0),
        rules__attention__dim_272=Outcome("accepted"),
    )
    (tmp_path / "Ascend910B3-9.1.0.toml").write_text(rules_text(report))

    rules = tomllib.loads(rules_text(report))
    assert rules["settings"] == {
        "hbm_mb": 62433,
        "streams": 700,
        "accounting": "software_sq",
        "admit": ["head size 272 "],
        "refuse": ["aclnnSwiGlu"],
    }
    assert answers_of("Ascend910B3", "9.1.0", tmp_path) == {
        "facts.streams": 700.0,
        "graphs.accounting": "software_sq",
        "operators.swiglu": "refused",
        "rules.attention.dim_272": "accepted",
    }
    assert answers_of("Ascend910B4", "9.1.0", tmp_path) == {}


def test_a_strangers_text_stays_text():
    report = make_report(operators__swiglu=Outcome('a"\n[settings]\nx = 1\x07 | <b>', text="<b>"))

    assert set(tomllib.loads(rules_text(report))["settings"]) == set()
    (line,) = table(report.rows)[2:]
    assert "\\<b\\>" in line and "\\|" in line and "\x07" not in line


def test_the_page_shows_the_machine_then_the_differences_then_the_rest():
    report = make_report(
        operators__matmul=Outcome("equal", us=7.4),
        operators__swiglu=Outcome("refused", us=1.0, code=161002, text="line 1\nline 2"),
        facts__machine=Outcome("aarch64, Linux 5.10", text="more"),
        collectives__all_gather=Outcome("too few NPUs", was_asked=False),
    )
    page = report_page(report)

    places = [
        page.index(text)
        for text in (
            "Probe of Ascend910B3, CANN 9.1.0",
            "4 questions, 1 answers differ from the emulator&#39;s, 1 could not be asked",
            "aarch64, Linux 5.10",
            "Differences from the emulator (1)",
            "operators.swiglu",
            "<details open><summary>details</summary><pre>line 1\nline 2</pre>",
            ">161002<",
            "operators (1)",
            "operators.matmul",
            ">7<",
            "collectives (1)",
            '<tr class="unasked">',
        )
    ]
    assert places == sorted(places)
    assert page.count("operators.swiglu") == 1
    # the page loads no other file
    assert not re.search(r"<script|src=|href=\"(?!data:)|url\(", page)


def test_a_strangers_text_is_text_on_the_page():
    report = make_report(facts__machine=Outcome("<img src=x>\u202e\x07", text="</pre><script>"))
    report.chip, report.version = "<b>", "<i>"

    page = report_page(report)

    assert not re.search(r"<img|<script|<b>|<i>|[\u202e\x07]", page)
    assert "&lt;img src=x&gt;" in page and "&lt;/pre&gt;&lt;script&gt;" in page


def test_names_that_leave_the_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no rules can be named"):
        rules_name("../x", "9.1.0")
    assert answers_of("../x", "9.1.0", tmp_path) == {}


def test_compare_shows_a_table_and_writes_rules(tmp_path):
    from typer.testing import CliRunner

    path = tmp_path / "r.json"
    write_report(make_report(operators__swiglu=Outcome("refused", code=161002)), path)

    done = CliRunner().invoke(cli, ["probe", "--compare", str(path)])

    assert done.exit_code == 0, done.output
    assert "| operators.swiglu | Is npu_swiglu as on the host? | equal | refused |  | 161002 |" in (
        done.output
    )
    assert (tmp_path / "Ascend910B3-9.1.0.toml").is_file()
    assert "operators.swiglu" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("name", "value"), [("dist-aclgraph", "0"), ("host", "other"), ("driver", None)]
)
def test_a_report_of_another_machine_is_not_continued(tmp_path, name, value):
    report = Report(VERSION, "emulated", "quick", machine_here())
    if name == "dist-aclgraph":
        report.version = value
    elif value is None:
        del report.machine[name]
    else:
        report.machine[name] = value
    path = tmp_path / "r.json"
    write_report(report, path)

    with pytest.raises(ConfigError, match=rf"\({name} was .*\): give another file with --out"):
        run_probe("quick", path, DeviceConfig(kind="emulated"))


def test_each_operator_of_the_runtime_is_asked_about():
    def operators(*folders):
        texts = (path.read_text() for each in folders for path in (ROOT / each).rglob("*.py"))
        return {name for text in texts for name in re.findall(r"\bnpu_[a-z0-9_]+", text)}

    assert operators("layers", "models", "engine") - operators("probe/questions") == set()


def test_each_attention_operator_is_updated_in_a_graph():
    layers = "\n".join(path.read_text() for path in (ROOT / "layers").glob("*.py"))
    captured = set(re.findall(r'= AttentionOperator\(\s*"(\w+)"', layers))
    asked = set(re.findall(r'"(npu_\w+)"', (ROOT / "probe/questions/graphs.py").read_text()))

    assert captured and captured - asked == set()


def test_the_documents_count_the_questions():
    page = (ROOT.parent / "docs" / "operate" / "probe.md").read_text()

    assert f" all {len(PROBES)} questions;" in page
    assert f" {len(probes_of('quick'))} questions; writes" in page


def test_names_are_unique_and_quick_questions_few():
    assert [name for name, n in Counter(p.name for p in PROBES).items() if n > 1] == []
    assert len(probes_of("quick")) <= 15


@pytest.mark.parametrize(
    ("chip", "cann", "answer"),
    [
        ("Ascend910B1", "9.1.0", "always"),
        ("Ascend910_9391", "8.5.1", "no"),
        ("Ascend910_9391", "", "no"),
        ("Ascend910_9391", "9.1.0", "yes"),
        ("Ascend910B1", "8.5.1", "never"),
        ("Ascend910B1", "10.0.0", "always"),
    ],
)
def test_answers_depend_on_cann_and_chip_and_an_unknown_cann_has_the_stricter(chip, cann, answer):
    probe = Probe(
        "a", "a?", lambda bench: "", ByCann("no", "yes", a2_cann_8="never", a2_cann_9="always")
    )

    assert probe.expected(chip, cann) == answer


@pytest.mark.parametrize(
    ("cann", "answer"),
    [("", "no"), ("8.5.0", "no"), ("8.5.1", "new"), ("8.6.0", "new"), ("9.0.0", "yes")],
)
def test_a_patch_release_may_have_an_answer(cann, answer):
    probe = Probe("a", "a?", lambda bench: "", ByCann("no", "yes", cann_8_5_1="new"))

    assert probe.expected("Ascend910B1", cann) == answer


def test_latent_sums_are_given_from_cann_8_5_1_on():
    (probe,) = (probe for probe in PROBES if probe.name == "rules.attention.latent_lse")

    answers = [probe.expected("Ascend910B1", cann) for cann in ("8.5.0", "8.5.1", "9.0.0")]

    assert answers == ["refused", "accepted", "accepted"]
