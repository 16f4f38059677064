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

from fedjax_het.common.errors import ConfigError, exit_status, require, require_name, written_as
from fedjax_het.common.records import LARGEST, checked, field_types, is_kind, members

_BOX = re.compile("[\u2500-\u257f]+|-{5,}")
_HELP = re.compile(r"(for full helptext|argument helptext|usage:).*", re.IGNORECASE)
_FLAG = re.compile(r"--?[A-Za-z]")
_NUMBER = re.compile(r"-(inf|infinity|nan)", re.IGNORECASE)  # as other negative ones, no flag
_CONSTANTS = {"None": None, "True": True, "False": False}
HELP_FLAGS = ("-h", "--help")

T = TypeVar("T")


def called_by_flags(
    record: type, others: Mapping[str, str] | None = None
) -> contextlib.AbstractContextManager[None]:
    """In here, messages call a record's fields as its command line does: "--option" is `options`;
    and other arguments by these names. A `directory` is where the record's output goes."""
    flags = flags_of(record)
    folder = {"directory": flags["output_dir"]} if "output_dir" in flags else {}
    return written_as({**folder, **flags, **(others or {})})


def checked_words(record: type, words: Sequence[str]) -> list[str]:
    """The words of a record's command line; a list that is given in several parts is one.

    Raises ConfigError, one line that names the flag, its value and what would be right: for a flag
    that does not exist, one without a value, or with too many, one of a single value that is given
    twice, and a value of another type than the field's. Help that is asked for is left to tyro.
    """
    if any(word in HELP_FLAGS for word in words):
        return list(words)
    flags, annotations = flags_of(record), field_types(record)
    kinds = {flag: _unmarked(annotations[name]) for name, flag in flags.items()}
    alone = [name for name, flag in flags.items() if name == flag]  # what is given without a flag
    known = [flag for flag in kinds if flag not in alone]
    first, groups = _grouped(words)
    _require_alone(alone, kinds, first, f"a flag before it: {', '.join(known)}")
    given: dict[str, list[str]] = {}
    for flag, values in groups:
        if flag not in kinds and kinds.get(flag.replace("--no-", "--", 1)) is bool:
            flag = flag.replace("--no-", "--", 1)
        require_name("flag", flag, known)
        require(
            _item(kinds[flag]) is not None or flag not in given, flag, " ".join(values), "it once"
        )
        for value in values:
            require(value != "" and "\0" not in value, flag, value, "a value that is not empty")
        if first or not alone:  # else the last word may be none of the flag's
            _require_fits(flag, values, kinds[flag])
        given[flag] = given.get(flag, []) + values
    if len(given) == len(groups):
        return list(words)
    return first + [word for flag, values in given.items() for word in (flag, *values)]


def one_line_errors(read: Callable[[], T]) -> T:
    """What `read()`, a call of tyro's, returns; ConfigError where it would print an error and exit.

    Help, which ends a program with status 0, is printed as ever.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read()
    except SystemExit as error:
        if not error.code:
            raise
        text = " ".join(_BOX.sub(" ", said.getvalue()).split())
        raise ConfigError(
            _HELP.sub("", text).strip() or "the command line cannot be read"
        ) from None


def run_program(
    asked: Callable[..., Any],
    work: Callable[..., int],
    argv: Sequence[str] | None,
    about: str | None = None,
    *,
    stopped: str = "stopped",
) -> int:
    """The exit status of a program whose command line is read and checked by annotations.

    Args:
      asked: a dataclass, of which `work` gets a record; or `work` itself, a function whose
        arguments are the flags.
      argv: the words (default: `sys.argv`). about: the description, for its help. stopped: what is
        said after Ctrl-C.
    Bad words are one line with the flag, and the status 2.
    """
    record = asked if dataclasses.is_dataclass(asked) else _record_of(asked)
    kinds = field_types(record)

    def status() -> int:
        import tyro

        # Of a function tyro would make the call itself, where what it prints is taken for errors.
        @functools.wraps(asked)
        def read(*args: Any, **kwargs: Any) -> Any:
            return asked(*args, **kwargs) if asked is record else kwargs

        words = checked_words(record, sys.argv[1:] if argv is None else argv)
        parsed = one_line_errors(
            lambda: tyro.cli(
                asked if asked is record else read,
                args=words,
                description=about,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        )
        given = parsed if isinstance(parsed, dict) else vars(parsed)
        with called_by_flags(record):
            for name, kind in kinds.items():
                if is_kind(_unmarked(kind)):
                    checked(name, given[name], _unmarked(kind))
            return work(**parsed) if isinstance(parsed, dict) else work(parsed)

    return exit_status(status, name="error", stopped=stopped)


def _record_of(function: Callable[..., Any]) -> type:
    """A record with a function's arguments as fields."""
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for name, parameter in inspect.signature(function).parameters.items():
        given = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, hints[name], *(dataclasses.field(default=value) for value in given)))
    return dataclasses.make_dataclass("Asked", fields, kw_only=True)


def flags_of(record: type) -> dict[str, str]:
    """The flags of a record's fields, by name; of one that stands without a flag, its name."""
    import tyro

    flags = {}
    for name, kind in field_types(record).items():
        extras = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
        if tyro.conf.Positional in extras:
            flags[name] = name
        elif tyro.conf.Suppress not in extras:
            named = [extra.name for extra in extras if getattr(extra, "name", None)]
            flags[name] = f"--{(named or [name.replace('_', '-')])[0]}"
    return flags


def _unmarked(kind: Any) -> Any:
    """An annotation without what it says to tyro."""
    marked = get_origin(kind) is Annotated and not is_kind(kind)
    return get_args(kind)[0] if marked else kind


def _grouped(words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(words before the first flag, each flag with what follows it)."""
    first: list[str] = []
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if _FLAG.match(word) and not _NUMBER.fullmatch(word):
            flag, equals, value = word.partition("=")
            groups.append((flag.replace("_", "-"), [value] if equals else []))
        else:
            (groups[-1][1] if groups else first).append(word)
    return first, groups


def _require_alone(
    alone: Sequence[str], kinds: Mapping[str, Any], words: Sequence[str], otherwise: str
) -> None:
    """That no more words stand without a flag than a record takes."""
    if not any(_item(kinds[name]) is not None for name in alone):
        require(len(words) <= len(alone), "word", " ".join(words[len(alone) :]), otherwise)


def _require_fits(flag: str, values: list[str], kind: Any) -> None:
    text = " ".join(values)
    if kind is bool:
        require(not values, flag, text, "no value after it")
        return
    item = _item(kind)
    require(len(values) > 0, flag, text, "a value after it")
    require(item is not None or len(values) == 1, flag, text, "one value")
    asked = kind if item is None else item
    if is_kind(asked):
        for value in values:
            checked(flag, _meant(value, asked), asked)


def _item(kind: Any) -> Any:
    """What a list is of; None for what is no list."""
    lists = [member for member in members(kind) if get_origin(member) is tuple]
    return get_args(lists[0])[0] if lists else None


def _meant(word: str, kind: Any) -> Any:
    """The word as a number or a constant, where its field is of such a kind and it reads as one."""
    if word in _CONSTANTS and kind is not str:
        return _CONSTANTS[word]
    for member in members(kind):
        bare = get_args(member)[0] if get_origin(member) is Annotated else member
        if bare in (int, float):
            with contextlib.suppress(ValueError):
                number = bare(word)
                return number if abs(number) <= LARGEST else word
    return word
