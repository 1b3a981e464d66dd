"""Rows to bytes: the 12-column orders frame, about 240 bytes of JSON a row, in slices as `produce_arrow` takes them.

`TimeJson` and `TimeAvro` are gates. `track_against_orjson` says how many times as fast Json is as `orjson.dumps(row)`
for each row of `to_pylist()`, whose making is not counted; orjson knows no Decimal, and gets it as text.
`track_against_fastavro` does the same with Avro and `fastavro.schemaless_writer`.
"""

import io
import json
import statistics
import time
from decimal import Decimal

from fastprod.cli._orders import orders
from fastprod.encoding import Avro, Json
from fastprod.encoding._roles import SLICE_ROWS

ROWS = 16 * SLICE_ROWS
ROUNDS = 9


def slices(batch):
    return [batch.slice(start, SLICE_ROWS) for start in range(0, batch.num_rows, SLICE_ROWS)]


class TimeJson:
    def setup(self):
        self.slices = slices(orders(ROWS))
        self.encoder = Json()

    def time_orders(self):
        for part in self.slices:
            self.encoder.encode_column(part)

    def peakmem_orders(self):
        for part in self.slices:
            self.encoder.encode_column(part)


class TimeAvro:
    def setup(self):
        batch = orders(ROWS)
        self.slices = slices(batch)
        self.encoder = Avro(wire="bare").resolve(batch.schema)

    def time_orders(self):
        for part in self.slices:
            self.encoder.encode_column(part)

    def peakmem_orders(self):
        for part in self.slices:
            self.encoder.encode_column(part)


class TimeKinds:
    """A column of one kind each, to see which is slow. Informs."""

    params = tuple(orders(1).schema.names)
    param_names = ("column",)

    def setup(self, column):
        self.slices = slices(orders(ROWS))
        self.encoder = Json([column])

    def time_column(self, column):
        for part in self.slices:
            self.encoder.encode_column(part)


class AgainstOrjson:
    unit = "x"

    def setup(self):
        batch = orders(4 * SLICE_ROWS)
        self.slices = slices(batch)
        self.rows = batch.to_pylist()

    def track_against_orjson(self):
        from orjson import dumps

        return ratio(Json(), self.slices, self.rows, lambda row: dumps(row, default=text))


class AgainstFastavro:
    unit = "x"

    def setup(self):
        import fastavro

        batch = orders(4 * SLICE_ROWS)
        self.slices = slices(batch)
        self.rows = batch.to_pylist()
        self.encoder = Avro(wire="bare").resolve(batch.schema)
        self.schema = fastavro.parse_schema(json.loads(self.encoder.schema))
        self.writer = fastavro.schemaless_writer

    def write(self, row):
        stream = io.BytesIO()
        self.writer(stream, self.schema, row)
        stream.getvalue()

    def track_against_fastavro(self):
        return ratio(self.encoder, self.slices, self.rows, self.write)


def text(value):
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def ratio(encoder, slices, rows, write):
    """CPU time of both for the same rows, taken in turns; the medians divided."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for part in slices:
            encoder.encode_column(part)
        ours.append(time.thread_time() - start)
        start = time.thread_time()
        for row in rows:
            write(row)
        theirs.append(time.thread_time() - start)
    return statistics.median(theirs) / statistics.median(ours)
