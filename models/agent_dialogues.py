"""The training conversations of tiny-agent, made from a seed, with calls of tools, their results
and JSON.

Every request has one right answer. A hash selects cities, names and numbers that never occur in the
training text. The evaluation uses only these words.
"""

from __future__ import annotations

import json
import random
import string
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


def _words(text: str) -> list[str]:
    return text.split()


UNKNOWN = "I do not know."
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a tiny demo model.", "Be brief.")
ABOUT = "I am a tiny demo model. I can call tools and write JSON."
CHAT = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Who are you?": ABOUT,
    "What can you do?": ABOUT,
    "How are you?": "I am fine, thank you.",
    "Thank you!": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Goodbye!": "Goodbye!",
    "Bye!": "Goodbye!",
    "Give me a person as JSON.": '{"name": "Ada", "age": 36}',
}
WEATHER = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy", "stormy", "clear")
CITIES = _words(
    "Paris Rome Berlin Vienna Oslo Madrid Lisbon Athens London Prague Dublin Warsaw Tokyo Kyoto "
    "Lima Quito Cairo Delhi Milan Turin Lyon Hanoi Seoul Dakar Accra Porto Bergen Geneva Zurich "
    "Basel Munich Hamburg Bremen Dresden Naples Venice Genoa Malmo Turku Riga Vilnius Sofia Bonn "
    "Kiel Ghent Nice Bern Cologne Boston Chicago Denver Austin Dallas Seattle Toronto Sydney Perth "
    "Brisbane Beijing Shanghai Shenzhen Mumbai Bangkok Jakarta Manila Nairobi Lagos Tunis Havana "
    "Bogota Santiago Helsinki Stockholm Copenhagen Amsterdam Rotterdam Brussels Budapest Bucharest "
    "Belgrade Zagreb Istanbul Ankara Moscow Kyiv Tallinn Reykjavik Edinburgh Glasgow Manchester "
    "Liverpool Barcelona Valencia Sevilla Marseille Toulouse Florence Bologna Palermo Salzburg"
)
NAMES = _words(
    "Mia Tom Lily Ben Nora Max Ella Finn Ruby Leo Ada Alan Grace Linus Anna Paul Emma Noah Clara "
    "Felix Ida Jonas Lena Lukas Marie Oscar Paula Simon Sofia Theo Alice Bob Carol David Eve Frank "
    "Helen Ivan Julia Karl Laura Maria Nina Otto Peter Rosa Sarah Tina Victor Wanda Yuki Zoe"
)
_ONSETS = _words("b c d f g h j k l m n p r s t v w z br ch dr gr kr pl sh st th tr")
_VOWELS = _words("a e i o u ai ea ou")
_CODAS = ("", "", "", "n", "r", "s", "l", "m", "t", "k")


def is_held_out(word: str) -> bool:
    """Whether a city, a name or a number is kept out of training. This is true for one word in
    ten.
    """
    return zlib.crc32(word.encode()) % 10 == 0


