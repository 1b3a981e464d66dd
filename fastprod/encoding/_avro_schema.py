"""Avro schemas: read from JSON, derived from Arrow's, and matched with the columns that are to be written.

    JSON text ── parse() ──► Type (names resolved)  ─┐
    Arrow schema ── derive() ──► JSON                ├─ plan() ──► Step, a tree that _core/_avro turns into C
    Arrow schema ────────────────────────────────────┘

`plan` decides everything that does not depend on a row: which column a field reads, which branch of a union its
type selects, by what a time is multiplied. What does not fit is refused here, with the field's path and both types,
before anything is encoded. What a row decides (ranges, nulls, symbols) is checked while it is encoded.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
NAMED = ("record", "enum", "fixed", "error")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
COLUMN = "arrow.name"  # property of a derived field: the column's name, where Avro does not allow it
DEEPEST = 32  # levels of lists, maps and records in one another
DIGITS = 76  # of the widest decimal that Arrow has
MISSING: Any = object()

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY = 86_400
# logical type -> the type it is on, what kind of Arrow type it takes, ticks per second
TIMES = {
    "time-millis": ("int", "time", 10**3),
    "time-micros": ("long", "time", 10**6),
    **{
        f"{prefix}timestamp-{name}": ("long", kind, ticks)
        for prefix, kind in (("", "instant"), ("local-", "local"))
        for name, ticks in (("millis", 10**3), ("micros", 10**6), ("nanos", 10**9))
    },
}

# How well an Arrow type fits, the lower the better: decides between the branches of a union
EXACT, WIDENED, CHECKED = 0, 1, 2


@dataclass(eq=False, slots=True)
class Type:
    """One Avro type. Named types are one object wherever they are referred to, so a graph may have cycles."""

    kind: str
    logical: str | None = None
    name: str = ""
    size: int = 0  # fixed: bytes
    precision: int = 0
    scale: int = 0
    symbols: list[str] = field(default_factory=list)
    fields: list[Field] = field(default_factory=list)
    items: list[Type] = field(default_factory=list)  # of an array or map one, of a union its branches

    def __str__(self) -> str:
        if self.kind == "union":
            return f"[{', '.join(map(str, self.items))}]"
        if self.kind in ("array", "map"):
            return f"{self.kind}<{self.items[0]}>"
        shown = f"{self.kind} {self.name}" if self.name else self.kind
        if self.kind == "fixed":
            shown += f"({self.size})"
        if self.logical == "decimal":
            return f"{shown} decimal({self.precision}, {self.scale})"
        return f"{shown} {self.logical}" if self.logical else shown


@dataclass(eq=False, slots=True)
class Field:
    name: str
    type: Type
    aliases: list[str]
    column: str  # what the column is called: the name, unless the schema was derived and Avro forbids it
    default: Any = MISSING


@dataclass(eq=False, slots=True)
class Step:
    """How one Avro value is written: what _core/_avro needs, and what error texts say."""

    op: str
    type: str  # Avro's, for error texts
    path: tuple[str | None, ...]  # None is an element of a list or map
    cost: int = EXACT
    unit: str = ""  # of a time: its Arrow type, for error texts
    column: int = -1  # child of the parent's Arrow array
    branch: int = -1  # union: number of this branch, written first
    null: int = -1  # union: number of null; -1 when null is not allowed
    multiply: int = 1
    divide: int = 1
    size: int = 0  # fixed: bytes
    limit: int = 0  # decimal: 10 to the precision
    data: bytes = b""  # constant
    symbols: list[bytes] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def where(self, places: Sequence[Any]) -> str:
        """The path of a value; `places` are the numbers or keys of the elements on the way."""
        return show_path(self.path, places)


# ---- reading


def parse(source: str | bytes | Mapping[str, Any] | Sequence[Any], named: Sequence[str] = ()) -> Type:
    """The schema as types; `named` are texts of schemas that it refers to, each before those that need it."""
    names: dict[str, Type] = {}
    for text in named:
        _parse(_json(text), names, "")
    return _parse(_json(source), names, "")


def _json(source: Any) -> Any:
    if not isinstance(source, (str, bytes)):
        return source
    text = source.decode() if isinstance(source, bytes) else source
    if text in PRIMITIVES:
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the Avro schema is not JSON: {error}; it begins with {text[:60]!r}") from None


def _parse(source: Any, names: dict[str, Type], space: str) -> Type:
    if isinstance(source, str):
        if source in PRIMITIVES:
            return Type(source)
        found = names.get(source if "." in source or not space else f"{space}.{source}") or names.get(source)
        if found is None:
            raise ValueError(f"the Avro schema refers to {source!r}, which it does not define before")
        return found
    if isinstance(source, (list, tuple)):
        return _parse_union(source, names, space)
    if not isinstance(source, Mapping) or "type" not in source:
        raise ValueError(f"this is no Avro type: {json.dumps(source, default=repr)[:200]}")
    kind = source["type"]
    if not isinstance(kind, str) or kind not in (*PRIMITIVES, *NAMED, "array", "map"):
        return _parse(kind, names, space)  # a type in a type, or a reference
    if kind in NAMED:
        return _parse_named(source, kind, names, space)
    made = Type(kind)
    if kind in ("array", "map"):
        inner = "items" if kind == "array" else "values"
        if inner not in source:
            raise ValueError(f"an Avro {kind} has no {inner!r}: {json.dumps(source)[:200]}")
        made.items = [_parse(source[inner], names, space)]
    _parse_logical(made, source)
    return made


def _parse_union(source: Sequence[Any], names: dict[str, Type], space: str) -> Type:
    made = Type("union", items=[_parse(branch, names, space) for branch in source])
    seen = set()
    for branch in made.items:
        mark = branch.name or branch.kind
        if branch.kind == "union" or mark in seen:
            raise ValueError(f"an Avro union may not hold {'a union' if branch.kind == 'union' else mark + ' twice'}")
        seen.add(mark)
    if not 0 < len(made.items) <= 64:  # so that a branch's number is one byte
        raise ValueError(f"an Avro union has {len(made.items)} branches, which is not from 1 to 64")
    return made


def _parse_named(source: Mapping[str, Any], kind: str, names: dict[str, Type], space: str) -> Type:
    name = source.get("name")
    if not isinstance(name, str) or not all(NAME.fullmatch(part) for part in name.split(".")):
        raise ValueError(
            f"an Avro {kind} is called {name!r}: a name has letters, digits and _, and begins with no digit"
        )
    if "." in name:
        space, _, name = name.rpartition(".")
    else:
        space = source.get("namespace", space) or ""
    full = f"{space}.{name}" if space else name
    if full in names:
        raise ValueError(f"the Avro schema defines {full!r} twice")
    made = names[full] = Type("record" if kind == "error" else kind, name=full)
    if kind == "fixed":
        made.size = source.get("size", -1)
        if not isinstance(made.size, int) or made.size < 0:
            raise ValueError(f"the Avro fixed {full!r} has the size {source.get('size')!r}")
        _parse_logical(made, source)
    elif kind == "enum":
        made.symbols = list(source.get("symbols", ()))
        if not all(isinstance(one, str) for one in made.symbols) or len(set(made.symbols)) < len(made.symbols):
            raise ValueError(f"the symbols of the Avro enum {full!r} must be different strings: {made.symbols}")
    else:
        seen: set[str] = set()
        for one in source.get("fields", ()):
            if not isinstance(one, Mapping) or not isinstance(one.get("name"), str) or "type" not in one:
                raise ValueError(f"a field of the Avro record {full!r} has no name or type: {json.dumps(one)[:200]}")
            if one["name"] in seen:
                raise ValueError(f"the Avro record {full!r} has two fields {one['name']!r}")
            seen.add(one["name"])
            made.fields.append(
                Field(
                    one["name"],
                    _parse(one["type"], names, space),
                    list(one.get("aliases", ())),
                    one.get(COLUMN, one["name"]),
                    one.get("default", MISSING),
                )
            )
    return made


def _parse_logical(made: Type, source: Mapping[str, Any]) -> None:
    """A logical type that is unknown or does not fit is none at all, as Avro's specification has it."""
    logical = source.get("logicalType")
    if logical == "decimal" and made.kind in ("bytes", "fixed"):
        precision, scale = source.get("precision"), source.get("scale", 0)
        if isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision and precision > 0:
            made.logical, made.precision, made.scale = logical, precision, scale
    elif (
        (logical in TIMES and TIMES[logical][0] == made.kind)
        or (logical == "date" and made.kind == "int")
        or (logical == "uuid" and (made.kind == "string" or made.size == 16))
        or (logical == "duration" and made.kind == "fixed" and made.size == 12)
    ):
        made.logical = logical


