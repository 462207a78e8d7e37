"""Command-line flags made from settings dataclasses: their fields, types, defaults and texts."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from eyas.config import EngineConfig
from eyas.types import SamplingParams

Command = Callable[..., Any]

NUM_FIRST = 2  # model and draft, which the help shows before a command's own flags

# Flags of SamplingParams, which has no texts of its own for them.
SAMPLING_HELP = {
    "max_tokens": "New tokens at most.",
    "min_tokens": "Before that many tokens no end token is chosen.",
    "temperature": "0 is greedy.",
    "top_k": "Choose among the k most probable tokens; 0 is off.",
    "top_p": "Choose among the most probable tokens that make up this share; 1 is off.",
    "min_p": "Choose among tokens of at least this share of the best one's probability; 0 is off.",
    "presence_penalty": "Lowers tokens that were generated before, by this much once.",
    "frequency_penalty": "Lowers tokens that were generated before, by this much each time.",
    "repetition_penalty": "Divides the logits of tokens that were there before; 1 is off.",
    "seed": "Makes sampled text repeatable, the same with and without a draft.",
    "stop_token_ids": "Further tokens to stop at.",
    "stop": "A text that ends the answer, without being part of it; may be repeated.",
    "ignore_eos": "Go on after the model's own end tokens.",
}


# (what the user gave of the replaced settings, values of the command's own parameters) -> settings
Complete = Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]


def engine_flags(
    *, without: Collection[str] = (), complete: Complete | None = None
) -> Callable[[Command], Command]:
    """Give a command the argument MODEL and a flag for every other setting of the engine.

    The command's parameter `config` is replaced: it is called with an EngineConfig of what the
    user gave. without: settings that the command decides by itself. complete: adds settings that
    follow from the command's own parameters; MODEL may be left out then.
    """
    texts = {f.name: f.metadata["help"] for f in dataclasses.fields(EngineConfig)}
    kept = {name: text for name, text in texts.items() if name not in without}
    parameters = flag_parameters(EngineConfig, kept)
    if complete is not None:
        model = typer.Argument(metavar="[MODEL]", help=kept["model"], show_default=False)
        annotation = _annotated(str | None, model)
        parameters["model"] = parameters["model"].replace(default=None, annotation=annotation)
    return _replace("config", EngineConfig, parameters, NUM_FIRST, complete)


def sampling_flags(**defaults: Any) -> Callable[[Command], Command]:
    """Give a command flags for sampling in place of its parameter `params`.

    defaults: the command's own, where they are not those of SamplingParams.
    """
    parameters = flag_parameters(SamplingParams, SAMPLING_HELP, defaults)
    return _replace("params", SamplingParams, parameters, 0)


def settings_flags(name: str, settings: type) -> Callable[[Command], Command]:
    """Give a command flags for the fields of a dataclass in place of its parameter `name`."""
    texts = {f.name: f.metadata["help"] for f in dataclasses.fields(settings)}
    return _replace(name, settings, flag_parameters(settings, texts), 0)


def _replace(
    name: str,
    settings: type,
    parameters: Mapping[str, inspect.Parameter],
    num_first: int,
    complete: Complete | None = None,
) -> Callable[[Command], Command]:
    """Replace a command's parameter `name` by those that an instance of `settings` is made of;
    num_first of them come before the command's own."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != name]
        shown = list(parameters.values())
        shown = [*shown[:num_first], *own, *shown[num_first:]]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            given = {field: values.pop(field) for field in parameters}
            given = {field: _frozen(value) for field, value in given.items() if value is not None}
            if complete is not None:
                given = complete(given, values)
            return command(**values, **{name: settings(**given)})

        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in shown}
        return run

    return decorate


def flag_parameters(
    settings: type, texts: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> dict[str, inspect.Parameter]:
    """A typer parameter for each field of a dataclass that has a help text, by field name.

    Fields without a default are arguments. Lists of numbers are written 2,15,27, lists of texts
    by repeating the flag; what is on or undecided by default has --name and --no-name; a Literal
    lists its choices.
    """
    hints = get_type_hints(settings)
    own = defaults or {}
    return {
        field.name: _parameter(
            field.name,
            hints[field.name],
            own.get(field.name, field.default),
            texts[field.name],
            alias=field.metadata.get("alias"),
        )
        for field in dataclasses.fields(settings)
        if field.name in texts
    }


def _parameter(
    name: str, hint: Any, default: Any, text: str, *, alias: str | None
) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    if default is dataclasses.MISSING:
        argument = typer.Argument(metavar=name.upper(), help=text)
        return inspect.Parameter(name, kind, annotation=_annotated(hint, argument))
    flag = f"--{name.replace('_', '-')}"
    inner, is_optional = _without_none(hint)
    declared = flag
    more: dict[str, Any] = {}
    if inner is bool and (is_optional or default):
        declared = f"{flag}/--no-{flag[2:]}"
    elif get_origin(inner) is tuple:
        element, *rest = get_args(inner)
        assert element in (int, float, str) and rest == [...], f"no flag for {name}: {hint}"
        if element is str:
            inner = list[str]
        else:
            inner, more = str, number_list(flag, element)
        default, is_optional = default or None, True  # an empty default is shown as none
    else:
        known = inner in (bool, int, float, str) or get_origin(inner) is Literal
        assert known, f"no flag for {name}: {hint}"
    names = (declared,) if alias is None else (declared, alias)
    option = typer.Option(*names, help=text, **more)
    annotation = _annotated(inner | None if is_optional else inner, option)
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _annotated(hint: Any, information: Any) -> Any:
    return Annotated[hint, information]


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type beside None in `X | None`, and whether None was there."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    inner = [member for member in get_args(hint) if member is not type(None)]
    assert len(inner) == 1, f"no flag for {hint}"
    return inner[0], len(inner) < len(get_args(hint))


def number_list(flag: str, kind: type[int] | type[float]) -> dict[str, Any]:
    """What typer.Option needs for numbers with commas between them, "2,15,27" as (2, 15, 27)."""
    word, example = ("INT", "2,15,27") if kind is int else ("FLOAT", "0.8,0.7")

    def numbers(text: Any) -> tuple[float, ...]:
        if isinstance(text, tuple):  # a default
            return text
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is no list of numbers; write it like {flag} {example}"
            ) from None

    return {"parser": numbers, "metavar": f"{word},{word},..."}
