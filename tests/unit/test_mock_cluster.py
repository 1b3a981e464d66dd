"""The mock cluster as plain confluent-kafka clients see it, in this process and in one of its own."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
from confluent_kafka import KafkaError, Producer

from fastprod.testing import MockCluster, MockClusterProcess, Request

Cluster = MockCluster | MockClusterProcess
TREE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TREE), *filter(None, sys.path)])}


@pytest.fixture(params=[MockCluster, MockClusterProcess])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with request.param(3, topics={"events": 3}) as running:
        yield running


def producer(cluster: Cluster, **options: object) -> Producer:
    settings = {"linger.ms": 0, "log_level": 0, "retry.backoff.ms": 10, "reconnect.backoff.max.ms": 100}
    return Producer(
        settings | {"bootstrap.servers": cluster.bootstrap_servers, "topic.metadata.refresh.interval.ms": 500} | options
    )


def send(client: Producer, topic: str, value: bytes, partition: int = 0, timeout: float = 120.0) -> KafkaError | None:
    outcome: list[KafkaError | None] = []
    client.produce(topic, value, partition=partition, on_delivery=lambda error, _: outcome.append(error))
    client.flush(timeout)
    assert outcome, "no delivery report"
    return outcome[0]


def wait_until(condition: Callable[[], bool], timeout: float = 120.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    finished = programs.run("-W", "ignore", "-c", textwrap.dedent(program), *arguments, env=ENVIRONMENT)
    finished.check_returncode()
    return finished


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# writing and reading back


def test_records_come_back_in_order(cluster: Cluster) -> None:
    client = producer(cluster)
    for number in range(300):
        client.produce("events", str(number).encode(), key=b"k%d" % number, partition=number % 3)
    assert client.flush(120) == 0
    records = cluster.records("events")
    assert [(r.partition(), r.offset()) for r in records] == [(p, o) for p in range(3) for o in range(100)]
    assert [int(r.value()) for r in records] == [p + 3 * o for p in range(3) for o in range(100)]
    assert records[0].key() == b"k0"
    assert cluster.watermarks("events") == {0: (0, 100), 1: (0, 100), 2: (0, 100)}


def test_an_empty_topic_reads_as_empty(cluster: Cluster) -> None:
    assert cluster.records("events") == []
    assert cluster.watermarks("events") == {0: (0, 0), 1: (0, 0), 2: (0, 0)}


def test_transactions_can_be_read(cluster: Cluster) -> None:
    client = producer(cluster, **{"transactional.id": "t"})
    client.init_transactions(120)
    client.begin_transaction()
    client.produce("events", b"in a transaction", partition=1)
    client.commit_transaction(120)
    assert [r.value() for r in cluster.records("events")] == [b"in a transaction"]


def test_a_partition_keeps_only_its_tail(cluster: Cluster) -> None:
    client = producer(cluster, **{"batch.num.messages": 100})
    for _ in range(2_000):
        client.produce("events", bytes(10_000), partition=0)
    assert client.flush(120) == 0
    low, high = cluster.watermarks("events")[0]
    assert high == 2_000
    assert 0 < low < high
    records = cluster.records("events")
    assert [r.offset() for r in records] == list(range(low, high))


def test_another_process_can_connect(cluster: Cluster) -> None:
    program = """
        import sys
        from confluent_kafka import Producer
        client = Producer({"bootstrap.servers": sys.argv[1]})
        client.produce("events", b"from outside", partition=2)
        sys.exit(client.flush(120))
    """
    run(program, cluster.bootstrap_servers)
    assert [r.value() for r in cluster.records("events")] == [b"from outside"]


# topics and leaders


def test_brokers_and_addresses(cluster: Cluster) -> None:
    assert cluster.brokers == (1, 2, 3)
    addresses = cluster.bootstrap_servers.split(",")
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)


@pytest.mark.parametrize("factor", [1, 2, 3, None])
def test_leaders_are_spread_evenly_over_replicas(factor: int | None) -> None:
    with MockCluster(3) as cluster:
        cluster.create_topic("spread", 12, factor)
        metadata = producer(cluster).list_topics(timeout=120).topics["spread"].partitions
        assert Counter(p.leader for p in metadata.values()) == {1: 4, 2: 4, 3: 4}
        assert all(p.leader in p.replicas and len(p.replicas) == (factor or 3) for p in metadata.values())
        assert [cluster.leader_of("spread", p) for p in range(3)] == [metadata[p].leader for p in range(3)]


def test_a_moved_leader_receives_the_records(cluster: Cluster) -> None:
    client = producer(cluster)
    assert send(client, "events", b"before") is None
    old = cluster.leader_of("events", 0)
    new = next(broker for broker in cluster.brokers if broker != old)
    cluster.set_leader("events", 0, new)
    assert cluster.leader_of("events", 0) == new
    cluster.start_tracking()
    assert send(client, "events", b"after") is None
    last = [request for request in cluster.stop_tracking() if request.api == "Produce"][-1]
    assert last == Request(new, "Produce", pytest.approx(time.monotonic(), abs=600))
    assert [r.value() for r in cluster.records("events")] == [b"before", b"after"]


@pytest.mark.parametrize("nobody", [None, -1])
def test_a_leaderless_partition_waits_for_a_leader(cluster: Cluster, nobody: int | None) -> None:
    client = producer(cluster)
    assert send(client, "events", b"warm") is None
    cluster.set_leader("events", 0, nobody)
    assert cluster.leader_of("events", 0) is None
    client.produce("events", b"patient", partition=0)
    assert client.flush(1) == 1
    cluster.set_leader("events", 0, 2)
    assert client.flush(120) == 0
    assert [r.value() for r in cluster.records("events")] == [b"warm", b"patient"]


def test_questions_do_not_create_topics(cluster: Cluster) -> None:
    for question in (
        lambda: cluster.leader_of("nowhere", 0),
        lambda: cluster.set_leader("nowhere", 0, 1),
        lambda: cluster.topic_error("nowhere", "LEADER_NOT_AVAILABLE"),
        lambda: cluster.watermarks("nowhere"),
        lambda: cluster.records("nowhere"),
    ):
        with pytest.raises(ValueError, match=r"no topic 'nowhere'; create_topic\('nowhere'\)"):
            question()
    assert set(producer(cluster).list_topics(timeout=120).topics) == {"events"}


def test_topic_error_lasts_until_cleared(cluster: Cluster) -> None:
    cluster.topic_error("events", "TOPIC_AUTHORIZATION_FAILED")
    error = producer(cluster).list_topics(timeout=120).topics["events"].error
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    cluster.topic_error("events", None)
    assert producer(cluster).list_topics(timeout=120).topics["events"].error is None


# brokers


def test_round_trips_take_as_long_as_told(cluster: Cluster) -> None:
    client = producer(cluster)
    assert send(client, "events", b"warm") is None
    cluster.set_rtt(300)
    began = time.monotonic()
    assert send(client, "events", b"slow") is None
    assert time.monotonic() - began >= 0.29
    cluster.set_rtt(0)
    leader = cluster.leader_of("events", 0)
    assert leader is not None
    cluster.set_rtt(300, leader)
    began = time.monotonic()
    assert send(client, "events", b"slow too") is None
    assert time.monotonic() - began >= 0.29


def test_rtt_from_the_start() -> None:
    with MockCluster(1, topics={"t": 1}, rtt_ms=200) as cluster:
        began = time.monotonic()
        assert send(producer(cluster), "t", b"slow") is None
        assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("all_brokers", [True, False])
def test_delivery_resumes_when_a_broker_returns(cluster: Cluster, all_brokers: bool) -> None:
    client = producer(cluster)
    assert send(client, "events", b"before") is None
    broker = None if all_brokers else cluster.leader_of("events", 0)
    cluster.down(broker)
    client.produce("events", b"meanwhile", partition=0)
    assert client.flush(1) == 1
    cluster.up(broker)
    assert client.flush(120) == 0
    assert [r.value() for r in cluster.records("events")] == [b"before", b"meanwhile"]


def test_going_down_or_up_twice_is_harmless(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.down(1)
    for _ in range(2):
        cluster.up(1)
    assert cluster.leader_of("events", 0) is not None


def test_reading_from_a_dead_cluster_says_so(cluster: Cluster) -> None:
    cluster.down()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.3 s .*is a broker down"):
        cluster.records("events", timeout=0.3)


# errors


@pytest.mark.parametrize(
    "errors",
    [
        ["NOT_LEADER_FOR_PARTITION", "NOT_ENOUGH_REPLICAS"],
        [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError(KafkaError.REQUEST_TIMED_OUT)],
        ["_TRANSPORT"],
    ],
)
@pytest.mark.parametrize("api", ["Produce", 0])
def test_retriable_errors_then_success(cluster: Cluster, errors: list[int | str | KafkaError], api: str | int) -> None:
    client = producer(cluster)
    assert send(client, "events", b"warm") is None
    cluster.push_errors(api, *errors)
    with cluster.track_requests() as seen:
        assert send(client, "events", b"stubborn") is None
    assert sum(request.api == "Produce" for request in seen) == len(errors) + 1
    assert [r.value() for r in cluster.records("events")] == [b"warm", b"stubborn"]


def test_a_permanent_error_reaches_the_caller(cluster: Cluster) -> None:
    client = producer(cluster)
    cluster.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
    error = send(client, "events", b"refused")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert cluster.records("events") == []


def test_errors_of_one_broker_and_late_answers(cluster: Cluster) -> None:
    client = producer(cluster)
    for partition in range(3):
        assert send(client, "events", b"warm", partition) is None
    leader = cluster.leader_of("events", 0)
    assert leader is not None
    cluster.push_errors("Produce", "MSG_SIZE_TOO_LARGE", broker=leader)
    assert send(client, "events", b"elsewhere", 1) is None
    error = send(client, "events", b"here", 0)
    assert error is not None
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    cluster.push_errors("Produce", 0, broker=leader, rtt_ms=300)
    began = time.monotonic()
    assert send(client, "events", b"late", 0) is None
    assert time.monotonic() - began >= 0.29


def test_cleared_errors_are_gone(cluster: Cluster) -> None:
    cluster.push_errors("Produce", *["TOPIC_AUTHORIZATION_FAILED"] * 5)
    cluster.clear_errors("Produce")
    assert send(producer(cluster), "events", b"welcome") is None


def test_what_librdkafka_cannot_do_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"rtt_ms=5 needs broker="):
        cluster.push_errors("Produce", 0, rtt_ms=5)
    cluster.push_errors("Produce", "NETWORK_EXCEPTION", broker=2)
    with pytest.raises(ValueError, match="broker 2 has had Produce errors of its own"):
        cluster.push_errors("Produce", "NETWORK_EXCEPTION")
    with pytest.raises(RuntimeError, match=r"broker 2 has 1 Produce error"):
        cluster.clear_errors("Produce")
    cluster.push_errors("Metadata", "NETWORK_EXCEPTION")
    cluster.clear_errors("Metadata")


# requests


def test_requests_are_tracked(cluster: Cluster) -> None:
    client = producer(cluster)
    assert cluster.requests() == []
    cluster.start_tracking()
    assert send(client, "events", b"one") is None
    kinds = {request.api for request in cluster.requests()}
    assert {"ApiVersions", "Metadata", "Produce"} <= kinds
    (sent,) = cluster.requests("Produce")
    assert cluster.requests(0) == [sent]
    assert sent.broker == cluster.leader_of("events", 0)
    assert sent.timestamp == pytest.approx(time.monotonic(), abs=600)
    cluster.clear_requests()
    assert cluster.requests("Produce") == []
    assert send(client, "events", b"two") is None
    assert [r.api for r in cluster.stop_tracking() if r.api == "Produce"] == ["Produce"]
    assert send(client, "events", b"three") is None
    assert cluster.requests() == []


# mistakes


@pytest.mark.parametrize("kind", [MockCluster, MockClusterProcess])
@pytest.mark.parametrize("brokers", [0, -1, 1001])
def test_a_cluster_needs_a_sane_number_of_brokers(kind: type[Cluster], brokers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 1000 brokers, not {brokers}"):
        kind(brokers)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c: c.down(4), "no broker 4; the cluster has 1 to 3"),
        (lambda c: c.up(0), "no broker 0"),
        (lambda c: c.set_rtt(5, broker=-1), "no broker -1"),
        (lambda c: c.set_rtt(-1), "0 ms or longer, not -1"),
        (lambda c: c.set_leader("events", 0, 9), "no broker 9"),
        (lambda c: c.set_leader("events", 3, 1), "topic 'events' has no partition 3"),
        (lambda c: c.leader_of("events", -1), "topic 'events' has no partition -1"),
        (lambda c: c.create_topic("events"), "'events' exists already"),
        (lambda c: c.create_topic("new", 0), "at least 1 partition, not 0"),
        (lambda c: c.create_topic("new", 1, 4), "replication_factor=4 does not fit a cluster of 3"),
        (lambda c: c.create_topic("white space"), "topic name 'white space'"),
        (lambda c: c.create_topic(""), "topic name ''"),
        (lambda c: c.push_errors("produce", 1), "'produce' requests; did you mean Produce"),
        (lambda c: c.push_errors("Metadat", 1), "did you mean Metadata"),
        (lambda c: c.push_errors("?", 1), "names look like Produce, Fetch"),
        (lambda c: c.push_errors(-1, 1), "-1 is no API key"),
        (lambda c: c.requests("Produced"), "did you mean Produce"),
        (lambda c: c.push_errors("Produce", "NOT_LEADER"), "error 'NOT_LEADER'; did you mean NOT_LEADER_"),
        (lambda c: c.push_errors("Produce", 40_000), "40000 is no Kafka error code"),
        (lambda c: c.push_errors("Produce", 1, broker=7), "no broker 7"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(mistake: Callable[[Cluster], object], message: str) -> None:
    with MockCluster(3, topics={"events": 3}) as cluster, pytest.raises(ValueError, match=message):
        mistake(cluster)


def test_a_bad_topic_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(ValueError, match="at least 1 partition"):
        MockClusterProcess(1, topics={"good": 1, "bad": 0})
    assert [process.returncode for process in started] == [0]


def test_use_after_close(cluster: Cluster) -> None:
    address = cluster.bootstrap_servers
    assert address in repr(cluster)
    assert "closed" not in repr(cluster)
    cluster.close()
    cluster.close()
    assert "closed" in repr(cluster)
    for use in (
        cluster.down,
        cluster.requests,
        lambda: cluster.records("events"),
        lambda: cluster.create_topic("x"),
    ):
        with pytest.raises(RuntimeError, match="this mock cluster is closed; use it inside its with block"):
            use()


# threads and processes


def test_close_waits_for_other_threads() -> None:
    for _ in range(10):
        cluster = MockCluster(1, topics={"t": 1})
        surprises: list[BaseException] = []

        def hammer(target: MockCluster = cluster, found: list[BaseException] = surprises) -> None:
            try:
                while True:
                    target.set_leader("t", 0, 1)
                    target.requests()
            except RuntimeError as error:
                if "closed" not in str(error):
                    found.append(error)

        threads = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        cluster.close()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert surprises == []


@pytest.mark.parametrize("kind", ["MockCluster", "MockClusterProcess"])
def test_a_forked_child_leaves_the_cluster_alone(kind: str) -> None:
    # In an interpreter of its own: the child collects garbage, and confluent's clients do not survive that.
    finished = run(f"""
        import gc, os
        from fastprod.testing import {kind}
        cluster = {kind}(1, topics={{"t": 1}})
        child = os.fork()
        if child == 0:
            try:
                cluster.down()
            except RuntimeError as error:
                print(error, flush=True)
            cluster.close()
            del cluster
            gc.collect()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), cluster.leader_of("t", 0))
        cluster.close()
    """)
    first, second = finished.stdout.splitlines()
    assert first.startswith("this mock cluster belongs to process")
    assert second == "7 1"


def test_the_process_is_another_one() -> None:
    with MockClusterProcess(1) as cluster:
        assert cluster.pid != os.getpid()
        assert is_alive(cluster.pid)
        assert os.getsid(cluster.pid) != os.getsid(0), "Ctrl-C in the terminal would reach it"
    assert not is_alive(cluster.pid)


def test_a_process_that_died_is_reported() -> None:
    with MockClusterProcess(1) as cluster:
        os.kill(cluster.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"process {cluster.pid} has ended with status -9"):
            cluster.down()


def test_the_process_outlives_the_thread_that_started_it() -> None:
    started: list[MockClusterProcess] = []
    thread = threading.Thread(target=lambda: started.append(MockClusterProcess(1, topics={"t": 1})))
    thread.start()
    thread.join()
    time.sleep(1.2)
    with started[0] as cluster:
        assert cluster.leader_of("t", 0) == 1


@pytest.mark.parametrize("fork_survives", [False, True])
def test_the_process_ends_with_a_killed_parent(fork_survives: bool) -> None:
    # The surviving fork keeps a copy of the pipe, so that the cluster never sees its end.
    program = f"""
        import os, time
        from fastprod.testing import MockClusterProcess
        cluster = MockClusterProcess(1)
        if {fork_survives} and os.fork() == 0:
            time.sleep(3600)
            os._exit(0)
        print(cluster.pid, flush=True)
        time.sleep(3600)
    """
    with programs.started("-W", "ignore", "-c", textwrap.dedent(program), env=ENVIRONMENT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_alive(pid))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_closed_clusters_leave_no_threads_or_files() -> None:
    def usage() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def round_trip(index: int) -> None:
        cluster = MockCluster(2, topics={"t": 2})
        if index % 10 == 0:
            assert send(producer(cluster), "t", b"x") is None
        if index % 2:
            cluster.close()  # the others are collected

    round_trip(0)
    threads, files = usage()
    for index in range(50):
        round_trip(index)
    assert wait_until(lambda: usage()[0] <= threads + 3 and usage()[1] <= files + 5), (
        threads,
        files,
        usage(),
    )


# pytest


def test_the_fixture_gives_three_brokers(mock_cluster: MockCluster) -> None:
    assert mock_cluster.brokers == (1, 2, 3)


@pytest.mark.mock_cluster(brokers=1, topics={"orders": 5})
def test_the_marker_shapes_the_cluster(mock_cluster: MockCluster) -> None:
    assert mock_cluster.brokers == (1,)
    assert len(mock_cluster.watermarks("orders")) == 5


def test_the_plugin_costs_nothing_until_used(tmp_path: Path) -> None:
    shutil.copy(TREE / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_user.py").write_text(
        textwrap.dedent("""
            import sys
            import pytest

            def test_without():
                assert "fastprod.testing.mock" not in sys.modules

            @pytest.mark.mock_cluster(2)
            def test_with(mock_cluster):
                assert mock_cluster.brokers == (1, 2)
        """)
    )
    finished = programs.run(
        "-m", "pytest", "-q", "--strict-markers", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path, env=ENVIRONMENT
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 passed" in finished.stdout


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads what threads block from Linux's /proc")
def test_signals_do_not_reach_the_brokers_thread() -> None:
    """librdkafka's ends when one wakes it, and closing the cluster then crashes."""
    with MockCluster(1):
        threads = [task for task in Path("/proc/self/task").iterdir() if "mock" in (task / "comm").read_text()]
        assert threads
        for thread in threads:
            status = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines() if ":" in line)
            assert int(status["SigBlk"], 16) >> (signal.SIGALRM - 1) & 1
