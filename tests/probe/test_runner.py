"""Each question of a probe has its own process, which can answer, hang or die. A user can stop the
probe.
"""

import multiprocessing
import os
import signal
import time

import pytest
from msgspec.structs import replace

from dist_aclgraph.config import DeviceConfig
from dist_aclgraph.device import kind
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.probe import runner as runner_module
from dist_aclgraph.probe.question import Between, Probe
from dist_aclgraph.probe.row import Outcome, Report
from dist_aclgraph.probe.runner import CUT_OFF, DIED, NO_ANSWER, Runner
from tests.actors.leftovers import is_alive, wait_until


def answering(task, parent):
    """Act as a question's child process: answer "yes", or act as the question's name says."""
    os.setsid()
    name = task.name
    task.output.write_text("a line of a library")
    if (name, task.rank) in (("die_early", 0), ("die_one_early", 1)):
        os.kill(os.getpid(), signal.SIGKILL)
    parent.send(None)
    if name in ("die", "die_one_early"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fork":
        if not (forked := os.fork()):
            time.sleep(3600)
        task.output.write_text(f"{forked}")
        time.sleep(3600)
    if name == "hang" or (name == "half" and task.rank == 1):
        time.sleep(3600)
    if name == "interrupt":
        os.kill(int(task.device.soc), signal.SIGINT)
        time.sleep(3600)
    if name == "unopened" and not task.rank:
        parent.send(Outcome("unopened", was_asked=False))
        return
    answer = Outcome("yes", chip="C", cann="9.1")
    if name == "ranks":
        answer = replace(answer, found=f"yes {task.rank}")
    if name == "device":
        answer = replace(answer, found=f"{task.kind} {task.device_id}")
    if name == "number":
        answer = replace(answer, number=5.0)
    parent.send(answer)
    parent.poll(None)


@pytest.fixture(autouse=True)
def no_emulator(monkeypatch):
    """Start processes without the emulator, because no question of these tests needs it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.probe.test_runner"])
    own = runner_module.context_of
    monkeypatch.setattr(
        runner_module, "context_of", lambda kind: context if kind == "emulated" else own(kind)
    )


def make_probe(name, says="yes", **options):
    """Make a question. Only questions that hang have a short time limit. On a busy machine, all
    other questions can be answered late.
    """
    limit_s = 1.0 if name in ("hang", "half", "fork") else 60.0
    return Probe(name, f"{name}?", lambda bench: "", says, limit_s=limit_s, **options)


def run(*probes, report=None, rules=None):
    """Run a probe. Return the report, and, for each time at which it was saved, the question that
    was running.
    """
    report = report or Report("0", "emulated", "quick")
    saved = []
    runner = Runner(
        "emulated",
        DeviceConfig(soc=str(os.getpid())),
        rules=lambda chip, cann: rules or {},
        child=answering,
    )
    runner.run(probes, report, lambda r: saved.append(r.running), lambda row: None)
    return report, saved


def test_an_answer_becomes_a_row():
    report, saved = run(make_probe("a"))

    (row,) = report.rows
    assert (row.name, row.question, row.emulator, row.found) == ("a", "a?", "yes", "yes")
    assert row.is_same is True
    assert (report.chip, report.cann) == ("C", "9.1")
    assert saved == ["a", None]


def test_another_answer_is_a_difference_and_a_fact_is_none():
    report, _ = run(make_probe("a", says="no"), make_probe("b", says=None))

    assert [row.is_same for row in report.rows] == [False, None]
    assert [row.name for row in report.differences()] == ["a"]


def test_a_hang_and_a_death_are_rows_and_the_next_question_is_asked():
    report, _ = run(make_probe("hang"), make_probe("die"), make_probe("a"))

    assert [row.found for row in report.rows] == [NO_ANSWER, DIED, "yes"]
    assert report.rows[1].text == "signal 9\na line of a library"


def test_a_process_that_a_hung_question_forked_ends_with_it():
    report, _ = run(make_probe("fork"))

    (row,) = report.rows
    assert row.found == NO_ANSWER
    wait_until(lambda: not is_alive(int(row.text)), "it runs on")


def test_ranks_that_differ_are_named():
    report, _ = run(make_probe("ranks", ranks=2), make_probe("half", ranks=2))

    assert [row.found for row in report.rows] == [
        "rank 0: yes 0; rank 1: yes 1",
        f"rank 0: yes; rank 1: {NO_ANSWER}",
    ]


def test_an_npu_gets_new_processes_that_see_it_alone(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3,5")
    report = Report("0", "npu", "quick")

    Runner("npu", DeviceConfig(), child=answering).run(
        [make_probe("device"), make_probe("ranks", ranks=2)], report, lambda r: None, lambda r: None
    )

    assert [row.found for row in report.rows] == ["npu 3", "rank 0: yes 0; rank 1: yes 1"]


def test_a_question_that_needs_more_npus_is_no_difference(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    report = Report("0", "npu", "quick")

    Runner("npu", DeviceConfig(), child=answering).run(
        [make_probe("ranks", ranks=2)], report, lambda r: None, lambda row: None
    )

    (row,) = report.rows
    assert (row.found, row.is_same) == ("needs 2 NPUs, found 1", None)


def test_npus_of_a_container_are_counted_from_zero(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(kind, "DEV", tmp_path)
    for number in (3, 5):
        (tmp_path / f"davinci{number}").touch()
    report = Report("0", "npu", "quick")

    Runner("npu", DeviceConfig(), child=answering).run(
        [make_probe("device")], report, lambda r: None, lambda row: None
    )

    assert [row.found for row in report.rows] == ["npu 0"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("unopened", 1), ("unopened", 2), ("die_early", 1), ("die_early", 2), ("die_one_early", 2)],
)
def test_a_question_that_could_not_be_asked_is_no_difference_and_is_asked_again(name, ranks):
    probe = make_probe(name, ranks=ranks)
    report, _ = run(probe)

    (row,) = report.rows
    again, saved = run(probe, report=report)

    assert (row.was_asked, row.is_same) == (False, None)
    assert len(again.rows) == 1 and saved == [name, None]
    assert again.summary() == (
        "1 questions, 0 answers differ from the emulator's, 1 could not be asked"
    )


def test_a_run_goes_on_where_it_was_cut_off():
    before, _ = run(make_probe("a"))
    before.running = "b"

    report, saved = run(make_probe("a"), make_probe("b"), make_probe("c"), report=before)

    assert [(row.name, row.found) for row in report.rows] == [
        ("a", "yes"),
        ("b", CUT_OFF),
        ("c", "yes"),
    ]
    assert saved == [None, "c", None]


@pytest.mark.usefixtures("heard_signals")
def test_a_question_that_the_user_interrupts_is_asked_again():
    report = Report("0", "emulated", "quick")

    with pytest.raises(KeyboardInterrupt):
        run(make_probe("a"), make_probe("interrupt"), report=report)

    assert [row.name for row in report.rows] == ["a"] and report.running is None


def test_a_report_has_the_answers_of_one_device():
    before, _ = run(make_probe("a"))
    before.cann = "8.5"

    with pytest.raises(ConfigError, match=r"chip C with CANN 8\.5; .* CANN 9\.1: give another"):
        run(make_probe("a"), make_probe("b"), report=before)

    assert [row.name for row in before.rows] == ["a"] and before.running is None


@pytest.mark.parametrize(("known", "is_same"), [("yes", True), ("no", False)])
def test_a_known_answer_of_the_device_replaces_the_emulators(known, is_same):
    report, _ = run(make_probe("a", says="never"), rules={"a": known})

    assert report.rows[0].is_same is is_same


def test_a_known_number_holds_within_a_factor_of_two():
    probe = make_probe("number", says=Between(100, 200, "us"))

    rows = [run(probe, rules={"number": known})[0].rows[0] for known in (3.0, 11.0)]

    assert [row.is_same for row in rows] == [True, False]
