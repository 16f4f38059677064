"""Command lines of records: their words are checked here, then read by tyro."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from fedjax_het.utils.config import (
    MAX_FLOAT32,
    field_types,
    is_supported_annotation,
    union_members,
    validate,
)
from fedjax_het.utils.errors import (
    ConfigError,
    display_names,
    require,
    require_name,
    run_with_exit_status,
)

_BOX_DRAWING = re.compile("[\u2500-\u257f]+|-{5,}")
_HELP_HINT = re.compile(r"(for full helptext|argument helptext|usage:).*", re.IGNORECASE)
_FLAG_PATTERN = re.compile(r"--?[A-Za-z]")
_NONFINITE_PATTERN = re.compile(
    r"-(inf|infinity|nan)", re.IGNORECASE
)  # as other negative ones, no flag
_CONSTANTS = {"None": None, "True": True, "False": False}
HELP_FLAGS = ("-h", "--help")

T = TypeVar("T")


def display_flags(
    config_class: type, extra_names: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """In here, messages call a record's fields as its command line does: "--option" is `options`;
    and other arguments by these names. A `directory` is where the record's output goes."""
    flags = get_flags(config_class)
    directory_name = {"directory": flags["output_dir"]} if "output_dir" in flags else {}
    return display_names({**directory_name, **flags, **(extra_names or {})})


def validate_command_line(config_class: type, argv: Sequence[str]) -> list[str]:
    """The words of a record's command line; a list that is given in several parts is one.

    Raises ConfigError, one line that names the flag, its value and what would be right: for a flag
    that does not exist, one without a value, or with too many, one of a single value that is given
    twice, and a value of another type than the field's. Help that is asked for is left to tyro.
    """
    if any(word in HELP_FLAGS for word in argv):
        return list(argv)
    flags, annotations = get_flags(config_class), field_types(config_class)
    types_by_flag = {flag: _strip_tyro_metadata(annotations[name]) for name, flag in flags.items()}
    positional_names = [
        name for name, flag in flags.items() if name == flag
    ]  # what is given without a flag
    valid_flags = [flag for flag in types_by_flag if flag not in positional_names]
    positional_words, flag_groups = _group_by_flag(argv)
    _require_positional_count(
        positional_names,
        types_by_flag,
        positional_words,
        f"a flag before it: {', '.join(valid_flags)}",
    )
    values_by_flag: dict[str, list[str]] = {}
    for flag, values in flag_groups:
        if flag not in types_by_flag and types_by_flag.get(flag.replace("--no-", "--", 1)) is bool:
            flag = flag.replace("--no-", "--", 1)
        require_name("flag", flag, valid_flags)
        require(
            _list_item_type(types_by_flag[flag]) is not None or flag not in values_by_flag,
            flag,
            " ".join(values),
            "it once",
        )
        for value in values:
            require(value != "" and "\0" not in value, flag, value, "a value that is not empty")
        if positional_words or not positional_names:  # else the last word may be none of the flag's
            _validate_flag_values(flag, values, types_by_flag[flag])
        values_by_flag[flag] = values_by_flag.get(flag, []) + values
    if len(values_by_flag) == len(flag_groups):
        return list(argv)
    return positional_words + [
        word for flag, values in values_by_flag.items() for word in (flag, *values)
    ]


