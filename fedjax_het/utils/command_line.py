"""Command lines of dataclasses.

Each field of a dataclass is a flag. tyro splits the words, and the annotations of the fields
validate them. tyro also prints the help. An invalid value, an unknown flag, and a repeated flag are
errors of one line. The line has the flag as the user wrote it, its value and the valid values.
"""

import contextlib
import dataclasses
import inspect
import io
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

import tyro

from fedjax_het.utils.config import (
    MAX_FLOAT32,
    field_types,
    get_field_docs,
    is_supported_annotation,
    parse_literal,
    split_bounds,
    union_members,
    validate,
)
from fedjax_het.utils.env import has_color
from fedjax_het.utils.errors import (
    ConfigError,
    display_names,
    format_value,
    require,
    require_name,
)

HELP_ALL_FLAG = "--help-all"
"""Flag that prints the help of all options."""
HELP_FLAGS = ("-h", "--help", HELP_ALL_FLAG)
"""Flags that print a help text."""
_FLAG_PATTERN = re.compile(r"--?(?!inf$)[A-Za-z]")  # -inf is a number
_VALUE_SEPARATOR = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')  # an even number of quotes follows
_WORD_LIST = re.compile(r"\[([^][\"]+)\]")
_WORD_LISTS = re.compile(rf"{_WORD_LIST.pattern}(,{_WORD_LIST.pattern})*")
_CONSTANTS = {"None": None, "True": True, "False": False}
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH", bool: "BOOL"}
_Occurrences = tuple[tuple[str, ...], ...]  # the words after each occurrence of a flag


class Option(NamedTuple):
    """A flag, or an argument without a flag, of one field of a dataclass."""

    name: str
    """Name of the field."""
    flag: str
    """Flag of the field, e.g. `--num-clients`; the field's name if it has no flag."""
    annotation: Any
    """Type of the value, without the marks for tyro."""
    default: Any
    """Value of an omitted flag; `dataclasses.MISSING` if the flag is required."""
    help: str
    """Text after the field in the source of the dataclass."""
    group: str = ""
    """Title of the group of options in which the help lists the option."""
    hint: str | None = None
    """Text on the default in the help; None for the text of `default`."""
    metavar: str = ""
    """Placeholder of the value in the help; "" for the placeholder of the type."""
    convert: Callable[[Any], Any] | None = None
    """Function that converts the words of a command line, and the value of a YAML file; it is the
    metadata `convert` of the field."""

    @property
    def is_positional(self) -> bool:
        """Whether the argument has no flag."""
        return self.flag == self.name

    @property
    def is_required(self) -> bool:
        """Whether the argument has no flag and no default."""
        return self.is_positional and self.default is dataclasses.MISSING


