"""Command lines of records: tyro splits the words, the annotations of the fields check them.

Each field of a record is a flag. A value of another type, an unknown flag, and a flag that is given
twice are one-line errors with the flag as the user wrote it, its value and what is allowed.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from fedjax_het.utils.config import (
    MAX_FLOAT32,
    field_types,
    get_field_docs,
    is_supported_annotation,
    union_members,
    validate,
)
from fedjax_het.utils.errors import display_names, require, require_name

_FLAG_PATTERN = re.compile(r"--?[A-Za-z]")
_CONSTANTS = {"None": None, "True": True, "False": False}
_Occurrences = tuple[tuple[str, ...], ...]  # the words after each occurrence of a flag


class Option(NamedTuple):
    """A flag, or an argument without a flag, of one field of a record."""

    name: str
    """Name of the field."""
    flag: str
    """Flag of the field, e.g. `--num-clients`; the field's name if it has no flag."""
    annotation: Any
    """Type of the value, without the marks for tyro."""
    default: Any
    """Value where the flag is not given; `dataclasses.MISSING` if it is required."""
    help: str
    """Text after the field in the source of the record."""

    @property
    def is_positional(self) -> bool:
        """Whether the value stands without a flag."""
        return self.flag == self.name


def get_options(config_class: type) -> dict[str, Option]:
    """Return the options of a record by the name of their fields."""
    import tyro

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
        elif get_origin(annotation) is dict:  # --option NAME=VALUE gives one of the options
            flag = flag.removesuffix("s")
        options[name] = Option(name, flag, annotation, default, texts.get(name, ""))
    return options


def get_flags(config_class: type) -> dict[str, str]:
    """Return the flag of each field; of a field without a flag, its name."""
    return {name: option.flag for name, option in get_options(config_class).items()}


