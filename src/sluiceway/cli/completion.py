"""`sluiceway completion`: shell completion of commands, options and queue names."""

from __future__ import annotations

import click

from sluiceway.cli.common import PROGRAM

_INSTALL = {
    "bash": 'add to ~/.bashrc:   eval "$(sluiceway completion bash)"',
    "zsh": 'add to ~/.zshrc:    eval "$(sluiceway completion zsh)"',
    "fish": "run once:           sluiceway completion fish > ~/.config/fish/completions/sluiceway.fish",
}


@click.command(epilog="\b\n" + "\n".join(f"{shell:5} {how}" for shell, how in _INSTALL.items()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL: commands, options, and the server's queue names."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
