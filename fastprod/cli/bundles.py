"""`fastprod bundles`: where topics hash to, how a bundle splits, and who should write what."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from rich.table import Table

from fastprod import _positions
from fastprod.bundles import BundleLoad, BundleMap, algorithms, hash_position, plan, split
from fastprod.cli import _options, _pictures
from fastprod.cli._figures import console
from fastprod.cli._options import Failure
from fastprod.cli._pictures import Wedge

CONNECT_S = 10.0


def _read_topics(ctx: click.Context, param: click.Parameter, path: str | None) -> dict[str, tuple[float, float]] | None:
    """Lines with a topic and, if they are known, its records and bytes."""
    if path is None:
        return None
    found: dict[str, tuple[float, float]] = {}
    try:
        with click.open_file(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip() or line.lstrip().startswith("#"):
                    continue
                name, *figures = (word.strip() for word in line.split(","))
                try:
                    records, size = (*map(float, figures), 0.0, 0.0)[:2]
                    BundleLoad({name: (records, size)})
                except ValueError:
                    figures = [name] * 3  # complained about below, with anything else that is wrong with the line
                if not name or len(figures) > 2:
                    raise click.BadParameter(
                        f"line {number} of {path} is not topic, topic,records or topic,records,bytes"
                    )
                if name in found:
                    raise click.BadParameter(f"line {number} of {path} has the topic {name!r} again")
                found[name] = (records, size)
    except (OSError, UnicodeDecodeError) as problem:
        raise click.BadParameter(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    return found


def _read_map(ctx: click.Context, param: click.Parameter, text: str) -> BundleMap:
    """A number of equal bundles, or a file with a map's JSON."""
    try:
        if re.fullmatch(r"-?\d+", text):
            return BundleMap.equal(int(text))
        told = json.loads(_content(text))
        return BundleMap.from_json(json.dumps(told.get("map", told) if isinstance(told, dict) else told))
    except ValueError as problem:
        raise click.BadParameter(str(problem)) from None


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise click.BadParameter(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None


# Where topics and bundles come from.
_sources = _options.together(
    click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers whose topics are meant."),
    click.option(
        "--topics-file",
        "listed",
        metavar="FILE",
        callback=_read_topics,
        help="Lines with topic, or topic,records,bytes; - is stdin.",
    ),
    click.option(
        "--bundles",
        "bundle_map",
        metavar="N|FILE",
        default="1",
        show_default=True,
        callback=_read_map,
        help="So many equal bundles, or a file with what --format json has printed.",
    ),
    _options.client_options("An option of the client that asks the brokers, repeatable."),
    click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True),
)
_plot = click.option(
    "--plot", metavar="FILE", callback=_pictures.picture, help="Draw the ring before and after to a .png or .svg file."
)


@click.group()
def bundles() -> None:
    """Hash ranges of topics: where topics are, how a range splits, who should write what.

    Topics come from brokers (-b) or a file (--topics-file). Nothing is changed on brokers: a bundle map belongs to
    those who write.
    """


@bundles.command()
@_sources
def positions(
    bootstrap: str | None,
    listed: dict[str, tuple[float, float]] | None,
    bundle_map: BundleMap,
    options: dict[str, str],
    file: dict[str, str],
    form: str,
) -> None:
    """Show each topic's hash position and bundle.

    Exit code: 0; 2 for wrong usage or no broker.
    """
    topics = _topics(bootstrap, listed, {**file, **options}, held=False)
    rows = sorted((hash_position(topic), topic) for topic in topics)
    if form == "json":
        found = [{"topic": topic, "position": at, "bundle": bundle_map.find_position(at)} for at, topic in rows]
        click.echo(json.dumps({"map": json.loads(bundle_map.to_json()), "topics": found}, indent=2))
        return
    table = _table("topic", "position", "", "bundle")
    for at, topic in rows:
        table.add_row(topic, f"{at:#010x}", str(at), bundle_map.find_position(at))
    console().print(table)


