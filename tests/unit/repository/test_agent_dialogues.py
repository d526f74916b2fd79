"""The dialogues of models/tiny-agent. Dialogues for tests share no word with dialogues for
training, and have the right answers.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parents[3] / "models"


@pytest.fixture
def dialogues(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(MODELS))
    return import_module("agent_dialogues")


def words_of(world: Any, count: int = 300) -> set[str]:
    made = [(world.city(), world.name(), str(world.number(10, 999))) for _ in range(count)]
    return {word for words in made for word in words}


def test_training_and_tests_share_no_word(dialogues: Any) -> None:
    trained = words_of(dialogues.World(0))
    held_out = words_of(dialogues.World(0, held_out=True))

    assert not any(map(dialogues.is_held_out, trained))
    assert all(map(dialogues.is_held_out, held_out))


def test_every_skill_has_cases_that_end_with_the_answer(dialogues: Any) -> None:
    for skill in dialogues.SKILLS:
        cases = dialogues.held_out_cases(skill, 20)

        assert len(cases) == (len(dialogues.CHAT) if skill == "chat" else 20)
        assert {case.messages[-1]["role"] for case in cases} == {"assistant"}


def test_two_cities_are_two_calls_of_the_given_tool(dialogues: Any) -> None:
    for case in dialogues.held_out_cases("two calls", 20):
        question, answer = case.messages
        calls = [call["function"] for call in answer["tool_calls"]]

        assert len(calls) == 2
        assert {call["name"] for call in calls} <= {tool["function"]["name"] for tool in case.tools}
        assert all(call["arguments"]["city"] in question["content"] for call in calls)


def test_a_question_without_its_tool_is_not_answered(dialogues: Any) -> None:
    for case in dialogues.held_out_cases("no tool", 20):
        assert case.messages[-1]["content"] == dialogues.UNKNOWN


def test_a_person_is_json_with_the_words_of_the_question(dialogues: Any) -> None:
    for case in dialogues.held_out_cases("person", 20):
        person = json.loads(case.messages[-1]["content"])

        assert list(person) == ["name", "age"]
        assert all(str(value) in case.messages[0]["content"] for value in person.values())
