"""`hepti completion`: a script for bash and zsh, generated from the commands' parser."""

from __future__ import annotations

import argparse

from hepti_mqtt.cli import output

_SCRIPT = """\
_hepti() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" cmd="" word words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case " {commands} " in *" $word "*) cmd="$word"; break ;; esac
    done
    case "$cmd $prev" in
{values}
    esac
    if [ -z "$words" ]; then
        case "$cmd" in
{options}
            "") words="{commands} --broker --site --json --verbose --version --help" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _hepti hepti"""


def completion(_args: argparse.Namespace) -> int:
    """Print the script."""
    from hepti_mqtt.cli.main import build

    output.print_lines(script(build()).splitlines())
    return 0


def script(parser: argparse.ArgumentParser) -> str:
    """Return the script for a parser with commands; of options it knows those with a fixed choice of values."""
    from hepti_mqtt.cli.main import subparsers

    commands = subparsers(parser)
    values, options = [], []
    for name, command in commands.items():
        words = list(subparsers(command))
        for action in (*command._actions, *(a for sub in subparsers(command).values() for a in sub._actions)):
            if isinstance(action, argparse._SubParsersAction):
                continue
            words += [option for option in action.option_strings if option.startswith("--")]
            if action.choices is not None and action.option_strings:
                pattern = " | ".join(f'"{name} {option}"' for option in action.option_strings)
                values.append(f'        {pattern}) words="{" ".join(map(str, action.choices))}" ;;')
            elif action.choices is not None:
                words += map(str, action.choices)
        options.append(f'            {name}) words="{" ".join(dict.fromkeys(words))}" ;;')
    return _SCRIPT.format(commands=" ".join(commands), values="\n".join(values), options="\n".join(options))
