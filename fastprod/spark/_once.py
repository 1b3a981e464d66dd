"""Exactly once per Spark partition: a transaction that carries a marker of what it wrote.

    driver   claims the job's name: a marker says how many partitions it has and how rows come into them. Another
             answer than an earlier run's is refused, before anything is sent
    task     init_transactions()     fences an older attempt; its transaction is committed or aborted now, not open
             the partition's marker? yes: reads its rows all the same and compares them with the marker; writes nothing
             begin, records, proof that the rows have ended, marker, commit

The marker of a partition is written in the transaction of its records: both become visible together or not at all. It
names the rows by their number and a fingerprint that does not depend on their order. A second run whose partition
holds other rows under the same name is told so, instead of losing or doubling the difference.

In a stream each batch is such a job. The transaction's id stays the same from batch to batch, so that brokers have no
more of them to keep than there are partitions; markers name the batch.

    group                      marker
    fastprod.<job>.job         claim (an id), topic, layout, partitions, batch
    fastprod.<job>.<number>    claim, topic, layout, partitions, batch, records, bytes, fingerprint

An export of files names its rows by the files that they are in. Its job's marker also says how many bytes a split has
and how rows become records; the files themselves, with sizes and times, are in markers of their own, written in the
same transaction. A partition of it that is committed is not read again, so its marker needs no fingerprint.

    fastprod.<job>.files:<n>   claim, files (packed)

Brokers forget markers after a time (see _positions), each group's at a time of its own, also while a job runs. A job's
is written first and never touched again: once that is gone, or about to go, no marker does not mean "not written yet".
A run that comes shortly before that time is over is refused, where brokers say how long it is. A task that finds none
of its own looks at the time too, and for the job's marker: it refuses if that is gone, or another's. So does one that
finds a marker of another claim than its job's.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from fastprod import _positions
from fastprod._core._fingerprint import Fingerprint
from fastprod.producer import Producer
from fastprod.spark._priority import LevelProducer
from fastprod.spark._sink import FILES, MARKERS, ExportError, Sink
from fastprod.spark.report import TaskReport

__all__ = ["Once", "check_all", "claim", "earlier", "is_fenced", "noted", "with_transactions"]

TRANSACTION_TIMEOUT_MS = 900_000  # the most that brokers allow unless configured otherwise
READERS = 16
LOOK_S = 5.0  # for a first look at the marker of a job
YOUNG_S = 600.0  # age of a job's marker up to which its note of how long brokers keep it is taken for the truth
MARGIN_S = 1800.0  # before that time is over: clocks differ; no more than half of the time, where it is short
FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)

Marker = dict[str, Any]


def with_transactions(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration for transactions of that name."""
    return {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS, **config, "transactional.id": name}


def _begin(config: Mapping[str, Any], name: str, levels: int = 1) -> Producer:
    """A producer of that name alone; older ones are fenced when this returns."""
    producer = LevelProducer(with_transactions(config, name), levels)
    try:
        _positions.patiently(lambda: producer.init_transactions(_positions.ANSWER_S))
    except BaseException:
        _positions.end(producer)
        raise
    return producer


# ---- the job


def claim(sink: Sink, more: Mapping[str, Any] | None = None, notes: Sequence[str] = ()) -> Sink:
    """Claims the job's name for `sink.partitions` partitions, and returns the sink with the claim in it.

    A new marker holds `more` too, and `notes` are put beside it. Raises ValueError if an earlier run under this name
    had other partitions. Of two that claim the same name at the same time one writes the marker and the other finds it:
    the transaction's id keeps them apart.
    """
    name = f"fastprod.{sink.job}.job"
    with _positions.reader(sink.config, name) as group:
        deadline = time.monotonic() + _positions.ANSWER_S
        kept, pause = None, 0.1
        while (found := _look(sink, group)) is None:
            if kept is None:  # not between here and the marker, while others may come and fence us
                kept = {"kept": _positions.retention_s(sink.config)}
            producer = _begin(sink.config, name)
            try:
                marker = _positions.read_marker(group, sink.place)
                if (found := _same_batch(sink, marker)) is not None:
                    break
                if marker is None:
                    _check_places(sink, name)
                producer.begin_transaction()
                when = {"at": int(time.time()), **kept}
                wanted = {"claim": uuid.uuid4().hex, **when, **_identity(sink), **(more or {})}
                for number, note in enumerate(notes):
                    with _positions.reader(sink.config, _note(sink, number)) as holder:
                        document = {"claim": wanted["claim"], "files": note}
                        _positions.write_marker(producer, holder, sink.place, document)
                _positions.write_marker(producer, group, sink.place, wanted)
                _positions.patiently(producer.commit_transaction)
                found = wanted
                break
            except KafkaException:
                # Tasks of a stream may all start at once: whoever was fenced waits for the marker of another.
                if not is_fenced(producer) or time.monotonic() > deadline:
                    raise
                pause = min(2 * pause, 10.0)  # the more there are, the longer one needs to be alone
                time.sleep(random.uniform(pause / 4, pause))
            finally:
                _positions.end(producer)
    _compare(sink, found, "nothing was sent")
    sink = replace(sink, claim=found["claim"], began=found["at"], until=_until(sink, found))
    _check_age(sink, ValueError, "Nothing was sent")
    return sink


