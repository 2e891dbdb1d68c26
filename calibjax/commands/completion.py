"""Shell completion: a script for bash or zsh with every command, option and fixed choice."""

import importlib
from collections.abc import Mapping
from typing import Any

from calibjax.commands.parser import choices_of, list_options

SHELLS = ("bash", "zsh")

_SCRIPT = """\
# Completion of calibjax for {shell}.
{start}_calibjax() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  local command="${{COMP_WORDS[1]}}"
  [[ " {groups} " == *" $command "* ]] && command="$command ${{COMP_WORDS[2]}}"
  case "$command:$previous" in
{choices}  esac
  if [[ -z "$words" ]]; then
    case "$command" in
{flags}    esac
    (( COMP_CWORD == 1 )) && words="{first}"
{second}  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _calibjax calibjax
"""


def completion_script(shell: str, commands: Mapping[str, Any]) -> str:
    """The script of a shell; `commands` is `calibjax.cli.COMMANDS`."""
    flags, choices = [], []
    for name, command in commands.items():
        module = importlib.import_module(f"calibjax.commands.{command.module}")
        options = list(list_options(getattr(module, command.options)))
        names = [word for option in options for word in option.names]
        flags.append(f'      "{name}") words="{" ".join([*names, "--config", "--help"])}" ;;\n')
        for option in options:
            if words := choices_of(option.annotation):
                choices.append(f'    "{name}:{option.flag}") words="{" ".join(words)}" ;;\n')
    groups = list(dict.fromkeys(name.split()[0] for name in commands if " " in name))
    first = dict.fromkeys([name.split()[0] for name in commands])
    second = [
        f'    (( COMP_CWORD == 2 )) && [[ "${{COMP_WORDS[1]}}" == {group} ]] && words="'
        f'{" ".join(name.split()[1] for name in commands if name.startswith(f"{group} "))}"\n'
        for group in groups
    ]
    return _SCRIPT.format(
        shell=shell,
        start="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        groups=" ".join(groups),
        choices="".join(choices),
        flags="".join(flags),
        first=" ".join([*first, "--help", "--version"]),
        second="".join(second),
    )
