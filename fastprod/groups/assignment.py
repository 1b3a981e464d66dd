"""Where a source partition goes on: its position, kept twice, and both written in the transaction of its records.

    the group's offsets         coordination topic, partition p: offset 0, and a document in its metadata
    a compacted topic           positions topic, partition p: the same document as a record

    {"position": "...", "at": ms}                   as long as it fits into metadata
    {"sha256": "...", "length": n, "at": ms}        in the metadata, where the position does not; the record has it

Brokers forget a group's offsets some days after its last member has gone, and at once when the coordination topic is
deleted: then they say "never committed", and everything would be produced again. The compacted topic does not forget.
Both must say the same, or nobody goes on.

A transaction's end reaches partitions one by one. So when both differ, that counts only if no transaction is open in
the partition of the positions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from fastprod import _positions
from fastprod.groups.membership import consumer_options

__all__ = ["Document", "Positions", "PositionsDiffer", "check_long", "coordination_topic", "positions_topic"]

COORDINATION = "fastprod-group-"
POSITIONS = "fastprod-positions-"
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20), "min.cleanable.dirty.ratio": "0.2"}
LOOK_BACK = 64  # offsets before the end of a positions' partition; the newest record is nearly always among them
REFUSED = (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED)
RECORD_ROOM = 1024  # bytes that the rest of a record may take

Document = dict[str, Any]


def coordination_topic(group_id: str) -> str:
    return COORDINATION + group_id


def positions_topic(group_id: str) -> str:
    return POSITIONS + group_id


class PositionsDiffer(RuntimeError):
    """The group's offsets and the compacted topic do not agree on where a source partition goes on."""


@dataclass(frozen=True, slots=True)
class Written:
    """A position in its two forms."""

    metadata: str
    record: bytes


def written(position: str, at_ms: int) -> Written:
    whole = _positions.encoded({"position": position, "at": at_ms})
    if len(whole) <= _positions.LONGEST:
        return Written(whole, whole.encode())
    return Written(_positions.encoded(_digest({"position": position, "at": at_ms})), whole.encode())


def _digest(document: Document) -> Document:
    content = document["position"].encode("utf-8", "surrogatepass")
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "length": len(document["position"]),
        "at": document["at"],
    }


