"""An ingress sends questions to the deployment's owner, which answers or does not answer."""

from __future__ import annotations

import threading
from pathlib import Path

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment.owner_link import (
    Admission,
    OwnerClient,
    OwnerLink,
    listen_for_ingress,
)
from dist_aclgraph.actors.wire.addresses import Reach

WAIT_S = 180.0


class Answers:
    """An owner's answers to questions. The answer of ``outlook`` waits until the test sets
    ``may_answer``.
    """

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.is_open = False

    def admission(self, is_open: bool) -> Admission:
        self.is_open = is_open
        return Admission("the server is stopping", 2.5)

    def reach(self) -> Reach | None:
        return None

    def outlook(self) -> Outlook:
        self.asked.set()
        self.may_answer.wait(WAIT_S)
        return Outlook(progress="it comes")


def test_questions_are_answered_by_whoever_owns_the_deployment_now(tmp_path: Path) -> None:
    path = str(tmp_path / "owner")
    asker = OwnerClient(path)
    assert asker.admission(is_open=False) is None
    with listen_for_ingress(path) as listener:
        for _ in range(2):
            answers = Answers()
            answers.may_answer.set()
            with OwnerLink(listener, answers) as link:
                assert asker.admission(is_open=True) == Admission("the server is stopping", 2.5)
                assert answers.is_open
                assert asker.reach() is None
                assert asker.outlook() == Outlook(progress="it comes")
                asker.close()
                assert link.wait_until_left(WAIT_S)


def test_a_question_that_is_left_has_no_answer(tmp_path: Path) -> None:
    path, answers, heard = str(tmp_path / "owner"), Answers(), list[Outlook]()
    with listen_for_ingress(path) as listener, OwnerLink(listener, answers):
        asker = OwnerClient(path)
        asks = threading.Thread(target=lambda: heard.append(asker.outlook()), daemon=True)
        asks.start()
        assert answers.asked.wait(WAIT_S)

        asker.close()
        answers.may_answer.set()

        asks.join(2 * WAIT_S)
        assert heard == [Outlook(progress="the deployment is being started again")]