def get_options(config_class: type) -> dict[str, Option]:
    """Return the options of a dataclass by the names of its fields.

    Example:
      >>> from dataclasses import dataclass
      >>> from fedjax_het.utils.command_line import get_options
      >>> @dataclass
      ... class Arguments:
      ...     num_clients: int = 10
      >>> get_options(Arguments)["num_clients"].flag
      '--num-clients'
    """
    options, texts = {}, get_field_docs(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name, annotation in field_types(config_class).items():
        marks: list[Any] = []
        if get_origin(annotation) is Annotated and not is_supported_annotation(annotation):
            annotation, *marks = get_args(annotation)
        if tyro.conf.Suppress in marks:
            continue
        field, flag = fields[name], f"--{name.replace('_', '-')}"
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if tyro.conf.Positional in marks:
            flag = name
        elif get_origin(annotation) is dict:  # --option NAME=VALUE sets one of the options
            flag = flag.removesuffix("s")
        convert = field.metadata.get("convert")
        text = texts.get(name, "")
        options[name] = Option(name, flag, annotation, default, text, convert=convert)
    return options


def display_flags(
    config_class: type, extra_names: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which messages name fields by their flags.

    Args:
      config_class: dataclass whose fields are flags; `directory` is named by its `output_dir`.
      extra_names: flags of arguments that have other names in the dataclass.

    Returns:
      The context manager.
    """
    flags = {name: option.flag for name, option in get_options(config_class).items()}
    directory_name = {"directory": flags["output_dir"]} if "output_dir" in flags else {}
    return display_names({**directory_name, **flags, **(extra_names or {})})


# --- parsing


def parse_flags(
    config_class: type,
    argv: Sequence[str],
    *,
    prog: str = "",
    count_hints: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Parse a command line.

    Args:
      config_class: dataclass whose fields are the flags.
      argv: words of the command line. A list may be given in several parts.
      prog: name of the command, whose help messages refer to.
      count_hints: by field, the end of the message on several values of a flag that takes one.

    Returns:
      The given values by field.

    Raises:
      ConfigError: for an unknown flag, a flag without a value or with too many, and a repeated flag
        of one value. Also for a value that the field's annotation does not allow.

    Example:
      >>> from dataclasses import dataclass
      >>> from fedjax_het.utils.command_line import parse_flags
      >>> @dataclass
      ... class Arguments:
      ...     alphas: tuple[float, ...] = ()
      ...     quiet: bool = False
      >>> parse_flags(Arguments, ["--alphas", "0.1", "1", "--quiet"])
      {'alphas': (0.1, 1.0), 'quiet': True}
    """
    options = get_options(config_class)
    flags = [option.flag for option in options.values() if not option.is_positional]
    negations = [f"--no-{o.flag[2:]}" for o in options.values() if o.annotation is bool]
    for word in argv:
        flag = word.partition("=")[0]
        if _FLAG_PATTERN.match(flag) and flag.replace("_", "-") not in (*flags, *negations):
            require_name("flag", flag, flags, listed_by=f"{prog} --help" if prog else "")
    occurrences, loose_words = _split_words(options, argv)
    if loose_words:
        expected = "a value needs a flag before it" if flags else "no word may follow the command"
        hint = f"; see `{prog} --help`" if prog else ""
        raise ConfigError(f"{format_value(' '.join(loose_words))} is unexpected: {expected}{hint}")
    values: dict[str, Any] = {}
    # An argument without a flag takes its word first, which a flag before it then lacks.
    required = [
        (option.flag, occurrences[n]) for n, option in options.items() if option.is_required
    ]
    note = "".join(f"; {word!r} was read as {name}" for name, ((word,),) in required)
    for name, option in options.items():
        is_complete = option.annotation is bool or () not in occurrences[name]
        require(is_complete, option.flag, "", f"a value after it{note}")
    for name, option in options.items():
        if option.annotation is not bool:
            if occurrences[name]:
                values[name] = _convert_words(option, occurrences[name], count_hints.get(name, ""))
        elif flag_words := (*occurrences[name], *occurrences[f"no_{name}"]):
            text = " ".join(itertools.chain(*flag_words))
            require(not any(flag_words), option.flag, text, "no value after it")
            require(len(flag_words) == 1, option.flag, text, "it once")
            values[name] = bool(occurrences[name])
    return values


def _split_words(
    options: Mapping[str, Option], argv: Sequence[str]
) -> tuple[dict[str, _Occurrences], list[str]]:
    """Return the words of each flag by field, and the words that belong to no flag."""
    fields: list[Any] = []
    required = [name for name, option in options.items() if option.is_required]
    for name, option in options.items():
        if option.is_required:  # tyro keeps one word for it, whatever list stands before it
            fields.append((name, tyro.conf.Positional[str]))
        elif option.is_positional:
            fields.append((name, tyro.conf.Positional[tuple[str, ...]], ()))
        else:
            flags = {name: option.flag[2:]}
            if option.annotation is bool:
                flags[f"no_{name}"] = f"no-{option.flag[2:]}"
            for field_name, flag in flags.items():
                marks = (tyro.conf.arg(name=flag), tyro.conf.UseAppendAction)
                fields.append((field_name, Annotated[(_Occurrences, *marks)], ()))
    parser_class: Any = dataclasses.make_dataclass("Arguments", fields)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            words, loose_words = tyro.cli(
                parser_class, args=argv, add_help=False, return_unknown_args=True
            )
        except SystemExit:  # only such an argument can be missing: flags accept any words
            require(False, required[0], "", "a value")
            raise
    occurrences = vars(words)
    for name, option in options.items():
        if option.is_required:
            occurrences[name] = ((occurrences[name],),)
        elif option.is_positional:
            occurrences[name] = (occurrences[name],) if occurrences[name] else ()
    return occurrences, loose_words


def _convert_words(option: Option, occurrences: _Occurrences, count_hint: str) -> Any:
    """Return the value of a flag from the words after each of its occurrences."""
    flag, annotation = option.flag, option.annotation
    words = list(itertools.chain(*occurrences))
    text = " ".join(words)
    may_be_empty = option.is_positional and not option.is_required
    for word in words:  # a command checks optional arguments itself
        ok = may_be_empty or (word != "" and "\0" not in word)
        require(ok, flag, word, "a value that is not empty")
    if option.convert is not None:
        with display_names({option.name: flag}):
            return option.convert(words)
    if get_origin(annotation) is dict:
        pairs: dict[str, str] = {}
        for word in words:
            name, _, value = word.partition("=")
            require(bool(name and value), flag, word, "NAME=VALUE, e.g. prox_mu=0.01")
            seen = f"it once; it is {pairs.get(name)!r} already"
            require(name not in pairs, f"{flag} {name}", value, seen)
            pairs[name] = value
        return convert_setting(flag, pairs, annotation)
    if list_item_type(annotation) is not None:
        return convert_setting(flag, words, annotation)
    require(len(occurrences) == 1, flag, text, "it once")
    require(len(words) == 1, flag, text, f"one value{count_hint}")
    return convert_setting(flag, words[0], annotation)


def convert_setting(name: str, value: Any, annotation: Any) -> Any:
    """Convert a value from a command line or a YAML file to the type of an annotation.

    Args:
      name: name of the setting in messages.
      value: text, number, bool, list or mapping. Text is converted to the annotation's type.
      annotation: type of the setting. For a list, a single value is a list of one.

    Returns:
      The converted value.

    Raises:
      ConfigError: if the annotation does not allow the value.
    """
    if get_origin(annotation) is dict:
        value = validate(name, value, dict[str, Any])
        item_type = get_args(annotation)[1]
        if list_item_type(item_type) is not None:
            texts = {key: text for key, text in value.items() if isinstance(text, str)}
            value = value | {key: _split_values(text) for key, text in texts.items()}
            for key, text in texts.items():
                require("" not in value[key], f"{name} {key}", text, "a value around each comma")
        return {key: convert_setting(f"{name} {key}", v, item_type) for key, v in value.items()}
    item_type = list_item_type(annotation)
    if item_type is not None:
        items = value if isinstance(value, list) else [value]
        return tuple(convert_setting(name, item, item_type) for item in items)
    value = _parse_word(value, annotation) if isinstance(value, str) else value
    value = validate(name, value, annotation)
    return Path(value) if value is not None and Path in union_members(annotation) else value


def _split_values(text: str) -> list[Any]:
    """Return the values between the commas of a text, e.g. two lists for "[1,2],[a]".

    Commas in double quotes belong to a value.
    """
    values = parse_literal(f"[{text}]") if "[" in text else None
    if isinstance(values, list):
        return values
    if _WORD_LISTS.fullmatch(text):
        lists = (content.split(",") for content in _WORD_LIST.findall(text))
        return [[parse_literal(word.strip()) for word in words] for words in lists]
    return _VALUE_SEPARATOR.split(text)


def _parse_word(word: str, annotation: Any) -> Any:
    """Return the number or constant that a word represents, if the annotation has that type."""
    if annotation is Any:
        return parse_literal(word)
    if bool in union_members(annotation) and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word in _CONSTANTS and annotation is not str:
        return _CONSTANTS[word]
    for member in union_members(annotation):
        base_type, _ = split_bounds(member)
        if base_type in (int, float):
            with contextlib.suppress(ValueError):
                number = base_type(word)
                return number if abs(number) <= MAX_FLOAT32 else word
    return word


def list_item_type(annotation: Any) -> Any:
    """Return the type of a list's items; None for an annotation without a list."""
    lists = [member for member in union_members(annotation) if get_origin(member) is tuple]
    return get_args(lists[0])[0] if lists else None


# --- help


def print_help(
    config_class: type, options: Iterable[Option], *, prog: str, description: str | None = None
) -> NoReturn:
    """Print the help of a command.

    Args:
      config_class: dataclass whose fields are the flags.
      options: options that the help lists.
      prog: name of the command.
      description: first paragraphs (default: the docstring of the dataclass).

    Returns:
      Nothing; the function always raises.

    Raises:
      SystemExit: with status 0, always.
    """
    configure_help_output()
    tyro.cli(
        make_help_class(config_class, options),
        args=["--help"],
        prog=prog,
        description=wrap_description(description or config_class.__doc__ or ""),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )
    raise SystemExit(0)


def configure_help_output() -> None:
    """Print help with colors if stdout has colors, and without boxes if it cannot encode them.

    tyro has no other switch for either than these options.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    tyro._experimental_options["utf8_boxes"] = encoding.lower().startswith("utf")
    tyro._experimental_options["ansi_codes"] = has_color(sys.stdout)


def wrap_description(text: str) -> str:
    """Return the paragraphs of a text in lines of 79 characters, which tyro prints unchanged."""
    # tyro joins a line that begins with a letter to the line before it.
    wrapper = textwrap.TextWrapper(79, initial_indent=" ", subsequent_indent=" ")
    return "\n".join(map(wrapper.fill, inspect.cleandoc(text).split("\n\n")))


def make_help_class(config_class: type, options: Iterable[Option]) -> Any:
    """Create a dataclass from which tyro prints the help of a command.

    Args:
      config_class: dataclass of the command, whose first paragraph becomes the docstring.
      options: options that the help lists.

    Returns:
      The class, with one nested dataclass for each group of options.
    """
    groups: dict[str, list[Any]] = {"": []}
    for option in options:
        groups.setdefault(option.group, []).append(_make_help_field(option))
    root = groups.pop("")
    for title, fields in groups.items():
        group: Any = dataclasses.make_dataclass("Group", fields)
        default = dataclasses.field(default_factory=group)
        annotation = Annotated[group, tyro.conf.arg(name=title)]
        root.append((title.replace(" ", "_"), annotation, default))
    help_class: Any = dataclasses.make_dataclass(config_class.__name__, root, kw_only=True)
    help_class.__doc__ = inspect.cleandoc(config_class.__doc__ or "").partition("\n\n")[0]
    return help_class


def _make_help_field(option: Option) -> tuple[Any, ...]:
    """Return the name, type and default of an option in a class for tyro."""
    item_type = list_item_type(option.annotation)
    help_type: Any = str | None
    if option.annotation is bool:
        help_type = bool if option.default else tyro.conf.FlagCreatePairsOff[bool]
    elif item_type is not None or get_origin(option.annotation) is dict:
        help_type = tuple[str, ...] | None
    mark = tyro.conf.arg(
        name=None if option.is_positional else option.flag[2:],
        help=option.help,
        metavar=_format_metavar(option),
        help_behavior_hint=_format_default(option) if option.hint is None else option.hint,
    )
    marks = (mark, tyro.conf.Positional) if option.is_positional else (mark,)
    default = option.default if option.annotation is bool or option.is_required else None
    return option.name, Annotated[(help_type, *marks)], dataclasses.field(default=default)


def _format_metavar(option: Option) -> str | None:
    """Return the placeholder of a value in the help, e.g. `N` for a whole number.

    A flag without a value has None.
    """
    if option.annotation is bool:
        return None
    if get_origin(option.annotation) is dict:
        has_lists = list_item_type(get_args(option.annotation)[1]) is not None
        if option.metavar:
            return option.metavar
        return "NAME=VALUE,..." if has_lists else "NAME=VALUE"
    item_type, words = list_item_type(option.annotation), []
    for member in union_members(item_type or option.annotation):
        base_type, _ = split_bounds(member)
        word = _METAVARS.get(base_type, "VALUE")
        if get_origin(base_type) is Literal:
            word = ",".join(map(str, get_args(base_type)))
            word = "{" + word + "}" if "," in word else word
        words.append(word)
    return (option.metavar or "|".join(words)) + ("..." if item_type is not None else "")


def _format_default(option: Option) -> str:
    """Return the text on an option's default, or "" if the help explains the default."""
    default = option.default
    if default is dataclasses.MISSING:
        return "(required)"
    if default is False or default in (None, (), {}, ""):
        return ""
    if default is True:
        return "(default: on)"
    return f"(default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def parse_arguments(
    config_class: type,
    argv: Sequence[str] | None,
    *,
    description: str | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Parse the command line of a program, or print the program's help.

    Args:
      config_class: dataclass whose fields are the flags.
      argv: words of the command line (default: of this process).
      description: first paragraphs of the help (default: the docstring of the dataclass).
      defaults: values, by field, that replace the defaults of the dataclass.

    Returns:
      An instance of `config_class`.

    Raises:
      ConfigError: for invalid words.
      SystemExit: with status 0, if the help is printed.
    """
    argv = sys.argv[1:] if argv is None else argv
    if any(word in HELP_FLAGS for word in argv):
        options = get_options(config_class)
        for name, value in defaults.items():
            options[name] = options[name]._replace(hint=f"(default: {value})")
        print_help(config_class, options.values(), prog=sys.argv[0], description=description)
    return config_class(**{**defaults, **parse_flags(config_class, argv, prog=sys.argv[0])})