def earlier(sink: Sink) -> Marker | None:
    """The marker of a job whose name was claimed before, whatever it says; None for a new one."""
    name = f"fastprod.{sink.job}.job"
    with _positions.reader(sink.config, name) as group:
        found = _look(sink, group)
        if found is None:
            producer = _begin(sink.config, name)  # ends a transaction that may hide the marker
            try:
                found = _same_batch(sink, _positions.read_marker(group, sink.place))
                if found is None:
                    _check_places(sink, name)
            finally:
                _positions.end(producer)
        return found


def noted(sink: Sink, marker: Marker, count: int) -> list[str]:
    """The notes that were put beside the marker of a job."""

    def read(number: int) -> str:
        with _positions.reader(sink.config, _note(sink, number)) as group:
            found = _positions.read_marker(group, sink.place)
        if found is None or found.get("claim") != marker["claim"]:
            raise ValueError(
                f"the brokers have forgotten a part of what they knew about job {sink.job!r} "
                "(offsets.retention.minutes), so some of it might be written twice. Nothing was sent. Take another "
                "job_id if everything is to be written again"
            )
        return str(found["files"])

    with ThreadPoolExecutor(READERS) as pool:  # a client each, most of whose time is waiting
        return list(pool.map(read, range(count)))


def _note(sink: Sink, number: int) -> str:
    return f"fastprod.{sink.job}.files:{number}"  # a colon is in no job_id, so this is no group of another job


def _look(sink: Sink, group: Consumer) -> Marker | None:
    """The marker of the job, before anybody is fenced.

    None also where brokers do not tell: a transaction that nobody ends may hide it until its owner is fenced.
    """
    if sink.place == MARKERS:
        _positions.make_place(sink.config, group, sink.place)
    elif sink.marker_topic not in (None, sink.single) and not _positions.has_place(group, sink.place):
        raise ValueError(f"there is no topic {sink.place!r}, which marker_topic names. Nothing was sent")
    try:
        return _same_batch(sink, _positions.read_marker(group, sink.place, LOOK_S))
    except KafkaException as problem:
        error = problem.args[0]
        if error.code() not in (KafkaError._TIMED_OUT, *_positions.PASSING) and not error.retriable():
            raise
        return None


def _check_places(sink: Sink, name: str) -> None:
    """Refuses a name that was used before with its markers at another topic, where nobody would look for them."""
    for other in _positions.other_places(sink.config, name, sink.place):
        raise ValueError(
            f"job {sink.job!r} was run before with its markers at topic {other!r}, and would now have them at "
            f"{sink.place!r}: everything would be written again. Nothing was sent. Give topic and marker_topic as "
            "before, or take another job_id"
        )


def _until(sink: Sink, marker: Marker) -> float | None:
    """The time up to which the job's markers are relied on; None where brokers do not tell how long they keep them."""
    young = "kept" in marker and time.time() - marker["at"] < YOUNG_S  # every task of a stream is here
    kept = marker["kept"] if young else _positions.retention_s(sink.config)
    return None if kept is None else marker["at"] + kept - min(MARGIN_S, kept / 2)


def _check_age(sink: Sink, error: type[Exception], so_far: str) -> None:
    """Refuses to go on under a name whose markers the brokers are about to forget, each at a time of its own."""
    if sink.until is not None and sink.began is not None and time.time() > sink.until:
        raise error(
            f"job {sink.job!r} was begun {(time.time() - sink.began) / 3600:.1f} hours ago, and the brokers are about "
            "to forget its markers (offsets.retention.minutes): some partitions might be written twice. "
            f"{so_far}. Take another job_id if everything is to be written again"
        )


