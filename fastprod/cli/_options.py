"""What all subcommands share: their way to fail, and the options of clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Failure(click.ClickException):
    """Ends the command with one line on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code  # type: ignore[misc]  # click says: of the class


def pairs(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """-X key=value, repeated."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter("write it as key=value")  # without an echo: it may hold a password
        found[name.strip()] = value.strip()
    return found


def file(ctx: click.Context, param: click.Parameter, path: str | None) -> dict[str, str]:
    """-F FILE with key=value lines."""
    found: dict[str, str] = {}
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                name, sign, value = line.strip().partition("=")
                if not line.strip() or line.lstrip().startswith("#"):
                    continue
                if not sign or not name.strip():
                    raise click.BadParameter(f"line {number} of {path} is not key=value")
                found[name.strip()] = value.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return found


def together(*options: Decorator) -> Decorator:
    """Options of several commands, in the order of their help."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def client_options(help: str) -> Decorator:
    """-X and -F, with kcat's letters."""
    return together(
        click.option("-X", "options", metavar="KEY=VALUE", multiple=True, callback=pairs, help=help),
        click.option("-F", "file", metavar="FILE", callback=file, help="Options as key=value lines; -X beats them."),
    )
