"""`PriorityProducer`: a producer whose records have a level, and of whose waiting records the highest go first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from fastprod import _bulk, _positions
from fastprod.priority import levels
from fastprod.producer import DeliveryCallback, Producer
from fastprod.receipt import Receipt

if TYPE_CHECKING:
    from fastprod.encoding import Encoder


class PriorityProducer(Producer):
    """A `fastprod.Producer` for `max_priority` levels: a record of priority i goes to the Kafka topic `<topic>-i`.

    0 is the lowest and the default. `max_priority` may also be `max.priority` in the configuration.

    >>> producer = PriorityProducer({"bootstrap.servers": "localhost:9092"}, max_priority=3)
    >>> producer.create_topics("orders", partitions=6)
    >>> producer.produce("orders", b"...", key=b"customer-17", priority=2)
    >>> producer.flush()
    """

    max_priority: int

    def __init__(self, config: Mapping[str, Any] | None = None, max_priority: int | None = None, **more: Any) -> None:
        options = {**(config or {}), **more}
        self.max_priority = self._level_count = levels.agreed_levels(max_priority, options)
        self._names: dict[str, list[str]] = {}
        self._options = options  # for clients that create topics
        super().__init__(options)

    def _names_of(self, topic: str) -> list[str]:
        """The Kafka topics of a logical one, index = level."""
        found = self._names.get(topic)
        if found is None:
            if not isinstance(topic, str) or not topic:
                raise TypeError(f"topic must be a name, not {topic!r}")
            found = self._names[topic] = levels.level_topics(topic, self.max_priority)
        return found

    def _name(self, topic: str, priority: Any) -> str:
        levels.check_priority(priority, self.max_priority)
        return self._names_of(topic)[int(priority)]

    def produce(self, topic: str, *arguments: Any, priority: int = 0, **options: Any) -> None:
        """As `Producer.produce`, with a level."""
        super().produce(self._name(topic, priority), *arguments, **options)

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
        *,
        priority: int = 0,
    ) -> int:
        """As `Producer.produce_batch`, all of one level."""
        return super().produce_batch(self._name(topic, priority), messages, partition, callback, on_delivery)

    def produce_many(
        self,
        topic: str,
        values: Any,
        keys: Any = None,
        partitions: Any = None,
        headers: Any = None,
        timestamps: Any = None,
        *,
        priority: Any = 0,
        receipt: Receipt | None = None,
    ) -> Receipt:
        """As `Producer.produce_many`; `priority` is a level for all, or a column of them.

        With a column the Receipt is one for several topics, as that of `produce_arrow` with a topic column.
        """
        if isinstance(priority, Integral):
            name = self._name(topic, priority)
            return super().produce_many(name, values, keys, partitions, headers, timestamps, receipt=receipt)
        runtime = self._open()
        names = self._column(self._names_of(topic), priority)
        blocks = _bulk.blocks_of_columns(values, keys, partitions, headers, timestamps, names)
        receipt = runtime.receipt(None, receipt)
        for block in blocks:
            runtime.submit(receipt, *block)
        return receipt

    def produce_arrow(
        self,
        batch_or_table: Any,
        topic: str | None = None,
        *,
        value: str | Encoder | None = None,
        key: str | Encoder | None = None,
        headers: str | None = None,
        timestamp: str | None = None,
        partition: str | None = None,
        receipt: Receipt | None = None,
    ) -> Receipt:
        """As `Producer.produce_arrow`; a column `priority` of integers has the levels, null or no column is 0."""
        import pyarrow as pa

        named = (value, key, headers, timestamp, partition)
        if any(one is not None for one in named):
            return self._produce_rows(batch_or_table, topic, named, receipt, partial(self._topics, topic))
        source = batch_or_table
        if not isinstance(source, (pa.RecordBatch, pa.Table, pa.RecordBatchReader)):
            if not (hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__")):
                raise TypeError(f"expected an Arrow RecordBatch or Table, not {type(source).__name__}")
            source = pa.table(source)
        if isinstance(source, pa.RecordBatch):
            source = pa.Table.from_batches(
                [source]
            )  # pa.table() would lose track of whose memory it is, and it be copied
        if topic is None and "topic" not in source.schema.names:
            raise ValueError("give a topic, or have a column 'topic'")
        if isinstance(source, pa.RecordBatchReader):
            first = self._placed(source.schema.empty_table(), topic)
            batches = (
                part for batch in source for part in self._placed(pa.Table.from_batches([batch]), topic).to_batches()
            )
            placed: Any = pa.RecordBatchReader.from_batches(first.schema, batches)
        else:
            placed = self._placed(source, topic)
        return super().produce_arrow(placed, receipt=receipt)

    def _topics(self, topic: str | None, batch: Any) -> Any:
        """Names of Kafka topics for the rows of a batch."""
        import pyarrow as pa

        if topic is None and "topic" not in batch.schema.names:
            raise ValueError("give a topic, or have a column 'topic'")
        return self._placed(pa.Table.from_batches([batch]), topic).column("topic")

    def _placed(self, table: Any, topic: str | None) -> Any:
        """The table with names of Kafka topics in place of logical ones and levels."""
        import pyarrow as pa
        import pyarrow.compute as pc

        column = table.column("priority") if "priority" in table.schema.names else pa.nulls(len(table), pa.int32())
        if topic is not None:
            names = self._column(self._names_of(topic), column)
        else:
            numbers = self._numbers(column, len(table))
            call: Any = pc  # whose type hints do not know it
            names = call.binary_join_element_wise(
                table.column("topic").cast(pa.string()), pa.array(numbers).cast(pa.string()), "-"
            )
        kept = table.drop_columns([name for name in ("priority", "topic") if name in table.schema.names])
        return kept.append_column("topic", names)

    def _column(self, names: list[str], priorities: Any) -> Any:
        """Names of Kafka topics for a column of levels."""
        import pyarrow as pa

        try:
            count = len(priorities)
        except TypeError:
            raise TypeError(f"priority must be an integer or a column of them, not {priorities!r}") from None
        return pa.array(names).take(pa.array(self._numbers(priorities, count)))

    def _numbers(self, priorities: Any, count: int) -> Any:
        """Levels as an array, all of them checked; null is 0."""
        numbers = _bulk.integers(priorities, "priority", count, "int32", 0)
        wrong = (numbers < 0) | (numbers >= self.max_priority)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"priority at index {row} is {numbers[row]}: it must be from 0, the lowest, to {self.max_priority - 1}"
            )
        return numbers

    def create_topics(
        self,
        topic: str,
        partitions: int = -1,
        replication_factor: int = -1,
        config: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> list[str]:
        """Creates the Kafka topics of all levels; those that exist are left alone. Returns the names of new ones.

        -1 leaves the number to the brokers' defaults.
        """
        self.list_topics(timeout=timeout)  # if brokers cannot be reached, this says why
        admin = AdminClient(_positions.client_options(self._options))
        wanted = [
            NewTopic(name, partitions, replication_factor, config=dict(config or {})) for name in self._names_of(topic)
        ]
        made: list[str] = []
        errors: list[Exception] = []
        for name, answer in admin.create_topics(wanted, request_timeout=timeout).items():
            try:
                answer.result()
                made.append(name)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    error.add_note(f"topic {name!r}")
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup(f"{len(errors)} topics were not created", errors)
        self._await_topics(admin, made, time.monotonic() + timeout)
        return made

    def _await_topics(self, admin: AdminClient, names: list[str], deadline: float) -> None:
        """Until brokers tell of topics that they have just made: who produces at once would find none."""
        while names and time.monotonic() < deadline:
            known = admin.list_topics(timeout=max(0.1, deadline - time.monotonic())).topics
            if all(name in known and known[name].error is None and known[name].partitions for name in names):
                return
            time.sleep(0.05)
