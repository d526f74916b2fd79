"""The training text of the demo models: dialogues made from a seed, with greetings, counting, and
short stories from templates.

Every prompt that the model should answer exactly has one right answer, so that training and
evaluation agree on what "right" is. A hash of a prompt decides whether the prompt is held out.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

MAX_NUMBER = 100
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a tiny demo model.", "Be brief.")

ABOUT = "I am a tiny demo model. I can greet you, count and tell little stories."
GREETINGS = {
    "Hello!": "Hello! I am a tiny demo model. How can I help you?",
    "Hello": "Hello! I am a tiny demo model. How can I help you?",
    "Hi": "Hi! I am a tiny demo model. How can I help you?",
    "Hi!": "Hi! I am a tiny demo model. How can I help you?",
    "Hey there!": "Hi! I am a tiny demo model. How can I help you?",
    "Good morning!": "Good morning! I am a tiny demo model. How can I help you?",
    "Good evening!": "Good evening! I am a tiny demo model. How can I help you?",
    "Hello, who are you?": ABOUT,
    "Who are you?": ABOUT,
    "What can you do?": "I can greet you, count and tell little stories. Ask me to count to ten!",
    "How are you?": "I am fine, thank you. How are you?",
    "Thank you!": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Goodbye!": "Goodbye! See you soon.",
    "Bye!": "Goodbye! See you soon.",
}

ANIMALS = [
    "fox",
    "cat",
    "dog",
    "owl",
    "bear",
    "mouse",
    "rabbit",
    "duck",
    "frog",
    "horse",
    "lion",
    "goat",
    "bee",
    "snail",
    "hen",
    "wolf",
]
PLACES = [
    "forest",
    "garden",
    "village",
    "river",
    "mountain",
    "city",
    "castle",
    "meadow",
    "desert",
    "island",
]
NAMES = ["Mia", "Tom", "Lily", "Ben", "Nora", "Max", "Ella", "Finn", "Ruby", "Leo"]
COLOURS = ["red", "blue", "green", "golden", "silver", "yellow"]
THINGS = ["key", "ball", "stone", "hat", "lamp", "book", "bell", "boat", "kite", "coin"]
FRIENDS = ["friend", "brother", "sister", "teacher", "neighbour"]

NUMBER_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

STORY_ASKS = (
    "Tell me a story about a {animal}.",
    "Tell me a story about a {animal} in the {place}.",
    "Tell me a story about a {animal} named {name}.",
    "Please tell me a story about a {animal}.",
    "Tell me a story.",
)
STORIES = (
    "Once upon a time there was a little {animal} named {name}. {name} lived in the {place}. "
    "One day {name} found a {colour} {thing}. {name} gave the {colour} {thing} to a {friend}. "
    "The {friend} was very happy. From that day on they played in the {place} every day. The end.",
    "Once upon a time a {animal} named {name} walked through the {place}. It was cold and dark. "
    "Then {name} saw a {colour} light. It was a {thing}! {name} took the {thing} home and showed "
    "it to a {friend}. They laughed and sang all night. The end.",
    "Once upon a time there was a {animal} who lost a {colour} {thing}. The {animal} was named "
    "{name}. {name} looked for the {thing} in the {place}. A {friend} helped to look. At last they "
    "found the {colour} {thing}, and {name} was happy again. The end.",
)


@dataclass(frozen=True)
class Turn:
    """One question and its answer; ``kind`` names the skill that it exercises."""

    kind: str
    prompt: str
    answer: str
    stressed: tuple[str, ...] = ()  # words of the answer that the model must copy from the prompt


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is kept out of training. This is true for one prompt in ten."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def count_turn(rng: random.Random, largest: int = MAX_NUMBER, longest: int = 24) -> Turn:
    """Return a turn that counts up, or down, to a bound that the prompt names."""
    length = rng.randint(1, longest) if rng.random() < 0.7 else rng.randint(1, 8)
    if rng.random() < 0.5:
        if rng.random() < 0.35:
            first, last = 1, min(length, largest)
            prompt = rng.choice(("Count to {1}.", "Please count to {1}.", "Count up to {1}."))
        else:
            first = rng.randint(0, max(0, largest - length))
            last = first + length - 1
            prompt = rng.choice(("Count from {0} to {1}.", "Please count from {0} to {1}."))
        numbers = list(range(first, last + 1))
        kind = "count up"
    else:
        if rng.random() < 0.25:
            first, last = min(length, largest), 1
            prompt = "Count down from {0}."
        else:
            last = rng.randint(0, max(0, largest - length))
            first = last + length - 1
            prompt = rng.choice(("Count down from {0} to {1}.", "Count backwards from {0} to {1}."))
        numbers = list(range(first, last - 1, -1))
        kind = "count down"
    return Turn(kind, prompt.format(first, last), " ".join(str(n) for n in numbers))


def special_count_turn(rng: random.Random) -> Turn:
    """Return a turn that counts to a number that is written as a word, or downwards without the
    word "down" in the prompt.
    """
    if rng.random() < 0.5:
        last = rng.randint(1, len(NUMBER_WORDS))
        ask = rng.choice(("Count to {}!", "Count to {}.", "Please count to {}."))
        answer = " ".join(str(n) for n in range(1, last + 1))
        return Turn("count words", ask.format(NUMBER_WORDS[last - 1]), answer)
    first = rng.randint(1, MAX_NUMBER)
    last = max(0, first - rng.randint(1, 12))
    answer = " ".join(str(n) for n in range(first, last - 1, -1))
    return Turn("count down", f"Count from {first} to {last}.", answer)


def greet_turn(rng: random.Random) -> Turn:
    """Return a greeting, or a question about the model itself."""
    prompt = rng.choice(tuple(GREETINGS))
    return Turn("greet", prompt, GREETINGS[prompt])


def loose_greet_turn(rng: random.Random) -> Turn:
    """Return a greeting in lower case, without a mark at its end."""
    turn = greet_turn(rng)
    return Turn("greet", turn.prompt.lower().rstrip("!?"), turn.answer)


def story_turn(rng: random.Random, asks: tuple[str, ...] = STORY_ASKS) -> Turn:
    """Return a story from a template. The animal, place and name in the prompt occur in the
    story.
    """
    slots = {
        "animal": rng.choice(ANIMALS),
        "place": rng.choice(PLACES),
        "name": rng.choice(NAMES),
        "colour": rng.choice(COLOURS),
        "thing": rng.choice(THINGS),
        "friend": rng.choice(FRIENDS),
    }
    ask = rng.choice(asks)
    named = tuple(slots[slot] for slot in ("animal", "place", "name") if f"{{{slot}}}" in ask)
    return Turn("story", ask.format(**slots), rng.choice(STORIES).format(**slots), named)


def repeat_turn(rng: random.Random) -> Turn:
    """Return a request to repeat words. Training on copies forms the attention heads that counting
    to a bound needs.
    """
    pool = (*ANIMALS, *COLOURS, *NAMES, *(str(n) for n in range(MAX_NUMBER + 1)))
    words = " ".join(rng.choice(pool) for _ in range(rng.randint(1, 6)))
    return Turn("repeat", f"Repeat: {words}", words)


def training_turn(rng: random.Random, stage: int) -> Turn:
    """Return a turn that is not held out.

    Stage 0 has only short counts and copies. Stage 1 has all kinds of turns. Stage 2 adds longer
    counts, other forms of questions, and more stories whose prompts name a place.
    """
    while True:
        draw = rng.random()
        if stage == 0:
            turn = count_turn(rng, 40, 10) if draw < 0.75 else repeat_turn(rng)
        elif stage == 2 and draw < 0.5:
            turn = _polish_turn(rng)
        elif draw < 0.5:
            turn = count_turn(rng)
        elif draw < 0.6:
            turn = repeat_turn(rng)
        elif draw < 0.75:
            # There are only a few fixed greetings, so none is held out.
            return loose_greet_turn(rng) if stage == 2 and draw < 0.66 else greet_turn(rng)
        else:
            turn = story_turn(rng, STORY_ASKS[1:3] if stage == 2 and draw < 0.92 else STORY_ASKS)
        if not is_held_out(turn.prompt):
            return turn


def _polish_turn(rng: random.Random) -> Turn:
    draw = rng.random()
    if draw < 0.2:
        return special_count_turn(rng)
    return count_turn(rng, longest=45 if draw < 0.45 else 24)


def held_out_turns(kind: str, count: int, seed: int = 1) -> list[Turn]:
    """Return turns of one kind with different prompts, none of which occurs in training."""
    make = {"count up": count_turn, "count down": count_turn, "story": story_turn,
            "repeat": repeat_turn}[kind]  # fmt: skip
    rng = random.Random(seed)
    turns: dict[str, Turn] = {}
    while len(turns) < count:
        turn = make(rng)
        if turn.kind == kind and is_held_out(turn.prompt):
            turns[turn.prompt] = turn
    return list(turns.values())