# ---- deriving


def derive(schema: Any, name: str = "Row", namespace: str | None = None, sanitise: bool = False) -> dict[str, Any]:
    """An Avro schema for an Arrow schema, as JSON objects; the same for the same columns, always."""
    if not all(NAME.fullmatch(part) for part in [name, *(namespace or "x").split(".")]):
        raise ValueError(f"{namespace + '.' if namespace else ''}{name} is no name for an Avro record")
    made = _Deriving(sanitise).record(list(schema), name, ())
    return {"type": "record", "name": name, "namespace": namespace, **made} if namespace else made


class _Deriving:
    def __init__(self, sanitise: bool) -> None:
        self.sanitise = sanitise
        self.taken: set[str] = set()  # names of records and fixed types

    def unique(self, name: str) -> str:
        made, count = name, 1
        while made in self.taken:
            count += 1
            made = f"{name}_{count}"
        self.taken.add(made)
        return made

    def record(self, fields: list[Any], name: str, path: tuple[str | None, ...]) -> dict[str, Any]:
        name = self.unique(name)
        made: dict[str, dict[str, Any]] = {}
        for one in fields:
            here = (*path, one.name)
            written = one.name
            if not NAME.fullmatch(written):
                if not self.sanitise:
                    raise ValueError(
                        f"column {show_path(here)} cannot be called so in Avro, whose names have letters, digits and "
                        "_, and begin with no digit: rename it, or use names='sanitise'"
                    )
                written = re.sub(r"[^A-Za-z0-9_]", "_", written)
                written = written if NAME.fullmatch(written) else f"_{written}"
            if written in made:
                other = made[written].get(COLUMN, written)
                raise ValueError(f"columns {other!r} and {one.name!r} are both {written!r} in Avro: rename one")
            kind = self.type(one.type, f"{name}_{written}", here)
            entry: dict[str, Any] = {"name": written, "type": kind}
            if one.nullable:
                entry |= {"type": kind if kind == "null" else ["null", kind], "default": None}
            if written != one.name:
                entry[COLUMN] = one.name
            made[written] = entry
        return {"type": "record", "name": name, "fields": list(made.values())}

    def inner(self, one: Any, name: str, path: tuple[str | None, ...]) -> Any:
        kind = self.type(one.type, name, path)
        return ["null", kind] if one.nullable and kind != "null" else kind

    def type(self, kind: Any, name: str, path: tuple[str | None, ...]) -> Any:
        import pyarrow as pa

        known = pa.types
        if isinstance(kind, pa.BaseExtensionType):
            if kind.extension_name == "arrow.uuid":
                return {"type": "string", "logicalType": "uuid"}
            return self.type(kind.storage_type, name, path)
        if known.is_dictionary(kind) or known.is_run_end_encoded(kind):
            return self.type(kind.value_type, name, path)
        if known.is_null(kind):
            return "null"
        if known.is_boolean(kind):
            return "boolean"
        if known.is_integer(kind):
            return "int" if kind.bit_width < 32 or kind == pa.int32() else "long"
        if known.is_floating(kind):
            return "double" if kind.bit_width == 64 else "float"
        if _is_text(kind):
            return "string"
        if known.is_fixed_size_binary(kind):
            return {"type": "fixed", "name": self.unique(name), "size": kind.byte_width}
        if _is_bytes(kind):
            return "bytes"
        if known.is_decimal(kind):
            precision, scale = kind.precision, kind.scale
            if scale < 0 or scale > precision:  # Avro's scale is from 0 to the precision
                precision, scale = max(precision - min(scale, 0), scale), max(scale, 0)
            return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
        if known.is_date(kind):
            return {"type": "int", "logicalType": "date"}
        if known.is_time(kind):
            milli = kind.unit in ("s", "ms")
            return {"type": "int" if milli else "long", "logicalType": f"time-{'millis' if milli else 'micros'}"}
        if known.is_timestamp(kind):
            local = "" if kind.tz else "local-"
            unit = "millis" if kind.unit in ("s", "ms") else "micros"
            return {"type": "long", "logicalType": f"{local}timestamp-{unit}"}
        if known.is_map(kind):
            if not _is_text(_plain(kind.key_type)):
                raise TypeError(
                    f"{show_path(path)} is Arrow {kind}, and keys of Avro's maps are strings: cast them, or leave out"
                )
            return {"type": "map", "values": self.inner(kind.item_field, f"{name}_value", (*path, None))}
        if known.is_struct(kind):
            return self.record([kind.field(at) for at in range(kind.num_fields)], name, path)
        if _is_list(kind):
            return {"type": "array", "items": self.inner(kind.value_field, f"{name}_item", (*path, None))}
        fix = "cast it to int64" if known.is_duration(kind) else "cast it, or leave it out"
        raise TypeError(f"{show_path(path)} is Arrow {kind}, for which Avro has no type: {fix}")


