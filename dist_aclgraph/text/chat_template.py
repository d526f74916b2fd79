"""ChatTemplate: a checkpoint's own template, rendered in a child process with limits.

Jinja's sandbox limits neither time nor memory: one filter can compute for hours, or fill the memory
of the service. So templates run in a separate process (``template_process``), whose time and memory
the kernel limits. A process serves one render at a time. The next render reuses an idle process, or
starts another process.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from dist_aclgraph.errors import InvalidParameterError, ModelError
from dist_aclgraph.shapes.json_files import read_json_object, read_text
from dist_aclgraph.text import template_process
from dist_aclgraph.text.child_process import ChildProcess, close_all
from dist_aclgraph.text.message_form import read_form

MAX_PROCESSES = 4


@dataclass(frozen=True)
class RenderLimits:
    """The limits of one render.

    Attributes:
        cpu_s: CPU time in seconds; published templates need milliseconds.
        wait_s: time in seconds for which the parent waits for the reply before it kills the
            process.
        memory_bytes: address space of the process that renders.
        chars: length of the rendered prompt in characters.
    """

    cpu_s: float = 4.0
    wait_s: float = 20.0
    memory_bytes: int = 512 << 20
    chars: int = 4 << 20


@dataclass(frozen=True)
class ChatOptions:
    """Options for making a prompt from messages. The options correspond to arguments of
    ``apply_chat_template`` in transformers.

    Attributes:
        add_generation_prompt: whether the prompt ends with the beginning of the assistant's
            message.
        continue_final_message: whether the output continues the text of the last message.
        template: the name of one of the checkpoint's templates. None selects the template
            "tool_use" if it exists and the request has tools; otherwise the template "default".
        variables: further variables of the template, such as ``enable_thinking``.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


DEFAULT = ChatOptions()


class ChatTemplate:
    """Renders messages. Safe to share between threads; owns the processes that render."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: RenderLimits = RenderLimits(),
    ) -> None:
        """Check the syntax of templates. No process is started before the first render.

        Args:
            sources: templates by name.
            special_tokens: special tokens by the names that templates use.

        Raises:
            jinja2.TemplateError: the syntax is wrong.
        """
        environment = template_process.make_environment()
        self._forms = {
            name: read_form(source, environment.parse(source)) for name, source in sources.items()
        }
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._limits = limits
        self._permits = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[ChildProcess] = []
        weakref.finalize(self, close_all, self._idle)

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = DEFAULT) -> str:
        """Return the prompt that the template makes of the messages.

        Raises:
            InvalidParameterError: the template refuses the messages, cannot render them, or
                reaches a limit.
        """
        if options.continue_final_message and options.add_generation_prompt:
            raise InvalidParameterError(
                "continue_final_message continues the last message, add_generation_prompt begins a "
                "new one; set one of them to false",
                "continue_final_message",
            )
        name = self._name_for(options)
        form = self._forms[name]
        for i, message in enumerate(messages):
            if not form.knows(role := str(message.get("role"))):
                place = f"messages.{i}.role"
                raise InvalidParameterError(
                    f"{place} is {role!r:.80}, which the chat template does not know; use system, "
                    "user, assistant or tool",
                    place,
                )
        own = {
            "messages": form.adapt_all(messages, options.tools),
            "tools": options.tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        if taken := sorted(own.keys() & options.variables.keys()):
            raise InvalidParameterError(
                f"chat_template_kwargs must not hold {taken[0]!r}", "chat_template_kwargs"
            )
        # SmolLM3's template reads the tools from a variable with this name.
        named = {"xml_tools": options.tools} if options.tools else {}
        request = {
            "template": self.sources[name],
            "variables": {**self._special_tokens, **named, **options.variables, **own},
            "continues": options.continue_final_message,
        }
        with self._permits:
            process = self._take_process()
            try:
                reply = self._ask(process, request)
            except BaseException:
                process.close()
                raise
            self._idle.append(process)
        if "error" in reply:
            raise InvalidParameterError(reply["error"], "messages")
        return reply["text"]

    def _name_for(self, options: ChatOptions) -> str:
        name = options.template
        if name is None:
            name = "tool_use" if options.tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            names = ", ".join(sorted(self.sources))
            raise InvalidParameterError(
                f"chat_template is {name!r:.80}; only templates of the checkpoint are rendered, "
                f"which has: {names}",
                "chat_template",
            )
        return name

    def _ask(self, process: ChildProcess, request: Mapping[str, Any]) -> dict[str, str]:
        """Return the process's reply to one render.

        Raises:
            InvalidParameterError: the process reached a limit; the caller must close the process.
        """
        try:
            return process.ask(request)
        except TimeoutError:
            why = f"takes more than {self._limits.wait_s:g} s"
        except (EOFError, OSError):
            why = self._why_ended(process.wait())
        raise InvalidParameterError(
            f"the chat template {why}; send shorter messages, or correct the template", "messages"
        )

    def _why_ended(self, code: int) -> str:
        """Return the part of an error message that says why the template's process ended with this
        exit code.
        """
        if code == -signal.SIGPROF:
            return f"takes more than {self._limits.cpu_s:g} s of processor time"
        if code == template_process.OUT_OF_MEMORY:
            return f"takes more than {self._limits.memory_bytes >> 20} MiB of memory"
        return f"has ended the process that renders it (exit code {code})"

    def _take_process(self) -> ChildProcess:
        try:
            # ``pop`` is atomic, so no other thread gets the same process
            process = self._idle.pop()
        except IndexError:
            imports, first = (jinja2, markupsafe), asdict(self._limits)
            return ChildProcess(template_process, imports, first, self._limits.wait_s)
        if process.is_alive():
            return process
        process.close()  # the system's OOM killer may have killed the process
        return self._take_process()


def read_chat_template(
    directory: Path,
    described: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    *,
    path: Path | None = None,
) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None if there is no template.

    Args:
        path: a file whose template replaces the checkpoint's templates; None if no file is
            configured.
        described: the content of the checkpoint's tokenizer_config.json.
        special_tokens: the checkpoint's special tokens by name.

    Raises:
        ModelError: the template cannot be read, or does not compile.
    """
    sources: dict[str, Any]
    if path is not None:
        sources = {"default": read_text(path)}
    else:
        own, other = described.get("chat_template"), directory / "chat_template.json"
        # models that read images store their template in this file
        if own is None and other.exists():
            own = read_json_object(other).get("chat_template")
        sources = _sources(directory, own)
    if not sources:
        return None
    for source in sources.values():
        if not isinstance(source, str):
            raise ModelError(
                f"the chat template in {path or directory} is {source!r:.80}; it must be a text"
            )
    try:
        return ChatTemplate(sources, special_tokens)
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as e:
        raise ModelError(f"the chat template in {path or directory} does not compile: {e}") from e


def _sources(directory: Path, described: Any) -> dict[str, Any]:
    """Return templates by name; template files take precedence over tokenizer_config.json."""
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    own = directory / "chat_template.jinja"
    if own.exists():
        files["default"] = own
    if files:
        return {name: read_text(path) for name, path in files.items()}
    if isinstance(described, list):
        named = [item for item in described if isinstance(item, dict)]
        return {str(item.get("name")): item["template"] for item in named if "template" in item}
    if isinstance(described, dict):
        return {str(name): template for name, template in described.items()}
    return {} if described is None else {"default": described}