def display_flags(
    config_class: type, extra_names: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which messages call a record's fields as its command line does.

    Args:
      config_class: record whose fields are flags; `directory` is called as its `output_dir`.
      extra_names: flags of arguments that the record has under other names.
    """
    flags = get_flags(config_class)
    directory_name = {"directory": flags["output_dir"]} if "output_dir" in flags else {}
    return display_names({**directory_name, **flags, **(extra_names or {})})


def parse_flags(config_class: type, argv: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command line gives, by field.

    Args:
      config_class: record whose fields are the flags.
      argv: words of the command line. A list may be given in several parts.

    Raises:
      ConfigError: for an unknown flag, a flag without a value or with too many, a flag of one value
        that is given twice, and a value that the field's annotation does not allow.
    """
    options = get_options(config_class)
    occurrences, unknown = _split_words(options, argv)
    valid_flags = [option.flag for option in options.values() if not option.is_positional]
    for word in unknown:
        if _FLAG_PATTERN.match(word):
            require_name("flag", word.partition("=")[0], valid_flags)
    expected = f"a flag before it: {', '.join(valid_flags)}"
    require(not unknown, "word", " ".join(unknown), expected)
    values = {}
    # A flag without its value leaves that word to an argument without a flag: report the flag.
    for name, option in sorted(options.items(), key=lambda item: item[1].is_positional):
        if option.annotation is bool:
            given, negated = occurrences[name], occurrences[f"no_{name}"]
            if given or negated:
                _require_no_value(option.flag, (*given, *negated))
                values[name] = bool(given)
        elif occurrences[name]:
            values[name] = _convert_words(option, occurrences[name])
    return values


def _split_words(
    options: Mapping[str, Option], argv: Sequence[str]
) -> tuple[dict[str, _Occurrences], list[str]]:
    """Return the words of each flag by field, and the words that belong to no flag."""
    import tyro

    fields: list[Any] = []
    required = [
        option.name
        for option in options.values()
        if option.is_positional and option.default is dataclasses.MISSING
    ]
    for name in required:  # tyro keeps one word for it, whatever list stands before it
        fields.append((name, tyro.conf.Positional[str]))
    for name, option in options.items():
        if option.is_positional and name not in required:
            positional = tyro.conf.Positional[tuple[str, ...]]
            fields.append((name, positional, dataclasses.field(default=())))
        flags = [] if option.is_positional else [(name, option.flag[2:])]
        if option.annotation is bool:
            flags.append((f"no_{name}", f"no-{option.flag[2:]}"))
        for field_name, flag in flags:
            mark = tyro.conf.arg(name=flag)
            annotation = Annotated[_Occurrences, mark, tyro.conf.UseAppendAction]
            fields.append((field_name, annotation, dataclasses.field(default=())))
    parser_class: Any = dataclasses.make_dataclass("Arguments", fields)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            words, unknown = tyro.cli(
                parser_class, prog="", args=argv, add_help=False, return_unknown_args=True
            )
        except SystemExit:  # every flag takes any words, so only such an argument can be missing
            require(False, required[0], "", "a value")
            raise
    occurrences = vars(words)
    for option in options.values():
        if option.is_positional:
            value = occurrences[option.name]
            value = (value,) if isinstance(value, str) else value
            occurrences[option.name] = (value,) if value else ()
    return occurrences, unknown


def _require_no_value(flag: str, occurrences: _Occurrences) -> None:
    text = " ".join(itertools.chain(*occurrences))
    require(not any(occurrences), flag, text, "no value after it")
    require(len(occurrences) == 1, flag, text, "it once")


def _convert_words(option: Option, occurrences: _Occurrences) -> Any:
    """Return the value of a flag from the words after each of its occurrences."""
    flag, annotation = option.flag, option.annotation
    words = list(itertools.chain(*occurrences))
    text = " ".join(words)
    require(all(occurrences), flag, text, "a value after it")
    may_be_empty = option.is_positional and option.default is not dataclasses.MISSING
    for word in words:  # a command checks such words by its own list of names
        ok = may_be_empty or (word != "" and "\0" not in word)
        require(ok, flag, word, "a value that is not empty")
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
    require(len(words) == 1, flag, text, "one value")
    return convert_setting(flag, words[0], annotation)


def convert_setting(name: str, value: Any, annotation: Any) -> Any:
    """Return the value of a setting, given as text or as YAML has it, as its annotation has it.

    Args:
      name: what messages call the setting.
      value: text, number, truth value, list or mapping. Text is converted to the annotation's type.
      annotation: type of the setting. For a list, a single value is a list of one.

    Raises:
      ConfigError: if the annotation does not allow the value.
    """
    if get_origin(annotation) is dict:
        is_mapping = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        require(is_mapping, name, value, "names and values")
        value_type = get_args(annotation)[1]
        return {key: _convert_item(f"{name} {key}", v, value_type) for key, v in value.items()}
    item_type = list_item_type(annotation)
    if item_type is not None:
        items = value if isinstance(value, list) else [value]
        return tuple(convert_setting(name, item, item_type) for item in items)
    if isinstance(value, str):
        value = _parse_word(value, annotation)
    if is_supported_annotation(annotation):
        return validate(name, value, annotation)
    if value is not None and Path in union_members(annotation):
        require(isinstance(value, str), name, value, "a path")
        return Path(value)
    return value


def _convert_item(name: str, value: Any, annotation: Any) -> Any:
    """Return a value of a mapping; of a list, text with commas between the values is split."""
    if get_origin(annotation) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        items = items if isinstance(items, list) else [items]
        return tuple(_convert_item(name, item, get_args(annotation)[0]) for item in items)
    if annotation is float:
        return convert_setting(name, value, float)
    return parse_literal(value) if isinstance(value, str) else value


def parse_literal(text: str) -> Any:
    """Return the number, truth value or list that a text reads as in JSON, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


def _parse_word(word: str, annotation: Any) -> Any:
    """Return the number or constant that a word reads as, if the annotation has that type."""
    if word in _CONSTANTS and annotation is not str:
        return _CONSTANTS[word]
    for member in union_members(annotation):
        base_type = get_args(member)[0] if get_origin(member) is Annotated else member
        if base_type in (int, float):
            with contextlib.suppress(ValueError):
                number = base_type(word)
                return number if abs(number) <= MAX_FLOAT32 else word
    return word


def list_item_type(annotation: Any) -> Any:
    """Return the type of a list's items; None for what is no list."""
    lists = [member for member in union_members(annotation) if get_origin(member) is tuple]
    return get_args(lists[0])[0] if lists else None
