"""Command-line flags made from EngineConfig: its fields, types, defaults and help texts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from eyas.config import EngineConfig

NUM_FIRST = 2  # model and draft, which the help shows before a command's own flags


def engine_flags(*, without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Give a command the argument MODEL and a flag for every other setting of the engine.

    The command's parameter `config` is replaced: it is called with an EngineConfig of what the
    user gave. without: settings that the command decides by itself.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "config"]
        settings = {
            name: parameter
            for name, parameter in setting_parameters().items()
            if name not in without
        }

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in settings}
            return command(config=EngineConfig(**given), **values)

        engine = list(settings.values())
        parameters = [*engine[:NUM_FIRST], *own, *engine[NUM_FIRST:]]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def setting_parameters() -> dict[str, inspect.Parameter]:
    """A typer parameter for every field of EngineConfig, by field name; `model` comes first."""
    hints = get_type_hints(EngineConfig)
    return {
        field.name: _parameter(field, hints[field.name])
        for field in dataclasses.fields(EngineConfig)
    }


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    flag, text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
    kind = inspect.Parameter.KEYWORD_ONLY
    if field.default is dataclasses.MISSING:
        argument = _annotated(hint, typer.Argument(metavar=field.name.upper(), help=text))
        return inspect.Parameter(field.name, kind, annotation=argument)
    inner, is_optional = _without_none(hint)
    declared = [f"{flag}/--no-{flag[2:]}"] if inner is bool else [flag]
    more: dict[str, Any] = {}
    if get_origin(inner) is tuple:
        assert get_args(inner) == (int, ...), f"no flag is known for {field.name}: {hint}"
        more = {"parser": functools.partial(parse_integers, flag), "metavar": "INT,INT,..."}
        inner = str
    else:
        known = inner in (bool, int, float, str) or get_origin(inner) is Literal
        assert known, f"no flag is known for {field.name}: {hint}"
    option = typer.Option(*declared, help=text, **more)
    annotation = _annotated(inner | None if is_optional else inner, option)
    return inspect.Parameter(field.name, kind, default=field.default, annotation=annotation)


def _annotated(hint: Any, information: Any) -> Any:
    return Annotated[hint, information]


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type beside None in `X | None`, and whether None was there."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    inner = [member for member in get_args(hint) if member is not type(None)]
    assert len(inner) == 1, f"no flag is known for {hint}"
    return inner[0], len(inner) < len(get_args(hint))


def parse_integers(flag: str, text: Any) -> tuple[int, ...]:
    """ "2,15,27" as (2, 15, 27). Raises typer.BadParameter that shows how to write it."""
    if isinstance(text, tuple):  # a default
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of integers; write it like {flag} 2,15,27"
        ) from None
