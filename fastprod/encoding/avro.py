"""Rows as Avro: the schema is settled once, where the registry can be reached, and rows are encoded in C anywhere.

Avro(schema | subject + registry | neither)
  │ resolve(arrow_schema)     driver: asks the registry, derives, checks that the columns fit
  ▼
Avro(text of the schema, its id)     picklable, no registry, no secrets
  │ encode(batch)             executors: _core/_avro, a plan per Arrow schema
  ▼
00, id (4 bytes, big endian), body    Confluent's wire format;   or the bare body
"""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fastprod.encoding import _avro_schema as avro_schema
from fastprod.encoding._columns import selected

if TYPE_CHECKING:
    from fastprod._core._columns import Column

DERIVE = "derive"


class Avro:
    """Encodes rows of Arrow batches as Avro.

    `schema` is JSON text, the same as Python objects, or "derive": made from the columns. Without a schema it is the
    latest version of `subject`, or, without a subject, derived. `registry` is a dict of options for confluent-kafka's
    `SchemaRegistryClient` (url, basic.auth.user.info, ...) or such a client.

    wire       "confluent": magic byte and schema id first; the id is the registry's, or `schema_id`. "bare": neither.
    register   a given or derived schema is registered under `subject`; False: it must be there already.
    normalize  the registry compares normalised schemas.
    columns, exclude   which columns are encoded; all unless set.
    extra      "refuse" or "ignore" columns that the schema has no field for.
    names      "refuse" or "sanitise" column names that Avro does not allow, when a schema is derived.
    times      "exact": a time between two ticks of Avro's unit is a bad row; "truncate": it is rounded down.
    naive      "refuse" a timestamp without zone as an instant, or take it to be in "utc".
    name, namespace    of the derived record.
    """

    def __init__(
        self,
        schema: str | Mapping[str, Any] | Sequence[Any] | None = None,
        subject: str | None = None,
        registry: Any = None,
        *,
        wire: str = "confluent",
        schema_id: int | None = None,
        register: bool = True,
        normalize: bool = False,
        columns: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        extra: str = "refuse",
        names: str = "refuse",
        times: str = "exact",
        naive: str = "refuse",
        name: str = "Row",
        namespace: str | None = None,
    ) -> None:
        for option, value, allowed in (
            ("wire", wire, ("confluent", "bare")),
            ("extra", extra, ("refuse", "ignore")),
            ("names", names, ("refuse", "sanitise")),
            ("times", times, ("exact", "truncate")),
            ("naive", naive, ("refuse", "utc")),
        ):
            if value not in allowed:
                raise ValueError(f"{option} is {value!r}, which is not one of {', '.join(allowed)}")
        for option, given in (("columns", columns), ("exclude", exclude)):
            if isinstance(given, str):
                raise TypeError(f"{option} must be a list of names, not a str: write {option}=[{given!r}]")
        if subject is not None and registry is None:
            raise ValueError(f"subject {subject!r} needs a registry: registry={{'url': ...}}")
        if registry is not None and subject is None:
            raise ValueError("a registry needs a subject, such as subject='orders-value'")
        if registry is not None and schema_id is not None:
            raise ValueError("give a registry or a schema_id, not both")
        if schema_id is not None and not 0 <= schema_id < 2**31:
            raise ValueError(f"schema_id is {schema_id}, which is not from 0 to {2**31 - 1}")
        if wire == "confluent" and registry is None and schema_id is None:
            raise ValueError(
                "Confluent's wire format needs a schema id: give subject and registry, or schema_id, or wire='bare'"
            )
        if schema is None and registry is None:
            schema = DERIVE
        self._text: str | None = None  # JSON of the schema, "derive", or None: to be fetched
        if schema is not None:
            self._text = schema if isinstance(schema, str) else json.dumps(schema)
            if self._text != DERIVE:
                avro_schema.parse(self._text)
        self._named: tuple[str, ...] = ()  # texts of schemas that this one refers to
        self._subject = subject
        self._registry = registry
        self._wire = wire
        self._id = schema_id
        self._register = register
        self._normalize = normalize
        self._columns = None if columns is None else tuple(columns)
        self._exclude = None if exclude is None else tuple(exclude)
        self._extra = extra
        self._names = names
        self._times = times
        self._naive = naive
        self._name = name
        self._namespace = namespace
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._settled: tuple[Any, Avro] | None = None  # Arrow schema, this encoder resolved for it
        self._planned: tuple[Any, Any] | None = None  # Arrow schema, its Plan

    # ---- what it is

    def __repr__(self) -> str:
        shown = [f"wire={self._wire!r}"]
        if self._text == DERIVE:
            shown.insert(0, "derived")
        elif self._text is not None:
            shown.insert(0, str(avro_schema.parse(self._text, self._named)))
        if self._subject is not None:
            shown.append(f"subject={self._subject!r}")
        if self._id is not None:
            shown.append(f"schema_id={self._id}")
        if self._registry is not None:
            shown.append("registry=...")  # whose options have secrets
        return f"Avro({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        if self._registry is not None:
            raise pickle.PicklingError(
                "an Avro that has a registry is not pickled, for its secrets: pickle resolve(schema)"
            )
        state = dict(self.__dict__)
        for name in ("_lock", "_settled", "_planned"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def schema(self) -> str | None:
        """The schema's JSON text; None while it is still to be fetched or derived."""
        return None if self._text == DERIVE else self._text

    @property
    def schema_id(self) -> int | None:
        """The id that records carry; None while the registry has not been asked, or when they carry none."""
        return self._id

    # ---- settling the schema

    def resolve(self, arrow_schema: Any) -> Avro:
        """This encoder with its schema and id, which needs no registry any more; refuses columns that do not fit."""
        with self._lock:
            settled = self._settled
            if settled is None or not (settled[0] is None or settled[0].equals(arrow_schema)):
                settled = self._settled = self._settle(arrow_schema)
        made = settled[1]
        made._plan(arrow_schema)
        return made

    def _settle(self, arrow_schema: Any) -> tuple[Any, Avro]:
        text, derived = self._text, self._text == DERIVE
        if derived:
            chosen = self.taken(arrow_schema)
            text = json.dumps(
                avro_schema.derive(chosen, self._name, self._namespace, sanitise=self._names == "sanitise")
            )
        elif self._registry is None:
            return None, self
        made = Avro.__new__(Avro)
        made.__dict__.update(self.__dict__)
        made._forget()
        made._registry = None
        made._text = text
        if self._registry is not None:
            if text is not None:
                made._plan(arrow_schema)  # what does not fit is not registered
                made._planned = None  # its records would have no id yet
            made._text, made._named, made._id = self._ask(text)
        return (arrow_schema if derived else None), made

    def _ask(self, text: str | None) -> tuple[str, tuple[str, ...], int]:
        """Schema, schemas it refers to and id, from the registry. Its errors are told without its options."""
        try:
            from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
        except ImportError as error:
            raise ImportError(f"a schema registry needs pip install 'fastprod[avro]': {error}") from None
        client = self._registry
        named: tuple[str, ...] = ()
        try:
            if isinstance(client, Mapping):
                client = SchemaRegistryClient.new_client(dict(client))
            if text is None:
                found = client.get_latest_version(self._subject)
                if (found.schema.schema_type or "AVRO") != "AVRO":
                    raise ValueError(f"its latest version is {found.schema.schema_type}, not AVRO")
                text, named = found.schema.schema_str, tuple(_referred(client, found.schema, set()))
                number = found.schema_id
            elif self._register:
                number = client.register_schema(self._subject, Schema(text, "AVRO"), self._normalize)
            else:
                number = client.lookup_schema(self._subject, Schema(text, "AVRO"), self._normalize).schema_id
        except Exception as error:
            what = "fetch" if self._text is None else "register" if self._register else "look up"
            shown = _without_secrets(str(error), self._registry)
            raise ValueError(
                f"cannot {what} the schema of subject {self._subject!r}: {type(error).__name__}: {shown}"
            ) from None
        return str(text), named, int(number)

    def taken(self, data: Any) -> Any:
        """The columns of a batch or Arrow schema that are encoded."""
        return selected(data, self._columns, self._exclude)

    def _plan(self, schema: Any) -> Any:
        """The compiled plan for an Arrow schema; the last one is kept, since many batches have one."""
        planned = self._planned
        if planned is not None and planned[0].equals(schema):
            return planned[1]
        from fastprod._core._avro import Plan

        assert self._text is not None
        avro = avro_schema.parse(self._text, self._named)
        rules = avro_schema.Rules(self._extra == "ignore", self._times == "truncate", self._naive == "utc")
        step = avro_schema.plan(avro, self.taken(schema), rules)
        prefix = b""
        if self._wire == "confluent":
            prefix = b"\0" + (self._id or 0).to_bytes(4, "big")
            if avro.kind == "bytes":
                if avro.logical is not None:
                    raise ValueError(
                        f"the schema is just {avro}, which Confluent's clients read in two ways: put it into a record"
                    )
                step.op = "raw"
        plan = Plan(step, prefix, rules.truncate)
        self._planned = (schema, plan)
        return plan

    # ---- encoding

    def check(self, schema: Any) -> None:
        """Refuses columns that do not fit the Avro schema; asks the registry if that has not been done."""
        self.resolve(schema)

    def encode(self, data: Any) -> Any:
        """The rows of a RecordBatch as a `pyarrow.LargeBinaryArray`; of a Table or the like as a ChunkedArray.

        A row that does not fit is a ValueError that says which and why.
        """
        import pyarrow as pa

        if isinstance(data, pa.RecordBatch):
            return self._encode(data, _array)
        if not isinstance(data, pa.Table):
            if not (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")):
                raise TypeError(f"expected an Arrow RecordBatch or Table, not {type(data).__name__}")
            data = pa.table(data)
        self.check(data.schema)
        chunks: list[Any] = []
        for batch in data.to_batches():
            base = sum(map(len, chunks))
            chunks.append(self._encode(batch, partial(_array, base=base)))
        return pa.chunked_array(chunks, pa.large_binary())

    def encode_column(self, batch: Any, name: str = "value", base: int = 0) -> Column:
        """The rows of a RecordBatch as a column of a bulk call, in which those that do not fit fail alone."""
        column: Column = self._encode(batch, lambda plan, chosen: plan.column(chosen, name, base))
        return column

    def _encode(self, batch: Any, run: Callable[[Any, Any], Any]) -> Any:
        made = self.resolve(batch.schema)
        return run(made._plan(batch.schema), self.taken(batch))


def _array(plan: Any, batch: Any, base: int = 0) -> Any:
    return plan.array(batch, base)


def _referred(client: Any, schema: Any, seen: set[tuple[str, int]]) -> list[str]:
    """Texts of the schemas that a schema of the registry refers to, each behind those that it refers to itself."""
    texts: list[str] = []
    for one in schema.references or ():
        if (one.subject, one.version) not in seen:
            seen.add((one.subject, one.version))
            found = client.get_version(one.subject, one.version).schema
            texts += [*_referred(client, found, seen), found.schema_str]
    return texts


def _without_secrets(text: str, options: Any) -> str:
    """An error's text without what the options hold, and without the user in an address."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            if name != "url" and isinstance(value, str) and len(value) > 2:
                for secret in {value, *value.split(":", 1)}:
                    text = text.replace(secret, "***") if len(secret) > 2 else text
    return re.sub(r"//[^/@\s]+@", "//***@", text)
