"""Three tables of a database into three topics, by several processes: KIP-509's own story.

    python examples/db_to_kafka.py                          # SQLite and a Kafka on this machine, only Java is needed
    python examples/db_to_kafka.py --kills 10 --rows 50000
    python examples/db_to_kafka.py --database postgresql://user@host/db -b kafka:9092    # needs psycopg

While rows are being written, workers copy them: source partition 0 is table_a, 1 is table_b, 2 is table_c. There is
one worker more than there are tables; it stands by. Now and then one is killed with SIGKILL and another started. You
may kill any of them too: their process ids are printed. At the end every topic is read and compared with its table:
each row once, in the order of its changes. The exit status is 1 if not.

A position is "last_change_ts id" of the last row that was copied. The time alone, as in the KIP, would lose rows that
were changed in the same moment; and rows that are committed late with an earlier time are lost by any such query.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from fastprod.groups import ProducerGroup, RebalanceError
from fastprod.testing import KafkaCluster, KafkaUnavailable

GROUP = "ProducerForDB1"
TABLES = ("table_a", "table_b", "table_c")
SESSION_MS = 6000
BATCH = 200


class Database:
    """SQLite in a file, or PostgreSQL."""

    def __init__(self, where: str) -> None:
        self.connection: Any
        if where.startswith(("postgresql://", "postgres://")):
            import psycopg  # type: ignore[import-not-found]

            self.connection, self.mark = psycopg.connect(where, autocommit=True), "%s"
        else:
            self.connection, self.mark = sqlite3.connect(where, timeout=60, isolation_level=None), "?"

    def run(self, statement: str, *values: Any) -> list[Any]:
        cursor = self.connection.cursor()
        cursor.execute(statement.replace("?", self.mark), values)
        return list(cursor.fetchall()) if cursor.description else []

    def make_tables(self) -> None:
        for table in TABLES:
            self.run(f"DROP TABLE IF EXISTS {table}")
            self.run(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, last_change_ts BIGINT, content TEXT)")
            self.run(f"CREATE INDEX {table}_changes ON {table} (last_change_ts, id)")

    def insert(self, table: str, first: int, count: int) -> None:
        # Three rows share each time, as happens.
        rows = ", ".join(
            f"({number}, {number // 3}, 'row {number} of {table}')" for number in range(first, first + count)
        )
        self.run(f"INSERT INTO {table} VALUES {rows}")

    def rows_after(self, table: str, position: str | None, limit: int) -> list[Any]:
        """(id, last_change_ts, content), in the order of changes."""
        stamp, number = map(int, (position or "-1 -1").split())
        return self.run(
            f"SELECT id, last_change_ts, content FROM {table} "
            "WHERE last_change_ts > ? OR (last_change_ts = ? AND id > ?) ORDER BY last_change_ts, id LIMIT ?",
            stamp,
            stamp,
            number,
            limit,
        )


def work(servers: str, where: str) -> None:
    """What a worker does: everything about the group is here."""
    database = Database(where)
    parent = os.getppid()
    config = {"bootstrap.servers": servers, "log_level": 0}
    with ProducerGroup(config, GROUP, len(TABLES), session_timeout_ms=SESSION_MS) as group:
        group.subscribe()
        while os.getppid() == parent:
            try:
                positions = {}
                for partition, position in group.assignment.items():
                    table = TABLES[partition]
                    for number, stamp, content in database.rows_after(table, position, BATCH):
                        value = json.dumps({"id": number, "content": content}).encode()
                        group.produce(table, value, str(number).encode(), 0, source_partition=partition)
                        positions[partition] = f"{stamp} {number}"
                if positions:
                    group.commit_transaction(positions)
                else:
                    group.alive(0.2)  # nothing new, or standby
            except RebalanceError as problem:
                print(f"worker {os.getpid()}: {problem.args[0].str()}", file=sys.stderr)
            except KafkaException as problem:
                if not problem.args[0].txn_requires_abort():
                    raise
                group.abort()


class Story:
    """The workers, and the one who writes the tables."""

    def __init__(self, servers: str, where: str) -> None:
        self.servers = servers
        self.where = where
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        command = [sys.executable, __file__, "--work", self.where, "-b", self.servers]
        self.workers.append(subprocess.Popen(command))
        print(f"worker {self.workers[-1].pid} started", flush=True)

    def look_after(self) -> None:
        """A worker that was killed, by whomever, is replaced."""
        for worker in [worker for worker in self.workers if worker.poll() is not None]:
            self.workers.remove(worker)
            if worker.returncode != -signal.SIGKILL:
                raise RuntimeError(f"worker {worker.pid} ended with status {worker.returncode}")
            print(f"worker {worker.pid} was killed", flush=True)
            self.start()

    def write(self, rows: int, kills: int) -> None:
        database = Database(self.where)
        moments = sorted(random.sample(range(1, rows), min(kills, rows - 1)))
        step = max(1, rows // 100)
        for first in range(0, rows, step):
            for table in TABLES:
                database.insert(table, first, min(step, rows - first))
            while moments and moments[0] <= first + step:
                moments.pop(0)
                random.choice(self.workers).kill()
                time.sleep(random.uniform(0, 1))
            self.look_after()
            time.sleep(0.02)

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()


def copied(cluster_servers: str, table: str) -> list[int]:
    """The ids in a topic, as a reader of committed records sees them."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": cluster_servers,
            "group.id": "check",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(table, 0, OFFSET_BEGINNING)])
    found: list[int] = []
    try:
        while True:
            for message in consumer.consume(1000, 1.0):
                if message.error() is not None:
                    return found
                found.append(json.loads(message.value() or b"")["id"])
    finally:
        consumer.close()


def check(servers: str, rows: int, timeout: float = 300.0) -> bool:
    good = True
    deadline = time.monotonic() + timeout
    for table in TABLES:
        found = copied(servers, table)
        while len(set(found)) < rows and time.monotonic() < deadline:
            time.sleep(0.5)
            found = copied(servers, table)
        right = found == list(range(rows))
        good = good and right
        doubled = len(found) - len(set(found))
        print(f"{table}: {rows:,} rows, {len(found):,} records, {doubled} doubled, {rows - len(set(found))} missing")
        if not right and not doubled and len(found) == rows:
            print(f"{table}: out of order")
    return good


def tell(given: argparse.Namespace) -> int:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="db-to-kafka-")))
        where = given.database or str(folder / "source.db")
        servers = given.bootstrap
        if servers is None:
            cluster = stack.enter_context(KafkaCluster(config={"group.min.session.timeout.ms": 1000}))
            for table in TABLES:
                cluster.create_topic(table, 1)
            servers = cluster.bootstrap_servers
        Database(where).make_tables()
        story = Story(servers, where)
        try:
            for _ in range(len(TABLES) + 1):
                story.start()
            story.write(given.rows, given.kills)
            print("all rows are written; waiting until they are copied", flush=True)
            return 0 if check(servers, given.rows) else 1
        finally:
            story.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-b", "--bootstrap", help="brokers that have the topics table_a, table_b and table_c, empty")
    parser.add_argument(
        "--database", help="a file for SQLite, or postgresql://...; its tables table_a to _c are replaced"
    )
    parser.add_argument("--rows", type=int, default=10_000, help="of each table")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--work", metavar="DATABASE", help="be a worker, which the story starts")
    given = parser.parse_args()
    if given.work is not None:
        work(given.bootstrap, given.work)
        return 0
    try:
        return tell(given)
    except KafkaUnavailable as missing:
        sys.exit(str(missing))


if __name__ == "__main__":
    sys.exit(main())
