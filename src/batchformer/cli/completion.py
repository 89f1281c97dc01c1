"""``batchformer completion bash``: a script that completes commands, recipes, options and fields in the shell."""

import re

from batchformer.cli.arguments import read_arguments
from batchformer.errors import UserError

HELP = """
batchformer completion bash|zsh

Print a script that completes commands, recipes, options and fields of recipes when Tab is pressed.

  eval "$(batchformer completion bash)"     in ~/.bashrc
  eval "$(batchformer completion zsh)"      in ~/.zshrc, after compinit
"""
# The words of the line go to `batchformer completion words`, which prints what may come next; nothing: file names.
_BASH = """_batchformer() {
    local IFS=$'\\n'
    COMPREPLY=($(batchformer completion words -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
}
complete -o default -o bashdefault -F _batchformer batchformer"""
_SCRIPTS = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}"}


def run(args: list[str]) -> int:
    if args[:2] == ["words", "--"]:
        print("\n".join(candidates(args[2:])))
        return 0
    given = read_arguments(args, [])
    if len(given.positional) != 1 or given.positional[0] not in _SCRIPTS:
        raise UserError(f"completion needs the name of a shell: {' or '.join(_SCRIPTS)}.")
    print(_SCRIPTS[given.positional[0]])
    return 0


def candidates(words: list[str]) -> list[str]:
    """What may stand for the last of these words of a command line."""
    from batchformer.cli import COMMANDS, _command
    from batchformer.cli.known_keys import keys_on_the_line
    from batchformer.recipes import recipe_names

    *before, last = words or [""]
    if not before:
        found = list(COMMANDS)
    elif before[0] not in COMMANDS:
        return []
    elif last.startswith("-"):
        text = _command(before[0]).HELP
        found = sorted(set(re.findall(r"--[a-z][\w-]*", text)))  # what its help names, without fields of recipes
        found = [option for option in found if not re.search(rf"{option}\.", text)]
        if before[0] in ("fit", "compare"):
            found += sorted(f"--{key}" for key in keys_on_the_line(before[1:]))
    elif len(before) == 1 and before[0] in ("fit", "compare", "recipes", "data", "tune"):
        found = recipe_names()
    else:
        return []
    return [word for word in found if word.startswith(last)]
