"""Scripts by which bash, zsh and fish complete commands, flags and values of `fedjax-het`.

A script contains all words, so that a completion starts no Python.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from fedjax_het.analysis.inspection import REGISTRIES
from fedjax_het.cli.show import KINDS
from fedjax_het.config.resolve import NAMES
from fedjax_het.config.settings import RunSettings
from fedjax_het.data import NORMALIZATIONS
from fedjax_het.metrics.registry import METRICS
from fedjax_het.nn.layers import NORMS
from fedjax_het.papers.programs import PROGRAM_MODULES
from fedjax_het.runtime.placement import CLIENT_DATA, CLIENT_STATES, SERVER_WORKS, SPREADS
from fedjax_het.runtime.trackers import TRACKERS
from fedjax_het.utils.command_line import Option, list_item_type
from fedjax_het.utils.config import union_members

SHELLS = ("bash", "zsh", "fish")
"""Shells whose words can be completed."""
_CHOICES: Mapping[str, Collection[str]] = {
    **NAMES,
    "normalization": NORMALIZATIONS,
    "norm": NORMS,
    "stem": ("imagenet", "cifar"),
    "metrics": METRICS,
    "client_test_model": ("global", "client", "received"),
    "track": TRACKERS,
    "server_work": SERVER_WORKS,
    "client_state": CLIENT_STATES,
    "client_data": CLIENT_DATA,
    "spread": SPREADS,
    "kinds": KINDS,
    "names": [name for registry, _ in REGISTRIES.values() for name in registry],
    "name": PROGRAM_MODULES,
    "preset": ("quick", "cpu", "paper"),
    "datasets": NAMES["dataset"],
    "models": NAMES["model"],
    "methods": NAMES["algorithm"],
    "by": [setting.name for setting in dataclasses.fields(RunSettings)],
    "metric": ("final_accuracy", "best_accuracy", "bmta", "bytes_up", "bytes_down", "wall_seconds"),
}
# The words that may follow a command's last flag and the values after it, in bash and zsh.
_CANDIDATES = """\
_fedjax_het_candidates() {
  case $1 in
    "") candidates="%s" ;;
%s
  esac
}
"""
_BASH = """\
_fedjax_het() {
  local cur=${COMP_WORDS[COMP_CWORD]} flag= count=0 i candidates command=
  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}
  for ((i = 2; i < COMP_CWORD; i++)); do
    case ${COMP_WORDS[i]} in
      =) ;;
      -*) flag=${COMP_WORDS[i]} count=0 ;;
      *) count=$((count + 1)) ;;
    esac
  done
  [[ $cur == = ]] && cur=
  _fedjax_het_candidates "$command" "$flag $count"
  if [[ $candidates == FILES ]]; then
    compopt -o filenames
    COMPREPLY=($(compgen -f -- "$cur"))
  else
    COMPREPLY=($(compgen -W "$candidates" -- "$cur"))
  fi
}
complete -F _fedjax_het fedjax-het
"""
_ZSH = """\
_fedjax_het() {
  local flag= count=0 i candidates command=
  ((CURRENT > 2)) && command=$words[2]
  for ((i = 3; i < CURRENT; i++)); do
    case $words[i] in
      -*=*) flag=${words[i]%%=*} count=1 ;;
      -*) flag=$words[i] count=0 ;;
      *) count=$((count + 1)) ;;
    esac
  done
  if [[ $words[CURRENT] == --*=* ]]; then
    flag=${words[CURRENT]%%=*} count=0
    compset -P "*="
  fi
  _fedjax_het_candidates "$command" "$flag $count"
  if [[ $candidates == FILES ]]; then _files; else compadd -- ${=candidates}; fi
}
if [[ $funcstack[1] == _fedjax_het ]]; then _fedjax_het; else compdef _fedjax_het fedjax-het; fi
"""
_FISH = """\
function __fedjax_het_after
  set -l words (commandline -opc)
  set -l flags (string match -- '-*' $words)
  test "$words[2]" = $argv[1] && test "$flags[-1]" = $argv[2]
