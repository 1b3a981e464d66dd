"""The memory of Python workers that write large rows to slow brokers."""

import json
import os
import sys
from pathlib import Path

import pytest

import fastprod.spark
from fastprod.spark import _worker, write
from fastprod.testing import MockClusterProcess

MB = 1 << 20
ROW = 500_000
PARTITIONS = 16

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) << 10


class Measured:
    """report_batches, in a worker, with a note of what memory it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, sink, batches):
        import pyarrow  # noqa: F401  (part of the baseline)

        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, largest = resident("VmRSS"), 0

        def seen():
            nonlocal largest
            for batch in batches:
                largest = max(largest, batch.nbytes)
                yield batch

        yield from _worker.report_batches(sink, seen())
        note = {"before": before, "grown": resident("VmHWM") - before, "batch": largest}
        (self.folder / f"{os.getpid()}-{before}.json").write_text(json.dumps(note))


def grown(spark, folder, monkeypatch, rows: int, tasks: int, slow_ms: int, fast_ms: int, settings: dict) -> list[dict]:
    """Writes rows of which one in PARTITIONS goes to a slow broker."""
    monkeypatch.setattr(fastprod.spark, "report_batches", Measured(folder))
    monkeypatch.setitem(spark.sparkContext.environment, "FASTPROD_TEST", str(folder))  # workers that did nothing yet
    df = spark.range(0, rows, 1, tasks).selectExpr(
        f"repeat('x', {ROW}) AS value", f"cast(id % {PARTITIONS} AS int) AS partition"
    )
    with MockClusterProcess(3, topics={"large": PARTITIONS}) as cluster:
        for number in range(PARTITIONS):
            cluster.set_leader("large", number, 1 if number == 0 else 2 + number % 2)
        cluster.set_rtt(fast_ms)
        cluster.set_rtt(slow_ms, 1)
        report = write(df, "large", {"bootstrap.servers": cluster.bootstrap_servers, **settings})
    assert report.records == rows
    notes = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert notes
    return notes


def check(notes: list[dict], memory: int) -> None:
    for note in notes:
        print({name: round(size / MB) for name, size in note.items()})
        assert note["grown"] <= memory + note["batch"] + 100 * MB, notes


@pytest.mark.long
def test_one_slow_partition_does_not_keep_all_batches(spark, tmp_path, monkeypatch) -> None:
    """Small batches, so that a few hundred megabytes tell."""
    size = "spark.sql.execution.arrow.maxBytesPerBatch"
    spark.conf.set(size, str(8 * MB))
    try:
        notes = grown(spark, tmp_path, monkeypatch, 1200, 1, 3000, 0, {"buffer.memory": 32 * MB})
    finally:
        spark.conf.unset(size)
    check(notes, 32 * MB)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow_ms", [200, 3000])
def test_three_gigabytes_through_slow_brokers(spark, tmp_path, monkeypatch, slow_ms) -> None:
    check(grown(spark, tmp_path, monkeypatch, 6600, 4, slow_ms, 200, {}), 32 * MB)
