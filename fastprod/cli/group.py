"""`fastprod group`: producer groups, who owns what in them, and where they go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from rich.markup import escape
from rich.table import Table

from fastprod import _positions
from fastprod.cli import _options
from fastprod.cli._figures import console
from fastprod.cli._options import Decorator, Failure
from fastprod.groups import admin

CONNECT_S = 10.0
WIDEST = 60  # characters of a position in a table


def _shared(one: bool) -> Decorator:
    """The options of all subcommands; `one` for those that are about one group."""
    which = [
        click.argument("name", metavar="GROUP", required=False),
        click.option("-g", "--group", "named", metavar="GROUP", help="The group, instead of the argument."),
    ]
    return _options.together(
        *(which if one else ()),
        click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers."),
        _options.client_options("An option of all clients, repeatable."),
        click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True),
    )


@click.group()
def group() -> None:
    """Look at producer groups (fastprod.groups), and set their positions.

    Exit code: 0; 1 when it is refused, or brokers do not answer it; 2 for wrong usage, no broker, or no such group.
    """


@group.command("list")
@_shared(one=False)
def list_(bootstrap: str | None, options: dict[str, str], file: dict[str, str], form: str) -> None:
    """All groups: how many source partitions they have, and how many members."""
    config = _config(bootstrap, options, file)
    with _failures():
        found = admin.list_groups(config)
    if form == "json":
        rows = [
            {"group": one.group_id, "state": one.state, "members": len(one.members), "partitions": len(one.partitions)}
            for one in found
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    table = _table("group", "state", "members", "source partitions")
    for one in found:
        table.add_row(one.group_id, one.state.lower(), str(len(one.members)), str(len(one.partitions)))
    console().print(table)


@group.command()
@_shared(one=True)
def describe(
    name: str | None,
    named: str | None,
    bootstrap: str | None,
    options: dict[str, str],
    file: dict[str, str],
    form: str,
) -> None:
    """Members of a group, who owns what, the positions, and the age of the last commit of each."""
    config = _config(bootstrap, options, file)
    with _failures():
        found = admin.describe_group(config, _one_name(name, named))
    if form == "json":
        click.echo(json.dumps(_report(found), indent=2))
        return
    members = _table("member", "instance", "host", "owns")
    for one in found.members:
        owns = ", ".join(map(str, one.partitions)) or "standby"
        members.add_row(one.id, one.instance_id or "", one.host, owns)
    parts = _table("source partition", "position", "committed s ago", "member")
    for part in found.partitions:
        age = "" if part.age_s is None else f"{part.age_s:,.1f}"
        parts.add_row(str(part.partition), escape(_shown(part)), age, part.owner or "nobody")
    console().print(f"group {found.group_id}, {found.state.lower()}", members, parts)
    for part in found.partitions:
        if part.problem is not None:
            click.echo(part.problem, err=True)


@group.command()
@_shared(one=True)
@click.option("--partition", type=click.IntRange(0), required=True, help="The source partition.")
@click.option("--to", "position", metavar="POSITION", required=True, help="Where it is to go on.")
def reset(
    name: str | None,
    named: str | None,
    bootstrap: str | None,
    options: dict[str, str],
    file: dict[str, str],
    form: str,
    partition: int,
    position: str,
) -> None:
    """Let a source partition go on from another position. Refused while the group has members."""
    config = _config(bootstrap, options, file)
    group_id = _one_name(name, named)
    with _failures():
        admin.reset_position(config, group_id, partition, position)
    if form == "json":
        click.echo(json.dumps({"group": group_id, "partition": partition, "position": position}, indent=2))
    else:
        click.echo(f"source partition {partition} of group {group_id} goes on from {position!r}")


def _one_name(name: str | None, named: str | None) -> str:
    if (name is None) == (named is None):
        raise click.UsageError("give one group, as the argument or with --group")
    return name or named or ""


def _config(bootstrap: str | None, options: dict[str, str], file: dict[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {"log_level": 0, **file, **options}
    if bootstrap is not None:
        given["bootstrap.servers"] = bootstrap
    if not given.get("bootstrap.servers"):
        raise click.UsageError("give the brokers with -b HOST:PORT, or bootstrap.servers with -X or in a file with -F")
    try:
        AdminClient(_positions.client_options(given)).list_topics(timeout=CONNECT_S)
    except KafkaException as problem:
        if problem.args[0].code() == KafkaError._INVALID_ARG:
            raise Failure(f"unusable option: {problem.args[0].str()}", 2) from None
        raise Failure(
            f"no broker answers at {given['bootstrap.servers']} within {CONNECT_S:g} s ({problem.args[0].str()})", 2
        ) from None
    return given


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        raise Failure(str(problem), 2) from None
    except RuntimeError as problem:
        raise Failure(str(problem), 1) from None
    except KafkaException as problem:
        error = problem.args[0]
        why = error.str().rstrip()
        if why.endswith(":"):  # after some requests librdkafka only says what was asked
            why += f" {error.name()}"
        if _positions.is_passing(problem):
            why += "; brokers may just be starting: try again"
        raise Failure(why, 1) from None


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _shown(part: admin.Partition) -> str:
    if part.problem is not None:
        return "? (see below)"
    if part.position is None:
        return "none yet"
    return part.position if len(part.position) <= WIDEST else f"{part.position[:WIDEST]}... ({len(part.position):,})"


def _report(found: admin.Described) -> dict[str, Any]:
    return {
        "group": found.group_id,
        "state": found.state,
        "members": [
            {
                "id": one.id,
                "instance": one.instance_id,
                "client": one.client_id,
                "host": one.host,
                "partitions": list(one.partitions),
            }
            for one in found.members
        ],
        "partitions": [
            {
                "partition": one.partition,
                "owner": one.owner,
                "position": one.position,
                "age_s": None if one.age_s is None else round(one.age_s, 3),
                "problem": one.problem,
            }
            for one in found.partitions
        ],
    }
