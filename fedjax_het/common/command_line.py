"""Command lines of records: their words are checked here, then read by tyro."""

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin

from fedjax_het.common.errors import ConfigError, require, require_name, written_as
from fedjax_het.common.records import LARGEST, checked, field_types, is_kind, members

_BOX = re.compile("[\u2500-\u257f]+")
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
    and other arguments by these names."""
    return written_as({**_flags_of(record), **(others or {})})


def checked_words(record: type, words: Sequence[str]) -> list[str]:
    """The words of a record's command line; a list that is given in several parts is one.

    Raises ConfigError, one line that names the flag, its value and what would be right: for a flag
    that does not exist, one without a value, or with too many, one of a single value that is given
    twice, and a value of another type than the field's. Help that is asked for is left to tyro.
    """
    if any(word in HELP_FLAGS for word in words):
        return list(words)
    flags, annotations = _flags_of(record), field_types(record)
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


def _flags_of(record: type) -> dict[str, str]:
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
