"""Finds the format of a model's answers in the checkpoint's template or in the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from dist_aclgraph.errors import InvalidParameterError, UnusableToolError
from dist_aclgraph.formats.families import (
    apertus,
    cohere2,
    deepseek_v3,
    deepseek_v31,
    deepseek_v32,
    glm4,
    glm45,
    gpt_oss,
    granite,
    hermes,
    hunyuan,
    hy_v3,
    kimi_k2,
    llama3_json,
    minimax_m2,
    mistral,
    olmo3,
    phi4_mini_json,
    pythonic,
    qwen3_coder,
    seed_oss,
)
from dist_aclgraph.formats.lark import Lark, choice_of
from dist_aclgraph.formats.reasoning import (
    THOUGHTS,
    CallsInThought,
    Thought,
    find_thought,
    read_thought,
)
from dist_aclgraph.formats.scanner import Reader, Scan, Scanner
from dist_aclgraph.formats.tools import TOOL_PART, Tools
from dist_aclgraph.formats.wrapping import lark_wrapped, read_wrapped
from dist_aclgraph.sampling import StructuredOutputs, check_structure_length

# The first format that fits a template is chosen. Hermes is near the end, because other families
# also use the markers of Hermes.
FORMATS: dict[str, ModuleType] = {
    "gpt_oss": gpt_oss,
    "kimi_k2": kimi_k2,
    "minimax_m2": minimax_m2,
    "deepseek_v32": deepseek_v32,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "hy_v3": hy_v3,
    "glm45": glm45,
    "glm4": glm4,
    "mistral": mistral,
    "phi4_mini_json": phi4_mini_json,
    "granite": granite,
    "cohere2": cohere2,
    "apertus": apertus,
    "hunyuan": hunyuan,
    "olmo3": olmo3,
    "seed_oss": seed_oss,
    "qwen3_coder": qwen3_coder,
    "hermes": hermes,
    "pythonic": pythonic,
    "llama3_json": llama3_json,
}
AUTO, NONE = "auto", "none"
# Some templates add the same suffix to all markers: '<think{}>'.format(SUFFIX).
_SUFFIX = re.compile(r"""set\s+(\w+)\s*=\s*(["'])([^"'{}]*)\2""")
_WITH_SUFFIX = re.compile(r"""(["'])([^"'{}]*)\{\}([^"'{}]*)\1\s*\.\s*format\(\s*(\w+)\s*\)""")
# an output format of these kinds can be a part of a larger grammar
PARTS = ("json", "regex", "choice")


@dataclass(frozen=True)
class AnswerFormat:
    """The form in which one checkpoint writes its answers.

    Attributes:
        name: the model's format of calls, a name in ``FORMATS``; None if the checkpoint's template
            has no calls.
        thought: the markers of reasoning; None if the model writes no reasoning, or if the reader
            of calls also reads the reasoning (``has_channels``).
        token_ids: maps each marker that is a single token to the token's id.
    """

    name: str | None
    thought: Thought | None
    token_ids: Mapping[str, int]

    @property
    def is_plain(self) -> bool:
        """Whether the answer to a request without tools consists only of content."""
        return self.thought is None and self.around is None and not self.has_channels

    @property
    def around(self) -> tuple[str, str] | None:
        """The markers before and after the text of an answer; None if the format has no such
        markers.
        """
        return None if self.name is None else getattr(FORMATS[self.name], "AROUND", None)

    @property
    def has_channels(self) -> bool:
        """Whether the model writes to channels. If true, one reader reads calls and reasoning."""
        return self.name == "gpt_oss"

    def structured(
        self,
        form: StructuredOutputs | None,
        tools: Tools | None,
        strict: Container[str] = (),
        *,
        is_required: bool = False,
        is_parallel: bool = True,
    ) -> StructuredOutputs | None:
        """Return the output format of the whole answer: it consists of calls, or of content in the
        output format ``form``. Return None if any answer is allowed.

        Args:
            form: the output format of the content; None for any text.
            tools: the tools that may be called; None if no tool may be called.
            strict: names of tools whose arguments must match their schemas.
            is_required: whether the answer must consist of calls.

        Raises:
            UnusableToolError: the format of calls cannot follow the schemas of some strict tools.
            InvalidParameterError: the output format cannot be combined with calls, or the schemas
                of strict tools are too long.
        """
        lark = Lark(self.token_ids)
        # Markers that are not tokens are optional: the model writes them as text, or omits them.
        around = self.around if self.around and all(map(lark.is_token, self.around)) else None
        if tools is None or self.name is None:
            if form is not None and self.has_channels:
                start = gpt_oss.lark_final(lark, lark.form(form))
                return StructuredOutputs(lark=lark.grammar(start))
            if form is not None and around is not None and form.kind in PARTS:
                start = lark_wrapped(lark, around, lark.form(form))
                return StructuredOutputs(lark=lark.grammar(start))
            return form
        module = FORMATS[self.name]
        if form is None and not is_required and not any(name in strict for name in tools):
            return None
        # Check the length first, because copying long schemas takes a long time.
        schemas = [schema for name, schema in tools.items() if name in strict]
        check_structure_length(len(json.dumps(schemas, ensure_ascii=False)))
        each = []
        errors: dict[str, InvalidParameterError] = {}  # errors by the tool's name
        for name, schema in tools.items():
            lark.part(TOOL_PART + name)
            kept = schema or None if name in strict else None
            try:
                each.append(module.lark_call(lark, name, kept))
            except InvalidParameterError as e:
                errors[name] = e
        if errors:
            first = next(iter(errors.values()))
            raise UnusableToolError(str(first), first.param, tuple(errors)) from first
        lark.part("the content")
        found = module.lark_calls(lark, lark.rule(choice_of(each)), several=is_parallel)
        ways = [found] if isinstance(found, str) else found  # some formats allow two ways
        calls = choice_of(ways)
        if is_required:
            # Some templates write line breaks between the reasoning and the first call.
            start = calls if self.has_channels else rf"(/\n{{1,2}}/)? {calls}"
        elif form is None and module.BEGINS:
            start = lark.text_or_calls(each, ways, module.BEGINS, several=is_parallel)
        else:
            content = module.lark_text(lark, tools) if form is None else lark.form(form)
            if self.has_channels:
                content = gpt_oss.lark_final(lark, content)
            if around is not None:
                content = lark_wrapped(lark, around, content)
            start = f"{content} | {calls}"
        return StructuredOutputs(lark=lark.grammar(start), has_free_text=form is None)

    def is_thinking(self, prompt: str, *, continues: bool) -> bool:
        """Return whether a prompt has opened the reasoning of the answer.

        Args:
            prompt: the end of the prompt, special tokens included.
            continues: whether the answer continues the prompt's last message. If false, the prompt
                contains no text of the reasoning.
        """
        if self.thought is None:
            return False
        _, opened, rest = prompt.rpartition(self.thought.begin)
        return bool(opened) and self.thought.end not in rest and (continues or not rest.strip())

    def reader(
        self, tools: Tools | None, *, is_thinking: bool, has_form: bool = False
    ) -> Reader | None:
        """Return a reader of one answer; None if all of the answer is content.

        Args:
            tools: the tools that may be called; None if no tool may be called.
            is_thinking: whether the prompt has already opened the reasoning.
            has_form: whether the text after the reasoning must follow an output format. If true, a
                call within the reasoning is not read as a call, because the output format does not
                restrict the reasoning.
        """
        may_call = tools is not None and self.name is not None
        if not may_call and self.is_plain:
            return None
        read: Callable[[Scanner], Scan[None]] = _copy_all
        if may_call or self.has_channels:
            assert self.name is not None
            read = partial(FORMATS[self.name].read, tools=tools or {})
        if self.around is not None:
            read = partial(read_wrapped, around=self.around, read_answer=read)
        if self.thought is not None:
            calls = None
            if tools is not None and self.name is not None and not has_form:
                module = FORMATS[self.name]
                calls = CallsInThought(module.BEGINS, tools, partial(module.read, tools=tools))
            read = partial(
                read_thought,
                thought=self.thought,
                read_answer=read,
                is_open=is_thinking,
                calls=calls,
            )
        return Reader(read, self.token_ids, holds_space=may_call)


def choose_format(
    template: str | None,
    find_token: Callable[[str], int | None],
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
) -> AnswerFormat:
    """Return the format of a checkpoint's answers.

    Args:
        template: the checkpoint's chat template.
        find_token: a function that returns the id of an added token; None if there is no such
            token.
        tools: a name of ``FORMATS``. "auto" means the format that fits the template, and "none"
            means that no calls are read.
        reasoning: "auto" means the markers that the template contains, "think" means ``<think>``,
            and "none" means that no reasoning is read.
    """
    name = None if tools in (AUTO, NONE) else tools
    if template is not None:
        template = with_suffixes(template)
    if tools == AUTO and template is not None:
        name = next((name for name, each in FORMATS.items() if each.fits(template)), None)
    thought = THOUGHTS[0] if reasoning == "think" else None
    if reasoning == AUTO and template is not None and name != "gpt_oss":
        thought = find_thought(template)
    markers = set() if thought is None else {thought.begin, thought.end}
    if name is not None:
        markers |= set(FORMATS[name].MARKERS)
    found = {text: find_token(text) for text in markers}
    return AnswerFormat(name, thought, {text: i for text, i in found.items() if i is not None})


def with_suffixes(template: str) -> str:
    """Some templates add a suffix to their markers with an expression. Return the template with the
    complete markers in place of these expressions.
    """
    suffixes = {name: value for name, _, value in _SUFFIX.findall(template)}

    def write(found: re.Match[str]) -> str:
        quote, before, after, name = found.groups()
        if name not in suffixes:
            return found.group()
        return f"{quote}{before}{suffixes[name]}{after}{quote}"

    return _WITH_SUFFIX.sub(write, template)


def _copy_all(scanner: Scanner) -> Scan[None]:
    yield from scanner.copy_until([], scanner.content)
