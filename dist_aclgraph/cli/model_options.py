"""vLLM's options on the command line, and the configuration that results from them."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from dist_aclgraph.cli.exit_codes import tell
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.vllm_options import (
    OPTIONS,
    REFUSED,
    REFUSED_SHORT,
    SAME,
    Option,
    is_harmless,
    is_switch,
    refusal,
)

if TYPE_CHECKING:
    from dist_aclgraph.config import Config

_MAPPINGS = [name for name, option in OPTIONS.items() if option.kind is dict]
OF_SERVICE = ("served_model_name", "host", "port", "uds", "allowed_origins")


class ModelCommand(TyperCommand):
    """A command with vLLM's options. For an unknown option, the error suggests the most similar
    known option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(_known_arguments(args)))
        except ConfigError as e:
            raise typer.Exit(tell(e)) from None


def _known_arguments(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments in the form that the command declares, without the options that have no
    effect.

    An option with several values is yielded several times, each time with one value. An option can
    set one key of a mapping (``--compilation-config.cudagraph_mode NONE``). All such options of a
    mapping are joined into one option, which is yielded last.

    Raises:
        ConfigError: this package's configuration has no key for an option.
    """
    left = deque(args)
    parts: dict[str, dict[str, Any]] = {}
    # An option reads several values only if the model is the first argument. Otherwise the option
    # could read the model as one more value.
    is_model_first = bool(args) and not args[0].startswith("-")
    while left:
        argument = re.sub(r"^-O(?=\d)", "-O=", left.popleft())  # -O3
        dashed, equals, value = argument.partition("=")
        whole, _, part = dashed.partition(".")
        base, is_on = _option_of(whole)
        if part and base in _MAPPINGS:
            value = value if equals else left.popleft() if left else ""
            _set_part(parts.setdefault(base, {}), part.split("."), value)
        elif base in REFUSED and base not in SAME:
            if is_switch(base):
                value = value.capitalize() if value else str(is_on)
            elif not value and left:
                value = left.popleft()
            if not is_harmless(base, value):
                raise ConfigError(refusal(base))
        elif base not in OPTIONS or part or not (equals or left or OPTIONS[base].kind is bool):
            yield argument
        elif OPTIONS[base].kind is bool:
            is_on = is_on == (value.lower() != "false")
            is_known = not value or value.lower() in ("true", "false")
            yield f"--{'' if is_on else 'no-'}{_dashed(base)}" if is_known else argument
        else:
            option = OPTIONS[base]
            value = value if equals else left.popleft()
            values = [_plain_int(value) if option.kind is int else value]
            if option.kind in (tuple, list) and is_model_first:
                while left and not left[0].startswith("-") and "=" not in left[0]:
                    values.append(left.popleft())
            if option.kind is list:
                values = [",".join(each.strip("[]") for each in values)]
            for each in values:
                yield from (f"--{_dashed(base)}", each)
    for base, mapping in parts.items():
        yield from (f"--{_dashed(base)}", json.dumps(mapping))


def _option_of(dashed: str) -> tuple[str, bool]:
    """Return the name of the option that an argument sets, and whether the argument turns the
    option on. The name is empty if the argument sets none of vLLM's options.
    """
    name = dashed.lstrip("-").replace("-", "_")
    is_long = dashed.startswith("--")
    if is_long and name.removeprefix("no_") in REFUSED | OPTIONS:
        return name.removeprefix("no_"), not name.startswith("no_")
    if dashed in REFUSED_SHORT:
        return REFUSED_SHORT[dashed], True
    found = [each for each, option in OPTIONS.items() if name in option.short]
    return (found[0] if found and dashed.startswith("-") else ""), True


def _set_part(mapping: dict[str, Any], names: Sequence[str], value: str) -> None:
    """Set an item of nested mappings. The value is JSON or a text."""
    *outer, last = names
    for name in outer:
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict):
            raise ConfigError(f"{'.'.join(names)}: {name} is {mapping!r:.80}, not a mapping")
    try:
        mapping[last] = json.loads(value)
    except ValueError:
        mapping[last] = value


def _plain_int(text: str) -> str:
    """Convert an integer with a unit (1k is 1000, 1K is 1024) to a plain integer, by vLLM's rules.
    Any other text is not changed.
    """
    if text == "auto":
        return "-1"
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])|(\d+)([KMG])", text)
    if found is None:
        return text
    number, unit, whole, binary = found.groups()
    if binary:
        return str(int(whole) << 10 * ("KMG".index(binary) + 1))
    return str(int(Decimal(number) * 1000 ** ("kmg".index(unit) + 1)))


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def with_model_options(*, serves: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add vLLM's options to a command. The command's argument ``options`` contains the options'
    values.

    Args:
        serves: whether the command starts an HTTP service. If false, the command accepts the
            options of the service, but its help does not show these options.
    """
    names = [*OPTIONS, *SAME]
    hidden = {*SAME} if serves else {*SAME, *OF_SERVICE}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            command(**given, options=options)

        own = inspect.signature(command, eval_str=True)
        kept = [each for name, each in own.parameters.items() if name != "options"]
        added = [_parameter(name, is_hidden=name in hidden) for name in names]
        wrapped.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return wrapped

    return decorate


def load_model(
    source: str | Path,
    overrides: Iterable[str] | None,
    options: Mapping[str, Any] | None = None,
) -> Config:
    """Load the configuration that the arguments of a command describe.

    Raises:
        ConfigError: an argument is not allowed.
    """
    from dist_aclgraph.config import load_with_options, parse_overrides

    overrides = list(overrides or ())
    extra = [argument for argument in overrides if "=" not in argument]
    if extra and (options or {}).get("served_model_name"):
        raise ConfigError(
            f"{extra[0]!r} is not of the form key=value; if --served-model-name has several names, "
            "write the model before all options"
        )
    values = {
        name: _value(name, value)
        for name, value in (options or {}).items()
        if value is not None and value != []
    }
    return load_with_options(source, values, parse_overrides(overrides))


def load_local_model(
    source: str,
    overrides: Iterable[str] | None,
    options: Mapping[str, Any] | None = None,
    *,
    weights: bool = True,
) -> Config:
    """Load a configuration. If its model is not on this machine, download the model from its hub.

    Args:
        weights: whether the command reads weights. If false, no weights are downloaded.
    """
    from dist_aclgraph.files.hub import with_local_model

    return with_local_model(load_model(source, overrides, options), weights=weights)


def show_and_save(config: Config, source: str, is_changed: bool, save: Path | None) -> None:
    """Print the configuration if options changed it, or if ``source`` is not a file. If the path
    ``save`` is given, also write the configuration to this path.

    Raises:
        ConfigError: the file cannot be written.
    """
    from dist_aclgraph.config import to_yaml

    text = to_yaml(config)
    if is_changed or not isfile(source):
        sys.stderr.write(f"The configuration:\n\n{text}\n")
    if save is not None:
        try:
            save.write_text(text)
        except OSError as e:
            raise ConfigError(f"the configuration cannot be saved as {save}: {e.strerror}") from e
        sys.stderr.write(f"It is saved as {save}.\n")


def _parameter(name: str, *, is_hidden: bool) -> inspect.Parameter:
    """Return a command's parameter for an option."""
    option = OPTIONS.get(name) or Option(SAME[name], str)
    dashed = _dashed(name)
    names = [f"--{dashed}", *(f"{dash}{each}" for each in option.short for dash in ("--", "-"))]
    kind: Any = option.kind
    words = f"as {option.key}" + (f": {option.note}" if option.note else "")
    if kind is bool:
        names[0] += f"/--no-{dashed}"
    metavar = {list: "N,N,...", dict: "JSON", tuple: "NAME ..."}.get(kind)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, *names, help=words, metavar=metavar, hidden=is_hidden),
        annotation=(list[str] if kind is tuple else str if metavar else kind) | None,
    )


def _value(name: str, given: Any) -> Any:
    from dist_aclgraph.config import parse_overrides

    kind = str if name in SAME else OPTIONS[name].kind
    if kind is list:
        given = f"[{given.strip('[]')}]"
    return parse_overrides([f"{name}={given}"])[name] if kind in (list, dict) else given