def show_path(path: Sequence[str | None], places: Sequence[Any] = ()) -> str:
    """`items[2].price`: elements are numbered by `places`, and [] where there are none left."""
    shown, rest = "", iter(places)
    for part in path:
        if part is None:
            place = next(rest, None)
            shown += "[]" if place is None else f"[{place!r}]"
        else:
            name = part if NAME.fullmatch(part) else repr(part)
            shown += f".{name}" if shown else name
    return shown or "the value"


# ---- matching


@dataclass(frozen=True, slots=True)
class Rules:
    """What the caller allows."""

    ignore_extra: bool = False  # columns and struct fields that the schema does not have are left out
    truncate: bool = False  # times are rounded down to Avro's unit
    naive_utc: bool = False  # a timestamp without a zone is one in UTC


class Mismatch(TypeError):
    """The schema does not fit the columns."""


def plan(avro: Type, schema: Any, rules: Rules) -> Step:
    """Of a record the columns of an Arrow schema are the fields; any other type takes the only column."""
    fields = list(schema)
    if avro.kind == "record":
        return _Matching(rules).record(avro, fields, ())
    if len(fields) != 1:
        raise Mismatch(
            f"the Avro schema is {avro}, no record, and takes one column, but there are {len(fields)}: "
            f"{[one.name for one in fields]}; name it with columns=[...]"
        )
    made = _Matching(rules).value(avro, fields[0].type, (fields[0].name,))
    made.column = 0
    return made