def check_long(partition: int, position: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a position that no record can hold, before anything is sent."""
    most = int(config.get("message.max.bytes", 1_000_000)) - RECORD_ROOM
    if 12 * len(position) < most:  # no character takes more
        return
    size = len(written(position, time.time_ns() // 10**6).record)
    if size > most:
        raise ValueError(
            f"the position of source partition {partition} takes {size:,} bytes, and {most:,} is the most that fits "
            "into a record (message.max.bytes). Keep the data elsewhere and let the position name it"
        )


def agree(offset: Document | None, record: Document | None) -> bool:
    """Whether both places say the same."""
    if offset is None or record is None:
        return offset is record
    return offset == record or ("sha256" in offset and offset == _digest(record))


class Positions:
    """Reads positions of a group. `consumer` belongs to the group, whether it has joined it or not."""

    def __init__(self, config: Mapping[str, Any], group_id: str, consumer: Consumer) -> None:
        self._config = config
        self._group_id = group_id
        self._consumer = consumer
        self._readers: dict[str, Consumer] = {}  # by isolation level
        self.trouble: str | None = None  # why the last read brought nothing

    def make_topics(self, partitions: int) -> None:
        """Creates both topics where they are missing; ValueError if they are for another number of partitions."""
        for topic, settings in (
            (positions_topic(self._group_id), COMPACTED),
            (coordination_topic(self._group_id), None),
        ):
            _positions.make_place(self._config, self._consumer, topic, partitions, settings)
            found = self._consumer.list_topics(topic, timeout=_positions.ANSWER_S).topics[topic].partitions
            if len(found) != partitions:
                raise ValueError(
                    f"source_partition_count={partitions}, but group {self._group_id!r} was made for {len(found)} "
                    f"(the partitions of topic {topic!r}): give that number, or another group_id for another division "
                    "of the source"
                )

    def read(self, partitions: Iterable[int], patience: float) -> dict[int, Document | None] | None:
        """The documents with the positions, None for a partition that was never committed.

        None in all if `patience` seconds were too short: a transaction is not over, or brokers do not answer, which
        `trouble` tells. Brokers that come and go say all kinds of things, so everything but a refusal may pass.
        Raises PositionsDiffer if the two places do not agree.
        """
        wanted = sorted(partitions)
        if not wanted:
            return {}
        deadline = time.monotonic() + patience
        topic = coordination_topic(self._group_id)
        settled: set[int] = set()
        before: dict[int, object] = {}  # what differed in the last round: of a busy group it is never the same twice
        try:
            while True:
                offsets = _positions.committed(self._consumer, topic, wanted, _left(deadline))
                records = self._newest(wanted, deadline)
                differ = [one for one in wanted if not agree(offsets[one], records[one])]
                if not differ:
                    return records
                seen: dict[int, object] = {one: (offsets[one], records[one]) for one in differ}
                if settled.issuperset(differ) and before == seen:
                    raise self._difference(differ[0], offsets[differ[0]], records[differ[0]])
                if time.monotonic() > deadline:
                    self.trouble = "a transaction with positions is not over"
                    return None
                before = seen
                time.sleep(0.05)
                settled = self._settled(differ, deadline)  # before both are read again
        except KafkaException as problem:
            if problem.args[0].code() in REFUSED:
                raise
            self.trouble = problem.args[0].str()
            return None
        except _Late:
            self.trouble = f"the end of topic {positions_topic(self._group_id)!r} did not come"
            return None

    def _difference(self, partition: int, offset: Document | None, record: Document | None) -> PositionsDiffer:
        if offset is None:
            why = "brokers have forgotten the group's offsets (offsets.retention.minutes, or the topic was deleted)"
        elif record is None:
            why = "the compacted topic was deleted or emptied"
        else:
            why = "somebody else has written one of them"
        last = (record or {}).get("position")
        hint = f" --to {last!r}" if last is not None and len(last) < 200 else " --to POSITION"
        return PositionsDiffer(
            f"source partition {partition} of group {self._group_id!r}: its position is {_shown(offset)} in the "
            f"group's offsets, and {_shown(record)} in topic {positions_topic(self._group_id)!r}: {why}. Nothing was "
            "produced, because some of it might be there already. Look at what arrived last, stop all "
            f"members, and say where to go on: fastprod group reset {self._group_id} --partition {partition}{hint}"
        )

    # ---- the compacted topic

    def _client(self, isolation: str) -> Consumer:
        """A reader of the compacted topic, made when it is needed."""
        if isolation not in self._readers:
            own = {
                "group.id": self._group_id,  # which it never joins
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
                "error_cb": lambda error: None,
            }
            self._readers[isolation] = Consumer({**consumer_options(self._config), **own})
        return self._readers[isolation]

    def _ends(self, partitions: Iterable[int], isolation: str, deadline: float) -> dict[int, int]:
        """The offset behind the last record of each partition that readers of that kind see.

        By asking for the "time" that means the end, because it takes a request per broker, not one per partition. The
        admin client has a call for it, but that of librdkafka 2.16 crashes when brokers come and go meanwhile.
        """
        topic = positions_topic(self._group_id)
        wanted = [TopicPartition(topic, one, OFFSET_END) for one in partitions]
        found = self._client(isolation).offsets_for_times(wanted, timeout=_left(deadline))
        for place in found:
            if place.error is not None:
                raise KafkaException(place.error)
            if place.offset < 0:
                raise _Late()
        return {place.partition: place.offset for place in found}

    def _settled(self, partitions: list[int], deadline: float) -> set[int]:
        """Those in whose records no transaction is open: readers of committed records see all there is."""
        visible = self._ends(partitions, "read_committed", deadline)
        stored = self._ends(partitions, "read_uncommitted", deadline)
        return {one for one in partitions if visible[one] == stored[one]}

    def _newest(self, partitions: list[int], deadline: float) -> dict[int, Document | None]:
        """The last committed record of each partition."""
        found: dict[int, Document | None] = dict.fromkeys(partitions)
        ends = self._ends(partitions, "read_committed", deadline)
        starts = {one: max(0, end - LOOK_BACK) for one, end in ends.items() if end > 0}
        while starts:
            seen = self._read_from(starts, deadline)
            found.update(seen)
            # Where there were only marks of transactions, or records of aborted ones, it is further back.
            starts = {
                one: max(0, ends[one] - 8 * (ends[one] - start))
                for one, start in starts.items()
                if one not in seen and start > 0
            }
        return found

    def _read_from(self, starts: Mapping[int, int], deadline: float) -> dict[int, Document]:
        """The last record of each partition, from a start on; those that have none are left out."""
        topic = positions_topic(self._group_id)
        reader = self._client("read_committed")
        reader.assign([TopicPartition(topic, one, start) for one, start in starts.items()])
        left = set(starts)
        seen: dict[int, Document] = {}
        try:
            while left:
                for message in reader.consume(1000, 0.05):
                    partition: Any = message.partition()
                    error = message.error()
                    if error is not None:
                        if error.code() != KafkaError._PARTITION_EOF:
                            raise KafkaException(error)
                        left.discard(partition)
                        continue
                    document = _positions.decoded((message.value() or b"").decode())
                    if document is None:
                        raise RuntimeError(
                            f"topic {topic!r} has a record that was not written by fastprod, at offset "
                            f"{message.offset()} of partition {partition}: {message.value()!r}"
                        )
                    seen[partition] = document
                if left and time.monotonic() > deadline:
                    raise _Late()
        finally:
            reader.unassign()
        return seen

    def close(self) -> None:
        """Ends the clients that read the compacted topic; the next read makes new ones."""
        while self._readers:
            self._readers.popitem()[1].close()


class _Late(Exception):
    """The end of a partition did not come in time."""


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


def _shown(document: Document | None) -> str:
    if document is None:
        return "not there"
    if "position" not in document:
        return f"one of {document['length']:,} characters"
    position = document["position"]
    return repr(position) if len(position) < 200 else f"{position[:100]!r}... of {len(position):,} characters"
