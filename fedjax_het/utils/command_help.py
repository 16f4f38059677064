"""Help and shell completion of command lines, which tyro prints from the options of a record."""

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from fedjax_het.utils.command_line import Option, get_options, list_item_type, parse_flags
from fedjax_het.utils.config import union_members

HELP_ALL_FLAG = "--help-all"
HELP_FLAGS = ("-h", "--help", HELP_ALL_FLAG)
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH", bool: "BOOL"}


class HelpLayout(NamedTuple):
    """How the help of a command presents its options."""

    groups: Mapping[str, Sequence[str]] = {}
    """Fields of each named group; the other fields stand under "options"."""
    rare: Sequence[str] = ()
    """Fields that only `--help-all` lists."""
    defaults: Mapping[str, str] = {}
    """Texts for defaults that depend on other settings, by field."""
    metavars: Mapping[str, str] = {}
    """Placeholders of values, by field, where the type's own placeholder is too vague."""
    choices: Mapping[str, Sequence[str]] = {}
    """Values that a shell completes, by field."""
    extra_flags: Mapping[str, tuple[type, str]] = {}
    """Type and help text, by name, of flags that are parsed elsewhere."""


def print_help(
    config_class: type,
    *,
    prog: str,
    description: str | None = None,
    layout: HelpLayout | None = None,
    include_rare: bool = True,
) -> NoReturn:
    """Print the help of a command.

    Args:
      config_class: record whose fields are the flags.
      prog: name of the command.
      description: first paragraphs (default: the docstring of the record).
      layout: groups, rare options and placeholders (default: one group with every option).
      include_rare: whether rare options are listed.

    Raises:
      SystemExit: with status 0, always.
    """
    import tyro

    tyro.cli(
        make_help_class(config_class, layout or HelpLayout(), include_rare=include_rare),
        args=["--help"],
        prog=prog,
        description=wrap_description(description or config_class.__doc__ or ""),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    raise SystemExit(0)


def wrap_description(text: str) -> str:
    """Return the paragraphs of a text in lines of 79 characters, which tyro prints unchanged."""
    paragraphs = [" ".join(text.split()) for text in inspect.cleandoc(text).split("\n\n")]
    # tyro joins a line that begins with a letter to the line before it.
    return "\n".join(
        textwrap.fill(text, 79, initial_indent=" ", subsequent_indent=" ") for text in paragraphs
    )


def make_help_class(config_class: type, layout: HelpLayout, *, include_rare: bool) -> Any:
    """Return a dataclass from which tyro prints a command's help or completes its flags."""
    import tyro

    positional: list[Any] = []
    groups: dict[str, list[Any]] = {title: [] for title in ("", *layout.groups)}
    titles = {name: title for title, names in layout.groups.items() for name in names}
    for flag, (flag_type, text) in layout.extra_flags.items():
        mark = tyro.conf.arg(
            name=flag, help=text, help_behavior_hint="", metavar=format_metavar(flag_type)
        )
        value_type: Any = (
            tyro.conf.FlagCreatePairsOff[bool] if flag_type is bool else flag_type | None
        )
        default = dataclasses.field(default=False if flag_type is bool else None)
        groups[""].append((flag.replace("-", "_") + "_", Annotated[value_type, mark], default))
    for option in get_options(config_class).values():
        mark = tyro.conf.arg(
            name=None if option.is_positional else option.flag[2:],
            help=option.help,
            metavar=format_metavar(option.annotation, layout.metavars.get(option.name)),
            help_behavior_hint=layout.defaults.get(option.name, _format_default(option)),
        )
        value_type = Annotated[_get_help_type(option, layout.choices.get(option.name, ())), mark]
        default_value = option.default if option.annotation is bool else None
        default = dataclasses.field(default=default_value)
        if option.is_positional and option.default is dataclasses.MISSING:
            positional.insert(0, (option.name, Annotated[value_type, tyro.conf.Positional]))
        elif option.is_positional:
            positional.append((option.name, Annotated[value_type, tyro.conf.Positional], default))
        elif include_rare or option.name not in layout.rare:
            groups[titles.get(option.name, "")].append((option.name, value_type, default))
    root = [*positional, *groups.pop("")]
    for title, fields in groups.items():
        if fields:
            group: Any = dataclasses.make_dataclass("Group", fields)
            default = dataclasses.field(default_factory=group)
            mark = tyro.conf.arg(name=title)
            root.append((title.replace(" ", "_"), Annotated[group, mark], default))
    help_class: Any = dataclasses.make_dataclass(config_class.__name__, root)
    help_class.__doc__ = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")[0]
    return help_class


def _get_help_type(option: Option, choices: Sequence[str]) -> Any:
    """Return the type that shows tyro how many values an option takes, and which."""
    import tyro

    if option.annotation is bool:
        return bool if option.default else tyro.conf.FlagCreatePairsOff[bool]
    members = union_members(list_item_type(option.annotation) or option.annotation)
    literals = [get_args(member) for member in members if get_origin(member) is Literal]
    if literals and len(members) == 1:
        (choices,) = literals
    item_type: Any = Literal[tuple(choices)] if choices else Path if Path in members else str
    is_list = list_item_type(option.annotation) is not None or get_origin(option.annotation) is dict
    return tuple[item_type, ...] | None if is_list else item_type | None


def format_metavar(annotation: Any, item_metavar: str | None = None) -> str | None:
    """Return the placeholder of a value in the help, e.g. `N` for a whole number.

    Args:
      annotation: type of the value.
      item_metavar: placeholder of the value, or of one item of a list (default: the type's own).

    Returns:
      The placeholder; None for a flag without a value.
    """
    if annotation is bool:
        return None
    if get_origin(annotation) is dict:
        is_list = get_origin(get_args(annotation)[1]) is tuple
        return "NAME=VALUE,..." if is_list else "NAME=VALUE"
    item_type = list_item_type(annotation)
    words = [item_metavar] if item_metavar else []
    for member in [] if item_metavar else union_members(item_type or annotation):
        base_type = get_args(member)[0] if get_origin(member) is Annotated else member
        if get_origin(base_type) is Literal:
            values = ",".join(map(str, get_args(base_type)))
            words.append("{" + values + "}" if "," in values else values)
        elif base_type is not NoneType:
            words.append(_METAVARS.get(base_type, "VALUE"))
    return "|".join(words) + ("..." if item_type is not None else "")


def _format_default(option: Option) -> str:
    """Return the text after an option's help: its default, unless the help explains it."""
    default = option.default
    if default is dataclasses.MISSING:
        return "(required)"
    if default is False or default in (None, (), {}, ""):
        return ""
    return f"(default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def parse_arguments(
    config_class: type,
    argv: Sequence[str] | None,
    *,
    description: str | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the record of a program's command line, or print the program's help.

    Args:
      config_class: record whose fields are the flags.
      argv: words of the command line (default: those of this process).
      description: first paragraphs of the help (default: the docstring of the record).
      defaults: values, by field, that replace the defaults of the record.

    Raises:
      ConfigError: for words that the record does not take.
      SystemExit: with status 0, if the help is printed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP_FLAGS for word in argv):
        texts = {name: f"(default: {value})" for name, value in defaults.items()}
        layout = HelpLayout(defaults=texts)
        print_help(config_class, prog=sys.argv[0], description=description, layout=layout)
    return config_class(**{**defaults, **parse_flags(config_class, argv)})
