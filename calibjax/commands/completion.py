"""Shell completion: a script for bash or zsh with every command, its options and their fixed choices."""

from collections.abc import Mapping, Sequence

from calibjax.commands.parser import list_options
from calibjax.runtime.errors import UserError

_START = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
_SCRIPT = """\
_calibjax() {{
  local words
  case "${{COMP_WORDS[*]}} " in
{cases}    *) words="{first} --help --version" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _calibjax calibjax
"""


def completion_script(shells: Sequence[str], commands: Mapping[str, type]) -> str:
    """The script of a shell, the only one of `shells`; `commands`: name -> its options."""
    if len(shells) != 1 or shells[0] not in _START:
        raise UserError(f"--completion: expected one of {', '.join(_START)}.")
    cases = []
    for name, options_type in commands.items():
        options = list(list_options(options_type))
        words = [word for option in options for word in (*option.names, *option.choices)]
        cases.append(f'    "calibjax {name} "*) words="{" ".join([*words, "--config", "--help"])}" ;;\n')
    groups = dict.fromkeys(name.split()[0] for name in commands if " " in name)
    for group in groups:
        words = [name.split()[1] for name in commands if name.startswith(f"{group} ")]
        cases.append(f'    "calibjax {group} "*) words="{" ".join(words)}" ;;\n')
    first = dict.fromkeys(name.split()[0] for name in commands)
    return _START[shells[0]] + _SCRIPT.format(cases="".join(cases), first=" ".join(first))