end
complete -c fedjax-het -f
"""


def make_completion_script(shell: str, commands: Mapping[str, Iterable[Option]]) -> str:
    """Return the script that completes words in a shell.

    Args:
      shell: one of `SHELLS`.
      commands: options by the name of the command.

    Returns:
      The script, which the shell reads at its start.

    Example:
      >>> from fedjax_het.cli import COMMANDS
      >>> from fedjax_het.cli.completion import make_completion_script
      >>> from fedjax_het.utils.command_line import get_options
      >>> options = get_options(COMMANDS["show"].config_class).values()
      >>> "fedprox" in make_completion_script("bash", {"show": options})
      True
    """
    options = {
        name: [Option("help", "--help", bool, False, "Print the help of the command."), *row]
        for name, row in commands.items()
    }
    if shell == "fish":
        lines = [line for name, row in options.items() for line in _make_fish_lines(name, row)]
        return "\n".join([f"{_FISH}{lines[0]}", *lines[1:], ""])
    cases = [_make_case(name, row) for name, row in options.items()]
    candidates = _CANDIDATES % (" ".join(options), "\n".join(cases))
    return f"{candidates}{_BASH}" if shell == "bash" else f"#compdef fedjax-het\n{candidates}{_ZSH}"


def _make_case(command: str, options: Sequence[Option]) -> str:
    """Return the words after a command, and after each of its flags, for `_CANDIDATES`."""
    words = [flag for option in options for flag in _list_flags(option)]
    words += [name for o in options if o.is_positional for name in _list_choices(o)]
    cases = []
    for option in options:
        if option.annotation is bool or (option.is_positional and not _takes_files(option)):
            continue
        flag = "" if option.is_positional else option.flag
        values = "FILES" if _takes_files(option) else " ".join(_list_choices(option))
        cases.append(f'        "{flag} 0") candidates="{values}" ;;')
        if _is_repeatable(option) and values:
            cases.append(f'        "{flag} "*) candidates="{values} $candidates" ;;')
    lines = [f'    {command})\n      candidates="{" ".join(words)}"', "      case $2 in"]
    return "\n".join([*lines, *cases, "      esac ;;"])


def _make_fish_lines(command: str, options: Sequence[Option]) -> list[str]:
    """Return a line of fish for each argument of a command of `fedjax-het`."""
    lines = [f"complete -c fedjax-het -n __fish_use_subcommand -a {command}"]
    for option in options:
        choices = " ".join(_list_choices(option))
        values = "-F" if _takes_files(option) else f"-a '{choices}'" if choices else ""
        condition = f"__fish_seen_subcommand_from {command}"
        if option.is_positional or (choices and _is_repeatable(option)):
            after_flag = f"__fedjax_het_after {command} {option.flag}"
            place = condition if option.is_positional else after_flag
            lines.append(f"complete -c fedjax-het -n '{place}' {values}")
        if option.annotation is not bool:
            values = f"-r {values}" if _takes_files(option) else f"-x {values}"
        lines += [
            f"complete -c fedjax-het -n '{condition}' -l {flag[2:]} {values} -d '{_describe(option)}'"
            for flag in _list_flags(option)
        ]
    return lines


def _list_flags(option: Option) -> list[str]:
    """Return the flag of an option, and the flag that turns it off; [] without a flag."""
    if option.is_positional:
        return []
    is_on = option.annotation is bool and option.default
    return [option.flag, *([f"--no-{option.flag[2:]}"] if is_on else [])]


def _list_choices(option: Option) -> list[str]:
    """Return the names that are values of an option."""
    names = [*_CHOICES.get(option.name, ())]
    for member in union_members(list_item_type(option.annotation) or option.annotation):
        if get_origin(member) is Literal:
            names += map(str, get_args(member))
        elif member is bool and option.annotation is not bool:
            names += ["true", "false"]
    return [*dict.fromkeys(names)]


def _takes_files(option: Option) -> bool:
    is_path = Path in union_members(list_item_type(option.annotation) or option.annotation)
    return is_path or option.name in ("init_from", "plugin")


def _is_repeatable(option: Option) -> bool:
    return list_item_type(option.annotation) is not None or get_origin(option.annotation) is dict


def _describe(option: Option) -> str:
    """Return the first words of an option's help, without signs that shells read."""
    return re.sub(r"[][\"'`$\\]", "", re.split(r", e\.g\.|\.|[;:(]", option.help)[0]).strip()