def _identity(sink: Sink) -> Marker:
    """What must be the same in every run of a job."""
    return {"topic": sink.target, "layout": sink.layout, "partitions": sink.partitions, "batch": sink.batch}


def _same_batch(sink: Sink, marker: Marker | None) -> Marker | None:
    """The marker, unless it is that of an earlier batch."""
    if marker is None or marker.get("batch") == sink.batch:
        return marker
    if sink.batch is None or marker.get("batch") is None:
        raise ValueError(
            f"job_id {sink.job!r} was used before for {_a_batch(marker.get('batch'))}, now for {_a_batch(sink.batch)}: "
            "take another name"
        )
    if marker["batch"] > sink.batch:
        raise ValueError(
            f"{_a_batch(marker['batch'])} of job {sink.job!r} has been written before, so {_a_batch(sink.batch)} was "
            "too, and cannot be compared any more. Is the checkpoint an older copy? Nothing was sent. With a new "
            "checkpoint or another job_id everything from here on would be written again"
        )
    return None


def _a_batch(number: int | None) -> str:
    return "an export without batches" if number is None else f"batch {number}"


def _compare(sink: Sink, marker: Marker, so_far: str) -> None:
    """Raises ValueError unless an earlier run had the same topic, layout and number of partitions."""
    about = f"job {sink.job!r}" + ("" if sink.batch is None else f", batch {sink.batch},")
    if marker.get("topic") != sink.target:
        raise ValueError(
            f"{about} went to {_a_topic(marker.get('topic'))} in an earlier run, and would go to "
            f"{_a_topic(sink.target)} now; {so_far}. Take another job_id for another topic"
        )
    before = str(marker.get("layout"))
    if before != sink.layout and (sink.named or before.startswith(FILES)):
        raise ValueError(
            f"{about} was another export in an earlier run: of other files, or by write() instead of export(); "
            f"{so_far}. Run it as before; another job_id writes all again"
        )
    if marker.get("layout") != sink.layout:
        raise ValueError(
            f"{about} divided its rows by {marker.get('layout')} in an earlier run, and would by {sink.layout} now: "
            f"some would be lost and some doubled; {so_far}. Run it as before; another job_id writes all again"
        )
    had, now = marker.get("partitions"), sink.partitions
    if had != now and None in (had, now):
        raise ValueError(
            f"{about} was written by the data source in one run and by write() or partition_writer() in another: "
            "without buckets the data source does not know its partitions, so they cannot be compared; "
            f"{so_far}. Run it as before; another job_id writes all again"
        )
    if had != now:
        remedy = (
            f"Run it with buckets={had}"
            if sink.bucketed
            else f"Run it with {had} partitions again (the same cores, input and settings), or use "
            'exactly_once="bucket", which does not depend on them, from the first run on'
        )
        raise ValueError(
            f"{about} had {had} partitions in an earlier run and has {now} now: rows would be in other partitions, "
            f"some lost and some doubled; {so_far}. {remedy}. Under another job_id everything is written again"
        )


def _a_topic(topic: str | None) -> str:
    return "the topics that rows name" if topic is None else f"topic {topic!r}"


def check_all(sink: Sink, partitions: int) -> None:
    """After the last task, where nobody knew the number of partitions before: is there a marker of one that is none?

    If so, an earlier run had more of them, and the same rows are in both. Where it was known, there is nothing to ask.
    """
    if sink.partitions is not None:
        return
    form = re.compile(rf"fastprod\.{re.escape(str(sink.job))}\.(\d+)")
    numbers = map(form.fullmatch, _positions.groups(sink.config) or [])
    others = [number for found in numbers if found and (number := int(found[1])) >= partitions]

    def read(number: int) -> Marker | None:
        with _positions.reader(sink.config, f"fastprod.{sink.job}.{number}") as group:
            return _positions.read_marker(group, sink.place)

    with ThreadPoolExecutor(READERS) as pool:  # a client each, most of whose time is waiting
        for number, marker in zip(others, pool.map(read, others), strict=True):
            if marker is not None and marker.get("batch") == sink.batch:
                raise ExportError(
                    f"job {sink.job!r}{'' if sink.batch is None else f', batch {sink.batch},'} has {partitions} "
                    f"partitions, but an earlier run has committed partition {number}: it had more of them, so rows "
                    "are in the topic twice or are missing. Write it anew to another topic under another job_id, and "
                    'with exactly_once="bucket", which does not depend on Spark\'s partitions'
                )