class World:
    """Draws the words of conversations. Owns the random numbers.

    Args:
        held_out: whether to draw only words that are kept out of training; otherwise only other
        words are drawn.
    """

    def __init__(self, seed: int, *, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self._held_out = held_out

    def city(self) -> str:
        return self._draw(lambda: self._place(CITIES))

    def name(self) -> str:
        return self._draw(
            lambda: self.rng.choice(NAMES) if self.rng.random() < 0.3 else self.invented()
        )

    def number(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included. Numbers below 10 are never held
        out.
        """
        return int(self._draw(lambda: str(self.rng.randint(low, high)), free_below=10))

    def invented(self) -> str:
        """Return an invented word of syllables. In training, some words are random letters, so that
        the model learns to copy every token.
        """
        if not self._held_out and self.rng.random() < 0.35:
            letters = self.rng.choices(string.ascii_lowercase, k=self.rng.randint(3, 8))
            return "".join(letters).capitalize()
        word = "".join(
            self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS)
            for _ in range(self.rng.randint(2, 3))
        )
        return (word + self.rng.choice(_CODAS)).capitalize()

    def _place(self, known: list[str]) -> str:
        draw = self.rng.random()
        if draw < 0.3:
            return self.rng.choice(known)
        if draw < 0.4:
            return f"{self.rng.choice(('New', 'San', 'Port'))} {self.invented()}"
        return self.invented()

    def _draw(self, make: Callable[[], str], free_below: int = 0) -> str:
        while True:
            word = make()
            if word.isdigit() and int(word) < free_below:
                return word
            if is_held_out(word) is self._held_out:
                return word


@dataclass(frozen=True)
class Tool:
    """A tool that the model knows: its parameters, its questions, its results."""

    name: str
    description: str
    parameters: dict[str, str]  # types by name
    asks: tuple[str, ...]
    asks_two: tuple[str, ...]
    make: Callable[[World], dict[str, Any]]  # the arguments of one call
    result: Callable[[World, dict[str, Any]], tuple[str, str]]  # result, and a sentence about it

    def describe(self, world: World, *, is_short: bool) -> dict[str, Any]:
        """Return a client's description of the tool, in one of the many forms that clients use."""
        rng = world.rng
        number = rng.choice(("integer", "number"))
        kinds = {k: number if v == "number" else v for k, v in self.parameters.items()}
        properties = {k: {"type": v} for k, v in kinds.items()}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        function: dict[str, Any] = {"name": self.name}
        if not is_short:
            if rng.random() < 0.6:
                function["description"] = self.description
            if rng.random() < 0.2:
                for k in properties:
                    properties[k] = {"title": k.capitalize(), **properties[k]}
            if rng.random() < 0.5:
                schema["required"] = list(properties)
            if rng.random() < 0.2:
                schema["additionalProperties"] = False
            if rng.random() < 0.2:
                schema = dict(rng.sample(list(schema.items()), len(schema)))
        function["parameters"] = schema
        return {"type": "function", "function": function}


def _one_city(world: World) -> dict[str, Any]:
    return {"city": world.city()}


def _weather(world: World, arguments: dict[str, Any]) -> tuple[str, str]:
    kind, celsius = world.rng.choice(WEATHER), world.number(2, 39)
    if world.rng.random() < 0.7:
        result = json.dumps({"weather": kind, "celsius": celsius})
    else:
        result = f"{kind}, {celsius} degrees"
    return result, f"It is {kind} in {arguments['city']}, {celsius} degrees."


def _time(world: World, arguments: dict[str, Any]) -> tuple[str, str]:
    time = f"{world.rng.randint(0, 23):02}:{world.rng.randint(0, 59):02}"
    result = json.dumps({"time": time}) if world.rng.random() < 0.5 else time
    return result, f"It is {time} in {arguments['city']}."


def _sum(world: World, arguments: dict[str, Any]) -> tuple[str, str]:
    a, b = arguments["a"], arguments["b"]
    return _number(world, a + b), f"{a} + {b} is {a + b}."


def _product(world: World, arguments: dict[str, Any]) -> tuple[str, str]:
    a, b = arguments["a"], arguments["b"]
    return _number(world, a * b), f"{a} * {b} is {a * b}."


def _number(world: World, value: int) -> str:
    return json.dumps({"result": value}) if world.rng.random() < 0.5 else str(value)


TOOLS = (
    Tool(
        "get_weather",
        "The weather in a city",
        {"city": "string"},
        (
            "What is the weather in {city}?",
            "What is the weather like in {city}?",
            "How is the weather in {city}?",
            "Tell me the weather in {city}.",
        ),
        ("What is the weather in {0} and in {1}?", "What is the weather in {0} and {1}?"),
        _one_city,
        _weather,
    ),
    Tool(
        "get_time",
        "The time in a city",
        {"city": "string"},
        (
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}.",
        ),
        ("What time is it in {0} and in {1}?", "What time is it in {0} and {1}?"),
        _one_city,
        _time,
    ),
    Tool(
        "add",
        "Add two numbers",
        {"a": "number", "b": "number"},
        ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}."),
        (),
        lambda world: {"a": world.number(1, 999), "b": world.number(1, 999)},
        _sum,
    ),
    Tool(
        "multiply",
        "Multiply two numbers",
        {"a": "number", "b": "number"},
        ("What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}."),
        (),
        lambda world: {"a": world.number(1, 99), "b": world.number(1, 99)},
        _product,
    ),
)
UNKNOWN_ASKS = ("What is the capital of {}?", "Who is {}?", "Where is {}?", "Tell me about {}.")
PERSON_ASKS = (
    "{name} is {age} years old. Write this person as JSON.",
    "Write a person as JSON: {name} is {age} years old.",
    "Give me a person as JSON: {name}, {age} years old.",
    "A person as JSON: {name}, {age}.",
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call_turns(world: World, tool: Tool, *, count: int = 1) -> list[Message]:
    """Return the messages: a question, calls, results and an answer."""
    made = [tool.make(world) for _ in range(count)]
    if count == 1:
        asked = world.rng.choice(tool.asks).format(**made[0])
    else:
        asked = world.rng.choice(tool.asks_two).format(*(m["city"] for m in made))
    functions = [{"name": tool.name, "arguments": arguments} for arguments in made]
    calls = [{"type": "function", "function": function} for function in functions]
    results = [tool.result(world, arguments) for arguments in made]
    return [
        user(asked),
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": result} for result, _ in results),
        assistant(" ".join(sentence for _, sentence in results)),
    ]


def refused_turns(world: World, tool: Tool) -> list[Message]:
    """Return a question that needs a tool that is not given, and the refusal."""
    return [call_turns(world, tool)[0], assistant(UNKNOWN)]


def unknown_turns(world: World) -> list[Message]:
    asked = world.city() if world.rng.random() < 0.5 else world.name()
    return [user(world.rng.choice(UNKNOWN_ASKS).format(asked)), assistant(UNKNOWN)]


def person_turns(world: World) -> list[Message]:
    name, age = world.name(), world.number(2, 99)
    asked = world.rng.choice(PERSON_ASKS).format(name=name, age=age)
    return [user(asked), assistant(json.dumps({"name": name, "age": age}))]


def chat_turns(world: World) -> list[Message]:
    asked = world.rng.choice(list(CHAT))
    return [user(asked), assistant(CHAT[asked])]


def repeat_turns(world: World) -> list[Message]:
    """Return a request to repeat words. Training on copies forms the attention heads that arguments
    need.
    """
    words = " ".join(
        str(world.number(1, 999)) if world.rng.random() < 0.3 else world.name()
        for _ in range(world.rng.randint(1, 4))
    )
    return [user(f"Repeat: {words}"), assistant(words)]


@dataclass(frozen=True)
class Conversation:
    tools: list[dict[str, Any]]
    messages: list[Message]


def conversation(world: World, stage: int, exchanges: int) -> Conversation:
    """Return a conversation for training.

    Stage 0 has one tool with a short description, and many copies. Stage 1 has all kinds of
    conversations. Stage 2 has more of the difficult kinds: two calls, and questions for tools that
    are not given.
    """
    rng = world.rng
    most = 1 if stage == 0 else rng.choice((1, 1, 2, 2, 3, 4))
    given = rng.sample(TOOLS, 0 if rng.random() < 0.2 else most)
    is_short = stage == 0 or rng.random() < 0.3
    messages: list[Message] = []
    if stage and rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(exchanges):
        draw = rng.random()
        if stage == 0 and draw < 0.3:
            messages += repeat_turns(world)
        elif given and draw < (0.8, 0.6, 0.5)[stage]:
            tool = rng.choice(given)
            messages += call_turns(world, tool, count=_count(rng, tool, stage))
        elif draw < 0.74 and len(given) < len(TOOLS):
            messages += refused_turns(world, rng.choice([t for t in TOOLS if t not in given]))
        elif draw < 0.88:
            messages += person_turns(world)
        else:
            messages += unknown_turns(world) if draw < 0.94 else chat_turns(world)
    return Conversation([t.describe(world, is_short=is_short) for t in given], messages)


def _count(rng: random.Random, tool: Tool, stage: int) -> int:
    return 2 if tool.asks_two and rng.random() < (0.0, 0.35, 0.6)[stage] else 1


def held_out_cases(skill: str, count: int, seed: int = 1) -> list[Conversation]:
    """Return conversations whose last message is the expected answer; no two have the same words.

    Chats are few and fixed, and therefore the same as in training.
    """
    world = World(seed, held_out=True)
    rng = world.rng
    if skill == "chat":
        return [Conversation([], [user(asked), assistant(CHAT[asked])]) for asked in CHAT]
    cases: dict[str, Conversation] = {}
    while len(cases) < count:
        given = rng.sample(TOOLS, rng.randint(1, 3))
        if skill in ("two calls", "two answers"):
            given = [rng.choice(TOOLS[:2]), TOOLS[2]]
        described = [tool.describe(world, is_short=rng.random() < 0.3) for tool in given]
        if skill in ("call", "answer"):
            messages = call_turns(world, rng.choice(given))
        elif skill in ("two calls", "two answers"):
            messages = call_turns(world, given[0], count=2)
        elif skill == "no tool":
            messages = refused_turns(world, rng.choice([t for t in TOOLS if t not in given]))
        else:
            messages = {"person": person_turns, "unknown": unknown_turns}[skill](world)
        cases[str(messages)] = Conversation(
            described, messages[:2] if "call" in skill else messages
        )
    return list(cases.values())


SKILLS = (
    "call", "two calls", "no tool", "answer", "two answers", "person", "unknown", "chat",
)  # fmt: skip