class _Matching:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.depth = 0

    def refuse(self, avro: Type, arrow: Any, path: tuple[str | None, ...], why: str = "") -> NoReturn:
        raise Mismatch(f"{show_path(path)} is {avro} in Avro, but {arrow} in Arrow{': ' if why else ''}{why}")

    def value(self, avro: Type, arrow: Any, path: tuple[str | None, ...]) -> Step:
        import pyarrow as pa

        if avro.kind == "union":
            return self.union(avro, arrow, path)
        uuid = isinstance(arrow, pa.BaseExtensionType) and arrow.extension_name == "arrow.uuid"
        arrow = _plain(arrow)
        step = Step("", str(avro), path)
        if avro.logical is not None:
            self.logical(step, avro, arrow, uuid)
            return step
        self.depth += 1
        if self.depth > DEEPEST:
            raise Mismatch(f"{show_path(path)} is nested deeper than {DEEPEST} levels")
        try:
            return self.plain(step, avro, arrow)
        finally:
            self.depth -= 1

    def plain(self, step: Step, avro: Type, arrow: Any) -> Step:
        import pyarrow as pa

        known, kind, path = pa.types, avro.kind, step.path
        step.op = kind
        if kind == "record" and known.is_struct(arrow):
            return self.record(avro, [arrow.field(at) for at in range(arrow.num_fields)], path)
        if kind == "array" and _is_list(arrow):
            step.steps = [self.value(avro.items[0], arrow.value_type, (*path, None))]
            step.steps[0].column = 0
        elif kind == "map" and known.is_map(arrow):
            if not _is_text(_plain(arrow.key_type)):
                self.refuse(avro, arrow, path, "keys of Avro's maps are strings")
            key = Step("string", "string", (*path, None), column=0)
            item = self.value(avro.items[0], arrow.item_type, (*path, None))
            item.column = 1
            step.steps = [key, item]
        elif (kind == "null" and known.is_null(arrow)) or (kind == "boolean" and known.is_boolean(arrow)):
            pass
        elif kind in ("int", "long") and known.is_integer(arrow):
            width = 32 if kind == "int" else 64
            taken = arrow.bit_width + known.is_unsigned_integer(arrow)
            step.cost = EXACT if arrow.bit_width == width == taken else WIDENED if taken <= width else CHECKED
        elif kind in ("float", "double") and known.is_floating(arrow):
            width = 32 if kind == "float" else 64
            if arrow.bit_width > width:
                self.refuse(avro, arrow, path, "digits would be lost; cast the column to float32 if that is meant")
            step.cost = EXACT if arrow.bit_width == width else WIDENED
        elif kind in ("float", "double") and known.is_integer(arrow):
            step.cost = CHECKED
        elif (kind == "string" and _is_text(arrow)) or (kind == "bytes" and _is_bytes(arrow)):
            step.cost = WIDENED if known.is_fixed_size_binary(arrow) else EXACT
        elif kind == "bytes" and _is_text(arrow):
            step.cost = CHECKED
        elif kind == "fixed" and _is_bytes(arrow):
            step.size = avro.size
            if known.is_fixed_size_binary(arrow) and arrow.byte_width != avro.size:
                self.refuse(avro, arrow, path, "the sizes differ")
            step.cost = EXACT if known.is_fixed_size_binary(arrow) else CHECKED
        elif kind == "enum" and _is_text(arrow):
            step.symbols = [symbol.encode() for symbol in avro.symbols]
            step.cost = CHECKED
        else:
            self.refuse(avro, arrow, path)
        return step

    def record(self, avro: Type, fields: list[Any], path: tuple[str | None, ...]) -> Step:
        step = Step("record", str(avro), path)
        columns: dict[str, int] = {}
        for at, one in enumerate(fields):
            if one.name in columns:
                raise Mismatch(f"there are two columns {show_path((*path, one.name))}")
            columns[one.name] = at
        used = set()
        own = {name for one in avro.fields for name in (one.column, one.name)}  # which no alias of another may take
        for one in avro.fields:
            aliases = [alias for alias in one.aliases if alias not in own]
            name = next((name for name in (one.column, one.name, *aliases) if name in columns), None)
            here = (*path, one.name)
            if name is not None:
                if name in used:
                    raise Mismatch(f"column {show_path((*path, name))} would be written to two Avro fields")
                used.add(name)
                made = self.value(one.type, fields[columns[name]].type, here)
                made.column = columns[name]
            elif one.default is MISSING:
                raise Mismatch(
                    f"there is no column {show_path(here)} for the Avro field of type {one.type}, that has no "
                    f"default; the columns are {list(columns)}"
                )
            else:
                made = Step("constant", str(one.type), here, data=encode_default(one.type, one.default, here))
            step.steps.append(made)
        extra = [name for name in columns if name not in used]
        if extra and not self.rules.ignore_extra:
            raise Mismatch(
                f"{avro} has no field for {', '.join(show_path((*path, name)) for name in extra)}: "
                "choose with columns=[...], or leave out what the schema does not have with extra='ignore'"
            )
        return step

    def union(self, avro: Type, arrow: Any, path: tuple[str | None, ...]) -> Step:
        import pyarrow as pa

        null = next((at for at, branch in enumerate(avro.items) if branch.kind == "null"), -1)
        if pa.types.is_null(_plain(arrow)):
            if null < 0:
                self.refuse(avro, arrow, path)
            return Step("null", "null", path, branch=null, null=null)
        fits: list[Step] = []
        errors: list[Mismatch] = []
        for at, branch in enumerate(avro.items):
            if branch.kind == "null":
                continue
            try:
                made = self.value(branch, arrow, path)
            except Mismatch as error:
                errors.append(error)
                continue
            made.branch = at
            made.null = null
            made.type = str(avro)
            fits.append(made)
        if not fits:
            if len(errors) == 1:
                raise errors[0]
            self.refuse(avro, arrow, path, "no branch takes it" if errors else "it has no branch but null")
        best = min(one.cost for one in fits)
        chosen = [one for one in fits if one.cost == best]
        if len(chosen) > 1:
            names = " and ".join(str(avro.items[one.branch]) for one in chosen)
            self.refuse(avro, arrow, path, f"{names} take it equally well; cast the column, or narrow the union")
        return chosen[0]

    def logical(self, step: Step, avro: Type, arrow: Any, uuid: bool) -> None:
        import pyarrow as pa

        known, logical, path = pa.types, avro.logical, step.path
        step.unit = str(arrow) if known.is_temporal(arrow) else ""
        if logical == "decimal":
            self.decimal(step, avro, arrow)
        elif logical == "uuid" and avro.kind == "string" and _is_text(arrow):
            step.op, step.cost = "uuid", CHECKED
        elif logical == "uuid" and known.is_fixed_size_binary(arrow) and arrow.byte_width == 16:
            if avro.kind == "string":
                step.op = "uuid_text"
            else:
                step.op, step.size = "fixed", 16
            step.cost = EXACT if uuid else WIDENED
        elif logical == "date" and known.is_date(arrow):
            step.op = "int" if known.is_date32(arrow) else "int_scaled"
            step.divide = 1 if known.is_date32(arrow) else DAY * 1000
        elif logical == "duration" and known.is_duration(arrow):
            step.op, step.cost = "duration", CHECKED
            self.scale(step, PER_SECOND[arrow.unit], 1000)
        elif logical == "duration" and str(arrow) == "month_day_nano_interval":
            step.op, step.cost = "interval", CHECKED
            self.scale(step, 10**9, 1000)
        elif logical in TIMES:
            kind, takes, ticks = TIMES[logical]
            if takes == "time" and not known.is_time(arrow):
                self.refuse(avro, arrow, path)
            if takes != "time" and not known.is_timestamp(arrow):
                self.refuse(avro, arrow, path)
            if takes == "instant" and arrow.tz is None and not self.rules.naive_utc:
                self.refuse(
                    avro, arrow, path, "it has no time zone; say naive='utc' if it is in UTC, or use local-timestamp"
                )
            if takes == "local" and arrow.tz is not None:
                self.refuse(avro, arrow, path, "it has a time zone; cast it to a timestamp without, or use timestamp")
            self.scale(step, PER_SECOND[arrow.unit], ticks)
            step.op = kind if step.multiply == step.divide == 1 else f"{kind}_scaled"
        else:
            self.refuse(avro, arrow, path)

    @staticmethod
    def scale(step: Step, have: int, want: int) -> None:
        """From so many ticks per second to so many."""
        step.multiply, step.divide = max(want // have, 1), max(have // want, 1)
        step.cost = max(step.cost, WIDENED if step.multiply > 1 else CHECKED if step.divide > 1 else EXACT)

    def decimal(self, step: Step, avro: Type, arrow: Any) -> None:
        import pyarrow as pa

        if pa.types.is_decimal(arrow):
            precision, scale = arrow.precision, arrow.scale
        elif pa.types.is_integer(arrow):
            precision, scale = len(str(2**arrow.bit_width)), 0
            step.cost = CHECKED
        else:
            self.refuse(avro, arrow, step.path)
        raised = avro.scale - scale
        if raised < 0:
            self.refuse(
                avro, arrow, step.path, f"{-raised} digits behind the point would be lost; round the column first"
            )
        if raised > DIGITS:
            more = f"its scale is more than {DIGITS} digits larger; cast the column to another, or leave it out"
            self.refuse(avro, arrow, step.path, more)
        step.op = "decimal"
        step.multiply = 10**raised
        # Also where the column's type has no more digits: Arrow does not look whether its values keep to that
        step.limit = 10 ** min(avro.precision, DIGITS + 1)
        step.size = avro.size if avro.kind == "fixed" else -1
        step.cost = max(step.cost, WIDENED if raised else EXACT)
        if precision + raised > avro.precision:
            step.cost = CHECKED


def _plain(arrow: Any) -> Any:
    """The type that values have, below extensions, dictionaries and runs."""
    import pyarrow as pa

    while True:
        if isinstance(arrow, pa.BaseExtensionType):
            arrow = arrow.storage_type
        elif pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
            arrow = arrow.value_type
        else:
            return arrow


def _is_text(arrow: Any) -> bool:
    import pyarrow as pa

    known = pa.types
    return bool(known.is_string(arrow) or known.is_large_string(arrow) or known.is_string_view(arrow))


def _is_bytes(arrow: Any) -> bool:
    import pyarrow as pa

    known = pa.types
    checks = (known.is_binary, known.is_large_binary, known.is_binary_view, known.is_fixed_size_binary)
    return any(check(arrow) for check in checks)


def _is_list(arrow: Any) -> bool:
    import pyarrow as pa

    known = pa.types
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(known, name)(arrow) for name in names if hasattr(known, name))