@bundles.command("split")
@click.argument("bundle", required=False)
@click.option("--algorithm", type=click.Choice(algorithms()), default=algorithms()[0], show_default=True)
@click.option("--position", "at", type=int, multiple=True, help="For specified_positions_divide, repeatable.")
@click.option("--parts", type=click.IntRange(2), help="For topic_count_equally_divide: how many. [default: 2]")
@click.option("--max-records", type=click.FloatRange(0, min_open=True), help="For flow_or_qps_equally_divide.")
@click.option("--max-bytes", type=click.FloatRange(0, min_open=True), help="The same.")
@click.option("--tolerance", type=click.FloatRange(0), help="Over these limits before it splits. [default: 0.1]")
@click.option("--force", is_flag=True, help="Split at positions also where there is one topic, or none.")
@_plot
@_sources
def split_(
    bundle: str | None,
    algorithm: str,
    at: tuple[int, ...],
    parts: int | None,
    max_records: float | None,
    max_bytes: float | None,
    tolerance: float | None,
    force: bool,
    plot: Path | None,
    bootstrap: str | None,
    listed: dict[str, tuple[float, float]] | None,
    bundle_map: BundleMap,
    options: dict[str, str],
    file: dict[str, str],
    form: str,
) -> None:
    """Split BUNDLE, as 0x00000000_0x80000000; it may be left out where the map has only one.

    Exit code: 0, also if there was a reason to split nothing; 2 for wrong usage or no broker.
    """
    if bundle is None:
        if len(bundle_map) != 1:
            raise click.UsageError(f"which of the {len(bundle_map)} bundles? Name one, as {bundle_map.bundles[0]}")
        (bundle,) = bundle_map.bundles
    given: dict[str, Any] = {
        "parts": parts,
        "max_records_per_s": max_records,
        "max_bytes_per_s": max_bytes,
        "tolerance": tolerance,
    }
    needed = bootstrap is not None or listed is not None or algorithm not in (algorithms()[0], algorithms()[2])
    topics = _topics(bootstrap, listed, {**file, **options}, held=True) if needed else None
    try:
        found = split(
            bundle_map,
            bundle,
            algorithm,
            topics=None if topics is None else list(topics),
            positions=at or None,
            load=topics,
            force=force,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (TypeError, ValueError) as problem:
        raise Failure(str(problem), 2) from None
    load = BundleLoad(topics or {})
    if form == "json":
        told = {
            "map": json.loads(found.map.to_json()),
            "boundaries": list(found.boundaries),
            "reason": found.reason,
            "bundles": _told(found.map, load),
        }
        click.echo(json.dumps(told, indent=2))
    elif found.reason is not None:
        click.echo(f"not split: {found.reason}")
    else:
        click.echo(f"{bundle} split at {', '.join(f'{each:#010x} ({each})' for each in found.boundaries)}")
        _show(_told(found.map, load))
    if plot is not None:
        _draw(plot, f"{algorithm} of {bundle}", load, {"before": (bundle_map, {}), "after": (found.map, {})})


@bundles.command("plan")
@click.option("--writers", type=click.IntRange(1), required=True, help="Tasks or instances that write.")
@click.option("--tolerance", type=click.FloatRange(0), default=0.1, show_default=True, help="Over a fair share.")
@click.option("--by", type=click.Choice(["bytes", "records"]), help="What counts. [default: bytes, if any are known]")
@_plot
@_sources
def plan_(
    writers: int,
    tolerance: float,
    by: str | None,
    plot: Path | None,
    bootstrap: str | None,
    listed: dict[str, tuple[float, float]] | None,
    bundle_map: BundleMap,
    options: dict[str, str],
    file: dict[str, str],
    form: str,
) -> None:
    """Split bundles and assign them to writers, so that none has much more than its share.

    With -b, the load of a topic is the number of records it holds. In a file without figures all topics count alike.

    Exit code: 0; 2 for wrong usage or no broker.
    """
    topics = _topics(bootstrap, listed, {**file, **options}, held=True)
    if not any(any(load) for load in topics.values()):
        topics = dict.fromkeys(topics, (1.0, 0.0))
    load = BundleLoad(topics)
    made = plan(bundle_map, load, writers=writers, tolerance=tolerance, by=by)
    if form == "json":
        click.echo(json.dumps({**made.to_dict(), "bundles": _told(made.map, load, made.assignment)}, indent=2))
    else:
        _show(_told(made.map, load, made.assignment))
        click.echo(str(made))
    if plot is not None:
        in_turn = {bundle: number % writers for number, bundle in enumerate(bundle_map.bundles)}
        panels = {"before, dealt out in turn": (bundle_map, in_turn), "after": (made.map, made.assignment)}
        _draw(plot, str(made), load, panels, 1 if made.unit == "bytes" else 0)


# ---- topics


def _topics(
    bootstrap: str | None, listed: dict[str, tuple[float, float]] | None, config: dict[str, Any], held: bool
) -> dict[str, tuple[float, float]]:
    """Topics and what is known of their load; with `held`, brokers are asked how many records each has."""
    if bootstrap is not None:
        config["bootstrap.servers"] = bootstrap
    servers = config.get("bootstrap.servers")
    if (listed is None) == (not servers):
        raise click.UsageError("say where the topics are: -b HOST:PORT or --topics-file FILE, one of them")
    if listed is not None:
        return listed
    try:
        admin = AdminClient(_positions.client_options(config))
        known = admin.list_topics(timeout=CONNECT_S).topics
        places = [
            TopicPartition(name, number)
            for name, topic in known.items()
            if not name.startswith("__")
            for number in topic.partitions
        ]
        found = {place.topic: 0.0 for place in places}
        if held:
            starts = _offsets(admin, places, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
            ends = _offsets(admin, places, OffsetSpec.latest())  # type: ignore[no-untyped-call]
            for key, end in ends.items():
                found[key[0]] += end - starts[key]
    except KafkaException as problem:
        raise Failure(f"the brokers at {servers} do not answer ({problem.args[0].str()})", 2) from None
    except ValueError as problem:
        raise Failure(f"unusable option: {problem}", 2) from None
    return {name: (records, 0.0) for name, records in found.items()}


def _offsets(admin: AdminClient, places: list[TopicPartition], spec: OffsetSpec) -> dict[tuple[str, int], int]:
    if not places:
        return {}
    asked = admin.list_offsets(
        dict.fromkeys(places, spec), isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=CONNECT_S
    )
    return {(place.topic, place.partition): future.result().offset for place, future in asked.items()}


# ---- answers


def _told(bundle_map: BundleMap, load: BundleLoad, writers: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """A row for each bundle."""
    inside: dict[str, list[str]] = {bundle: [] for bundle in bundle_map.bundles}
    for topic, at in load.positions():
        inside[bundle_map.find_position(at)].append(str(topic))
    rows = []
    for bundle, one in load.by_bundle(bundle_map).items():
        row = {"bundle": bundle, "topics": len(inside[bundle]), "records": one.records_per_s, "bytes": one.bytes_per_s}
        rows.append(row if writers is None else {**row, "writer": writers[bundle]})
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    table = _table(*rows[0])
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.15g}" for value in row.values()))
    console().print(table)


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("topic", "bundle") else "right")
    return table


def _draw(
    path: Path,
    title: str,
    load: BundleLoad,
    panels: Mapping[str, tuple[BundleMap, Mapping[str, int]]],
    field: int | None = None,
) -> None:
    """Pictures show bytes if any are known, else records, else how many topics a bundle has."""
    if not any(any(one) for one in load.topics.values()):
        load, field = BundleLoad(dict.fromkeys(load.topics, (1, 0))), 0
    if field is None:
        field = 1 if load.total().bytes_per_s else 0
    drawn = {}
    for name, (bundle_map, writers) in panels.items():
        loads = load.by_bundle(bundle_map)
        drawn[name] = [
            Wedge(*bundle_map.range_of(bundle), loads[bundle][field], writers.get(bundle))
            for bundle in bundle_map.bundles
        ]
    _pictures.draw_rings(path, title, drawn)
    click.echo(f"picture: {path}", err=True)