# ---- a partition


@dataclass(frozen=True)
class Once:
    """The output of one Spark partition."""

    sink: Sink
    number: int

    @property
    def name(self) -> str:
        """Of the transaction, and of the consumer group that holds the marker."""
        return f"fastprod.{self.sink.job}.{self.number}"

    def producer(self) -> Producer:
        """A producer of this partition alone; older ones are fenced when this returns."""
        return _begin(self.sink.config, self.name, self.sink.levels)

    @contextmanager
    def group(self) -> Iterator[Consumer]:
        """Reads and names the place of the marker."""
        with _positions.reader(self.sink.config, self.name) as consumer:
            yield consumer

    def committed(self, group: Consumer) -> Marker | None:
        """The marker of an earlier attempt or run that has committed this partition."""
        if self.sink.claim is None and self.sink.place == MARKERS:  # nobody has claimed the job, and made its place
            _positions.make_place(self.sink.config, group, self.sink.place)
        marker = _same_batch(self.sink, _positions.read_marker(group, self.sink.place))
        if marker is None:
            self._check_none()
            return None
        if "fingerprint" not in marker and not self.sink.named:
            raise ExportError(
                f"partition {self.number} of job {self.sink.job!r} was committed by an older fastprod, which did not "
                "note what it wrote: nobody can tell whether these are the same rows. Take another job_id"
            )
        _compare(self.sink, marker, f"nothing of partition {self.number} was sent")
        if marker.get("claim") != self.sink.claim:
            raise ExportError(
                f"partition {self.number} of job {self.sink.job!r} was committed by a run whose own marker the brokers "
                "have forgotten (offsets.retention.minutes): they may have forgotten other partitions too, which would "
                "be written twice. Take another job_id if everything is to be written again"
            )
        return marker

    def _check_none(self) -> None:
        """Raises ExportError unless "no marker" means "not written", and not that brokers have forgotten it."""
        if self.sink.claim is None:
            return
        so_far = f"Nothing of partition {self.number} was sent"
        _check_age(self.sink, ExportError, so_far)
        with _positions.reader(self.sink.config, f"fastprod.{self.sink.job}.job") as group:
            found = _positions.read_marker(group, self.sink.place)
        if found is None and _positions.groups(self.sink.config) is None:
            return  # mock brokers: there never was one
        if found is None or found.get("claim") != self.sink.claim:
            raise ExportError(
                f"the marker of job {self.sink.job!r} is {'gone' if found is None else 'that of another run'}: the "
                "brokers have forgotten it since this run began (offsets.retention.minutes), or somebody has deleted "
                f"it. They may have forgotten partitions too, which would be written twice. {so_far}. Take another "
                "job_id if everything is to be written again"
            )

    def compare(self, marker: Marker, rows: Fingerprint, report: TaskReport) -> None:
        """Completes the report of a task that writes nothing, if its rows are those that were committed."""
        if (marker["records"], marker["fingerprint"]) != (rows.rows, str(rows)):
            raise ExportError(
                f"partition {self.number} holds other rows than those committed under this name (job "
                f"{self.sink.job!r}): {rows.rows:,} rows with fingerprint {rows}, committed were {marker['records']:,} "
                f"with {marker['fingerprint']}. The input has changed, is not deterministic, or is divided in another "
                "way than in the run that committed it. Nothing of this partition was sent"
            )
        self.skip(marker, report)

    def skip(self, marker: Marker, report: TaskReport) -> None:
        """Completes the report of a task whose rows are committed."""
        report.records, report.bytes, report.skipped = marker["records"], marker["bytes"], marker["records"] > 0

    def commit(self, producer: Producer, group: Consumer, rows: Fingerprint | None, report: TaskReport) -> None:
        """Ends the transaction with the marker in it."""
        marker = {
            "claim": self.sink.claim,
            **_identity(self.sink),
            "records": report.records,
            "bytes": report.bytes,
            **({} if rows is None else {"fingerprint": str(rows)}),
        }
        _positions.write_marker(producer, group, self.sink.place, marker, report.records)
        _positions.patiently(producer.commit_transaction)


def is_fenced(producer: Producer) -> bool:
    """Whether a newer producer has taken over the transactional.id."""
    try:
        producer.begin_transaction()  # never begins one in a transaction that has failed: it tells the state
    except KafkaException as problem:
        return problem.args[0].code() in FENCED
    return False
