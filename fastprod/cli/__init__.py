"""The `fastprod` command. Each subcommand lives in a module of its own, imported when it is called.

Importing this package needs nothing but fastprod: its load generators also serve the benchmarks. Only running
the command needs the `cli` extra.
"""

from __future__ import annotations

import sys
from importlib import import_module

MISSING = "the fastprod command needs click and rich: pip install 'fastprod[cli]'"
COMMANDS = {  # name -> module:command
    "bundles": "fastprod.cli.bundles:bundles",
    "demo": "fastprod.cli.export:demo",
    "export": "fastprod.cli.export:export",
    "group": "fastprod.cli.group:group",
    "partitioners": "fastprod.cli.partitioners:partitioners",
    "perf": "fastprod.cli.perf:perf",
    "priority": "fastprod.cli.priority:priority",
}

try:
    import click
    import rich  # noqa: F401  (looked for here, used by the subcommands)
except ModuleNotFoundError as missing:
    if missing.name not in ("click", "rich"):
        raise

    def main() -> None:
        """Stands in for the command while the extra is not installed."""
        print(MISSING, file=sys.stderr)
        raise SystemExit(2)

else:
    from fastprod import __version__

    class _Group(click.Group):
        """A group that imports a subcommand when it is asked for."""

        def list_commands(self, ctx: click.Context) -> list[str]:
            return sorted(COMMANDS)

        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
            if cmd_name not in COMMANDS:
                return None
            module, name = COMMANDS[cmd_name].split(":")
            command: click.Command = getattr(import_module(module), name)
            return command

        def invoke(self, ctx: click.Context) -> object:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                ctx.exit(130)  # as the shell says it

    @click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__, prog_name="fastprod")
    def main() -> None:
        """Records into Kafka at the speed of C."""