# ---- defaults


def encode_default(avro: Type, value: Any, path: tuple[str | None, ...]) -> bytes:
    """The bytes of a field's default, which is JSON: bytes are text of code points up to 255."""
    kind = avro.kind
    try:
        if kind == "union":
            for at, branch in enumerate(avro.items):  # by the specification the first; newer ones take any that fits
                try:
                    return _varint(at) + encode_default(branch, value, path)
                except ValueError:
                    continue
        elif kind == "null" and value is None:
            return b""
        elif kind == "boolean" and isinstance(value, bool):
            return b"\1" if value else b"\0"
        elif kind in ("int", "long") and isinstance(value, int) and not isinstance(value, bool):
            bits = 31 if kind == "int" else 63
            if -(2**bits) <= value < 2**bits:
                return _varint(value)
        elif kind in ("float", "double") and isinstance(value, (int, float)) and not isinstance(value, bool):
            return struct.pack("<f" if kind == "float" else "<d", value)
        elif kind == "string" and isinstance(value, str):
            return _sized(value.encode())
        elif kind == "bytes" and isinstance(value, str):
            return _sized(value.encode("latin-1"))
        elif kind == "fixed" and isinstance(value, str) and len(value) == avro.size:
            return value.encode("latin-1")
        elif kind == "enum" and value in avro.symbols:
            return _varint(avro.symbols.index(value))
        elif kind == "array" and isinstance(value, list):
            items = b"".join(encode_default(avro.items[0], one, path) for one in value)
            return _varint(len(value)) + items + b"\0" if value else b"\0"
        elif kind == "map" and isinstance(value, dict):
            items = b"".join(
                _sized(name.encode()) + encode_default(avro.items[0], one, path) for name, one in value.items()
            )
            return _varint(len(value)) + items + b"\0" if value else b"\0"
        elif kind == "record" and isinstance(value, dict):
            made = b""
            for one in avro.fields:
                given = value.get(one.name, one.default)
                if given is MISSING:
                    raise ValueError(f"it lacks {one.name!r}")
                made += encode_default(one.type, given, path)
            return made
    except (ValueError, OverflowError, RecursionError):  # of an inner value, a character beyond 255, a record in itself
        pass
    raise ValueError(f"the default of {show_path(path)} is {json.dumps(value)[:100]}, which is no {avro}")


def _varint(value: int) -> bytes:
    rest = (value << 1) ^ (value >> 63)
    made = bytearray()
    while rest > 0x7F:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made)


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data
