"""Three gigabytes of files to Kafka: the memory of workers, the progress line, and what kills leave behind.

    FASTPROD_LONG_TESTS=1 python -m pytest -s tests/spark/test_export_large.py

Half an hour on two cores. Needs 4 GB of disk in TMPDIR and 8 GB of memory for the brokers' data.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from fastprod._config import DEFAULT_BUFFER_MEMORY
from fastprod.cli._orders import orders
from fastprod.testing import KafkaCluster

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from spark_kill_workers import order_files  # noqa: E402

MB = 1 << 20
GB = 1 << 30
ROWS = 37_000_000
CORES = 2
PARTITIONS = 6
SOME_MB = 100 * MB  # rows as Arrow and as JSON, and what allocators and sockets keep; as test_memory has it
LINE = re.compile(r"(\d+)/(\d+) tasks, ([\d,]+) of ([\d,]+) rows, ([\d,]+) of ([\d,]+) MB, ([\d,]+) of ([\d,]+) files")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a terminal

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.usefixtures("spark_available", "kafka_available"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    """Not pytest's folder, which keeps what earlier runs have left."""
    with tempfile.TemporaryDirectory(prefix="fastprod-large-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def broker(kafka_available: None) -> Iterator[KafkaCluster]:
    """One that looks every few seconds for what it need not keep."""
    with KafkaCluster(config={"log.retention.check.interval.ms": 2000, "log.initial.task.delay.ms": 1000}) as cluster:
        yield cluster


def largest_row_group(folder: Path) -> int:
    """Bytes, as it is stored."""
    groups = (pq.read_metadata(path).row_group(0) for path in folder.glob("*.parquet"))  # the first is a full one
    return max(sum(group.column(at).total_compressed_size for at in range(group.num_columns)) for group in groups)


@dataclass
class Seen:
    """What was seen of an export from outside."""

    peaks: dict[int, int] = field(default_factory=dict)
    """The most memory that each Python worker had, its libraries included."""
    lines: list[tuple[int, ...]] = field(default_factory=list)
    """Progress: tasks, rows, MB and files, each with its total."""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Rows of which the line told, and those that the broker had at the time."""
    broker: int = 0
    """Rows that the broker has in the end."""
    said: str = ""

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def peaks_of(program: programs.Program) -> dict[int, int]:
    found = {}
    for pid in program.descendants("pyspark.daemon"):
        with suppress(OSError, StopIteration):  # gone meanwhile
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            found[pid] = int(next(line for line in status if line.startswith("VmHWM:")).split()[1]) << 10
    return found


def exported(cluster: KafkaCluster, folder: Path, topic: str) -> Seen:
    """Runs `fastprod export` on a terminal, and looks at it until it ends."""
    # What is acknowledged counts; a broker whose data lies in memory need not keep it.
    small = {"segment.bytes": 64 * MB, "retention.bytes": 64 * MB, "file.delete.delay.ms": 0}
    cluster.create_topic(topic, PARTITIONS, config=small)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    places = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(PARTITIONS)}

    def rows() -> int:
        return sum(end.result(programs.GUARD_S).offset for end in admin.list_offsets(places).values())

    seen = Seen()
    ours, theirs = os.openpty()
    text: list[str] = []

    def listen() -> None:
        with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # an error tells that it was closed
            while part := terminal.read(1 << 16):
                text.append(part.decode(errors="replace"))

    command = ["-m", "fastprod", "export", str(folder), "-t", topic, "-b", cluster.bootstrap_servers]
    command += ["--master", f"local[{CORES}]"]
    wide = os.environ | {"COLUMNS": "240", "TERM": "xterm"}
    with programs.started(*command, stderr=theirs, env=wide, cwd=folder.parent) as program:
        os.close(theirs)
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        while program.poll() is None:
            for pid, peak in peaks_of(program).items():
                seen.peaks[pid] = max(peak, seen.peaks.get(pid, 0))
            told = LINE.findall(CODES.sub("", "".join(text[-20:])))
            if told:
                seen.pairs.append((int(told[-1][2].replace(",", "")), rows()))
            time.sleep(0.2)
        listener.join(programs.KEEPERS_S)
        assert program.stdout is not None
        seen.said = program.stdout.read()
        assert program.returncode == 0, seen.said + "".join(text)[-5000:]
    told = LINE.findall(CODES.sub("", "".join(text)))
    seen.lines = [tuple(int(number.replace(",", "")) for number in line) for line in told]
    seen.broker = rows()
    return seen


def test_three_gigabytes_take_no_more_memory_than_promised_and_the_progress_is_right(work, broker) -> None:
    few, many = work / "few", work / "many"
    order_files(few, 1000)
    order_files(many, ROWS)
    size = sum(path.stat().st_size for path in many.iterdir())
    assert size >= 3 * GB
    base = exported(broker, few, "few")
    assert base.broker == 1000
    seen = exported(broker, many, "many")
    group = largest_row_group(many)
    print(f"\n{size / 1e9:.2f} GB in {len(list(many.iterdir()))} files, row groups of up to {group / MB:.0f} MB")
    print(seen.said.splitlines()[0])
    print(f"workers at most: {[peak // MB for peak in seen.peaks.values()]} MB; with 1,000 rows {base.peak // MB} MB")

    # docs/spark.md: some MB of rows, the row group that they are from, as it is stored, and buffer.memory.
    assert seen.peak <= base.peak + group + DEFAULT_BUFFER_MEMORY + SOME_MB
    assert f"{ROWS:,} records" in seen.said
    assert seen.broker == ROWS

    tasks = seen.lines[0][1]
    print(f"{len(seen.lines)} lines, the last: {seen.lines[-1]}; {len(seen.pairs)} comparisons with the broker")
    assert {line[1::2] for line in seen.lines} == {(tasks, ROWS, round(size / 1e6), len(list(many.iterdir())))}
    assert all(one <= other for before, after in pairwise(seen.lines) for one, other in zip(before, after, strict=True))
    # Tasks that have ended are told of; those at work have written up to a split each.
    behind = [there - told for told, there in seen.pairs if 0 < told < ROWS]
    split = ROWS / tasks
    print(
        f"rows that the line was behind, in splits: median {median(behind) / split:.2f}, "
        f"{min(behind) / split:.2f} to {max(behind) / split:.2f}"
    )
    assert -split / 2 <= median(behind) <= (CORES + 0.5) * split
    assert seen.lines[-1][0] == tasks


def test_a_row_group_is_in_memory_as_it_is_stored(work, broker) -> None:
    """Compressed: 3 million rows take 55 MB on disk, 350 MB as Arrow, and one row group follows another."""
    few, wide = work / "few-again", work / "wide"
    order_files(few, 1000)
    wide.mkdir()
    rows = pa.Table.from_batches([orders(3_000_000)] * 2)
    pq.write_table(rows, wide / "part-0.parquet", row_group_size=3_000_000, compression="zstd")
    group, whole = largest_row_group(wide), rows.nbytes
    del rows
    base, seen = exported(broker, few, "few-again"), exported(broker, wide, "wide")
    print(f"\nrow groups of {group // MB} MB, {whole // 2 // MB} MB as Arrow")
    print(f"workers at most: {[peak // MB for peak in seen.peaks.values()]} MB; with 1,000 rows {base.peak // MB} MB")
    bound = base.peak + group + DEFAULT_BUFFER_MEMORY + SOME_MB
    assert bound < base.peak + whole // 2, "the test could not tell"
    assert seen.peak <= bound
    assert seen.broker == 6_000_000


@pytest.mark.parametrize(
    ("rows", "jobs", "faults", "seed"), [(100_000, 3, 8, 11), (ROWS, 1, 3, 3)], ids=["naps", "large"]
)
def test_every_row_is_there_once_whoever_is_killed(work, rows, jobs, faults, seed) -> None:
    """Python workers, executors and drivers of a standalone cluster; 1 to 4 cores, another number each time.

    Large: the way of a user's rows. With naps, in a partitioner, more moments can be met.
    """
    command = [str(EXAMPLES / "spark_kill_workers.py"), "--files", "--rows", str(rows)]
    command += ["--jobs", str(jobs), "--faults", str(faults), "--seed", str(seed)]
    with programs.started(*command, env=os.environ | {"TMPDIR": str(work)}) as program:
        said, errors = program.communicate(timeout=7000)
    print(f"\n{said}")
    assert program.returncode == 0, f"{said}\n{errors}"
    total = re.search(r"^all +(\d+) +(\d+) +(\d+) +0 +0 +0$", said, re.MULTILINE)
    assert total, said
    assert int(total[1]) >= faults
    hit = {kind: int(times) for kind, times in re.findall(r"^(worker|executor|driver) +(\d+)", said, re.MULTILINE)}
    assert rows < ROWS or all(hit.values()), hit  # its tasks are long enough for all of them
    assert said.endswith(": as promised\n")