def parse_with_one_line_errors(parse: Callable[[], T]) -> T:
    """What `read()`, a call of tyro's, returns; ConfigError where it would print an error and exit.

    Help, which ends a program with status 0, is printed as ever.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return parse()
    except SystemExit as error:
        if not error.code:
            raise
        text = " ".join(_BOX_DRAWING.sub(" ", stderr.getvalue()).split())
        raise ConfigError(
            _HELP_HINT.sub("", text).strip() or "the command line cannot be read"
        ) from None


def run_program(
    interface: Callable[..., Any],
    main: Callable[..., int],
    argv: Sequence[str] | None,
    description: str | None = None,
    *,
    interrupt_message: str = "stopped",
) -> int:
    """The exit status of a program whose command line is read and checked by annotations.

    Args:
      asked: a dataclass, of which `work` gets a record; or `work` itself, a function whose
        arguments are the flags.
      argv: the words (default: `sys.argv`). about: the description, for its help. stopped: what is
        said after Ctrl-C.
    Bad words are one line with the flag, and the status 2.
    """
    config_class = (
        interface if dataclasses.is_dataclass(interface) else _make_config_class(interface)
    )
    annotations = field_types(config_class)

    def parse_and_run() -> int:
        import tyro

        # Of a function tyro would make the call itself, where what it prints is taken for errors.
        @functools.wraps(interface)
        def collect_arguments(*args: Any, **kwargs: Any) -> Any:
            return interface(*args, **kwargs) if interface is config_class else kwargs

        tokens = validate_command_line(config_class, sys.argv[1:] if argv is None else argv)
        parsed = parse_with_one_line_errors(
            lambda: tyro.cli(
                interface if interface is config_class else collect_arguments,
                args=tokens,
                description=description,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        )
        values = parsed if isinstance(parsed, dict) else vars(parsed)
        with display_flags(config_class):
            for name, annotation in annotations.items():
                if is_supported_annotation(_strip_tyro_metadata(annotation)):
                    validate(name, values[name], _strip_tyro_metadata(annotation))
            return main(**parsed) if isinstance(parsed, dict) else main(parsed)

    return run_with_exit_status(parse_and_run, name="error", interrupt_message=interrupt_message)


def _make_config_class(function: Callable[..., Any]) -> type:
    """A record with a function's arguments as fields."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        default_values = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append(
            (name, hints[name], *(dataclasses.field(default=value) for value in default_values))
        )
    return dataclasses.make_dataclass("Asked", fields, kw_only=True)


def get_flags(config_class: type) -> dict[str, str]:
    """The flags of a record's fields, by name; of one that stands without a flag, its name."""
    import tyro

    flags = {}
    for name, annotation in field_types(config_class).items():
        metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
        if tyro.conf.Positional in metadata:
            flags[name] = name
        elif tyro.conf.Suppress not in metadata:
            explicit_names = [extra.name for extra in metadata if getattr(extra, "name", None)]
            flags[name] = f"--{(explicit_names or [name.replace('_', '-')])[0]}"
    return flags


def _strip_tyro_metadata(annotation: Any) -> Any:
    """An annotation without what it says to tyro."""
    has_tyro_metadata = get_origin(annotation) is Annotated and not is_supported_annotation(
        annotation
    )
    return get_args(annotation)[0] if has_tyro_metadata else annotation


def _group_by_flag(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(words before the first flag, each flag with what follows it)."""
    positional_words: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if _FLAG_PATTERN.match(word) and not _NONFINITE_PATTERN.fullmatch(word):
            flag, equals, value = word.partition("=")
            groups.append((flag.replace("_", "-"), [value] if equals else []))
        else:
            (groups[-1][1] if groups else positional_words).append(word)
    return positional_words, groups


def _require_positional_count(
    positional_names: Sequence[str],
    types_by_flag: Mapping[str, Any],
    words: Sequence[str],
    expected: str,
) -> None:
    """That no more words stand without a flag than a record takes."""
    if not any(_list_item_type(types_by_flag[name]) is not None for name in positional_names):
        require(
            len(words) <= len(positional_names),
            "word",
            " ".join(words[len(positional_names) :]),
            expected,
        )


def _validate_flag_values(flag: str, values: list[str], annotation: Any) -> None:
    text = " ".join(values)
    if annotation is bool:
        require(not values, flag, text, "no value after it")
        return
    item_type = _list_item_type(annotation)
    require(len(values) > 0, flag, text, "a value after it")
    require(item_type is not None or len(values) == 1, flag, text, "one value")
    value_type = annotation if item_type is None else item_type
    if is_supported_annotation(value_type):
        for value in values:
            validate(flag, _parse_word(value, value_type), value_type)


def _list_item_type(annotation: Any) -> Any:
    """What a list is of; None for what is no list."""
    tuple_members = [member for member in union_members(annotation) if get_origin(member) is tuple]
    return get_args(tuple_members[0])[0] if tuple_members else None


def _parse_word(word: str, annotation: Any) -> Any:
    """The word as a number or a constant, where its field is of such a kind and it reads as one."""
    if word in _CONSTANTS and annotation is not str:
        return _CONSTANTS[word]
    for member in union_members(annotation):
        base_type = get_args(member)[0] if get_origin(member) is Annotated else member
        if base_type in (int, float):
            with contextlib.suppress(ValueError):
                number = base_type(word)
                return number if abs(number) <= MAX_FLOAT32 else word
    return word
