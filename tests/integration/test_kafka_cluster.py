"""fastprod.testing.KafkaCluster as users rely on it: a real Kafka, faults on request, and nothing left behind."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from programs import Program, wait_until

from fastprod.testing import KafkaCluster, KafkaUnavailable

TREE = Path(__file__).parents[2]
PYTHON_PATH = os.pathsep.join([str(TREE), *filter(None, sys.path)])
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


def producer(cluster: KafkaCluster, **options: object) -> Producer:
    """A plain client: what the cluster is for must not depend on fastprod's own."""
    return Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0} | options)


def send(client: Producer, topic: str, value: bytes, partition: int = 0, timeout: float = 120.0) -> KafkaError | None:
    outcome: list[KafkaError | None] = []
    client.produce(topic, value, partition=partition, on_delivery=lambda error, _: outcome.append(error))
    client.flush(timeout)
    assert outcome, "no delivery report"
    return outcome[0]


def values(cluster: KafkaCluster, topic: str, **options: object) -> list[bytes]:
    return [record.value() for record in cluster.records(topic, **options)]


# Brokers that live for moments only need not be compiled well.
QUICK_JAVA = ("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture
def quick_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*QUICK_JAVA)


@pytest.fixture(scope="module")
def three_brokers(kafka_available: None) -> Iterator[KafkaCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*QUICK_JAVA)
        with KafkaCluster(3) as cluster:
            yield cluster


# writing and reading back


def test_a_plain_client_writes_and_a_consumer_group_reads(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    client = producer(kafka_cluster)
    sent = [b"%d" % number for number in range(300)]
    for number, value in enumerate(sent):
        client.produce(topic, value, key=b"k", partition=number % 3)
    assert client.flush(120) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": kafka_cluster.bootstrap_servers,
            "group.id": topic,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        consumer.subscribe([topic])
        got: list[bytes] = []
        assert wait_until(lambda: got.extend(m.value() for m in consumer.consume(300, 0.5)) or len(got) >= 300)
        assert sorted(got) == sorted(sent)
        assert sum(done.offset for done in consumer.commit(asynchronous=False)) == 300
    finally:
        consumer.close()
    records = kafka_cluster.records(topic)
    assert [(r.partition(), r.offset()) for r in records] == [(p, o) for p in range(3) for o in range(100)]
    assert [int(r.value()) for r in records] == [p + 3 * o for p in range(3) for o in range(100)]
    assert kafka_cluster.watermarks(topic) == {0: (0, 100), 1: (0, 100), 2: (0, 100)}


def test_an_empty_topic_reads_as_empty(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 2)
    assert kafka_cluster.records(topic) == []
    assert kafka_cluster.watermarks(topic) == {0: (0, 0), 1: (0, 0)}
    assert kafka_cluster.leader_of(topic, 1) == 1


def test_records_of_aborted_transactions_are_seen_only_on_request(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic)
    client = producer(kafka_cluster, **{"transactional.id": topic})
    client.init_transactions(120)
    for value, end in ((b"kept", client.commit_transaction), (b"dropped", client.abort_transaction)):
        client.begin_transaction()
        client.produce(topic, value, partition=0)
        client.flush(120)  # else an abort takes back what was never sent
        end(120)
    assert values(kafka_cluster, topic) == [b"kept"]
    assert values(kafka_cluster, topic, committed=False) == [b"kept", b"dropped"]
    assert kafka_cluster.watermarks(topic) == {0: (0, 4)}, "two records and two markers"


# topics


def test_the_sizes_of_stored_batches(three_brokers: KafkaCluster, topic: str) -> None:
    three_brokers.create_topic(topic, 2)
    three_brokers.create_topic(f"{topic}-1")  # whose folders begin alike
    client = producer(three_brokers)
    for value in (b"a", b"b", b"c"):  # each is answered before the next is sent
        assert send(client, topic, value, partition=1) is None
    assert send(client, f"{topic}-1", b"other") is None
    assert three_brokers.batches(topic) == [1, 1, 1]
    assert three_brokers.batches(topic, {1: 1}) == [1, 1]
    assert three_brokers.batches(f"{topic}-1") == [1]
    for number in range(500):
        client.produce(topic, b"%d" % number, partition=0)
    client.flush()
    assert sum(three_brokers.batches(topic, {1: 3})) == 500
    with pytest.raises(ValueError, match="no topic 'nowhere'"):
        three_brokers.batches("nowhere")


def test_a_topic_gets_its_config(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, config={"retention.ms": 123456, "unclean.leader.election.enable": True})
    admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers})
    (described,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    config = described.result(30)
    assert config["retention.ms"].value == "123456"
    assert config["unclean.leader.election.enable"].value == "true"


def test_a_topic_config_that_kafka_does_not_know_is_named(kafka_cluster: KafkaCluster, topic: str) -> None:
    with pytest.raises(KafkaException, match=r"retention\.mss"):
        kafka_cluster.create_topic(topic, config={"retention.mss": 1})
    with pytest.raises(ValueError, match="there is no topic"):
        kafka_cluster.watermarks(topic)


def test_topics_are_not_created_by_asking_for_them(kafka_cluster: KafkaCluster, topic: str) -> None:
    assert send(producer(kafka_cluster, **{"message.timeout.ms": 1000}), topic, b"nowhere") is not None
    with pytest.raises(ValueError, match=f"there is no topic '{topic}'; create_topic"):
        kafka_cluster.records(topic)


def test_leaders_are_spread_in_the_same_way_every_time(three_brokers: KafkaCluster, topic: str) -> None:
    assert three_brokers.brokers == (1, 2, 3)
    assert len(set(three_brokers.bootstrap_servers.split(","))) == 3
    three_brokers.create_topic(topic, 5)
    three_brokers.create_topic(f"{topic}-single", 4, 1)
    assert [three_brokers.leader_of(topic, partition) for partition in range(5)] == [1, 2, 3, 1, 2]
    client = producer(three_brokers)
    three_brokers.wait_in_sync(topic)  # one that is late for 3 s has left for a while
    known = client.list_topics(timeout=120).topics
    assert [sorted(p.replicas) for p in known[topic].partitions.values()] == [[1, 2, 3]] * 5
    assert [p.replicas for p in known[f"{topic}-single"].partitions.values()] == [[1], [2], [3], [1]]


def test_another_broker_can_be_made_leader(three_brokers: KafkaCluster, topic: str) -> None:
    three_brokers.create_topic(topic, 2, 2)
    client = producer(three_brokers, **{"topic.metadata.refresh.interval.ms": 500})
    assert send(client, topic, b"before") is None
    three_brokers.set_leader(topic, 0, 2)
    assert three_brokers.leader_of(topic, 0) == 2
    assert three_brokers.leader_of(topic, 1) == 2, "the other partition stays"
    assert send(client, topic, b"after") is None
    assert values(three_brokers, topic) == [b"before", b"after"]
    with pytest.raises(ValueError, match=r"broker 3 has no copy in sync of .* \[0\]; \[[12], [12]\] have"):
        three_brokers.set_leader(topic, 0, 3)


# faults


def test_a_killed_broker_comes_back_with_its_data_at_its_address(three_brokers: KafkaCluster, topic: str) -> None:
    three_brokers.create_topic(topic, 3, 1)
    client = producer(three_brokers)
    assert send(client, topic, b"precious", partition=1) is None
    address = three_brokers.bootstrap_servers.split(",")[1]
    three_brokers.kill(2)
    refused = AdminClient({"bootstrap.servers": address, "log_level": 0})
    with pytest.raises(KafkaException):
        refused.list_topics(timeout=0.5)  # nobody listens there
    three_brokers.kill(2)  # twice is harmless
    # Nobody in the cluster has noticed its absence yet: that must not pass for being back.
    three_brokers.restart(2)
    # At once, and from itself: it is asked by nobody's address but its own.
    assert 2 in AdminClient({"bootstrap.servers": address}).list_topics(timeout=60).brokers
    assert three_brokers.leader_of(topic, 1) == 2
    assert values(three_brokers, topic) == [b"precious"]
    assert send(client, topic, b"and more", partition=1) is None
    assert values(three_brokers, topic) == [b"precious", b"and more"]


def test_a_stopped_broker_hands_over_and_others_go_on(three_brokers: KafkaCluster, topic: str) -> None:
    three_brokers.create_topic(topic, 3)
    three_brokers.create_topic(f"{topic}-alone", 3, 1)
    with pytest.raises(TimeoutError, match=r"broker 1 has not ended in 0 s; kill\(1\) does not ask"):
        three_brokers.stop(1, timeout=0)
    three_brokers.stop(1)
    # At once: had it been killed, the cluster would need seconds to see that.
    assert three_brokers.leader_of(topic, 0) in (2, 3)
    assert send(producer(three_brokers), topic, b"meanwhile") is None
    three_brokers.create_topic(f"{topic}-meanwhile", 3)
    assert three_brokers.leader_of(f"{topic}-meanwhile", 0) in (2, 3)
    with pytest.raises(TimeoutError, match=r"waited up to 0\.5 s for topic .* to be in sync"):
        three_brokers.wait_in_sync(topic, timeout=0.5)
    with pytest.raises(RuntimeError, match=r"broker 1 does not run; restart\(1\) first"):
        three_brokers.pause(1)
    with pytest.raises(RuntimeError, match=r"brokers \[1\] hold copies of .* but do not run"):
        three_brokers.set_leader(topic, 1, 3)
    with ThreadPoolExecutor(1) as others:
        # Asked while its partition has no leader, which librdkafka takes for unknown and final.
        asked = others.submit(three_brokers.watermarks, f"{topic}-alone", timeout=60)
        three_brokers.restart(1)
        assert asked.result() == dict.fromkeys(range(3), (0, 0))
    three_brokers.wait_in_sync(topic)
    found = producer(three_brokers).list_topics(timeout=120).topics[topic]
    assert [sorted(p.isrs) for p in found.partitions.values()] == [[1, 2, 3]] * 3


def test_a_paused_broker_answers_nothing_until_it_goes_on(three_brokers: KafkaCluster, topic: str) -> None:
    three_brokers.create_topic(topic, 3, 1)
    three_brokers.create_topic(f"{topic}-copied", 3)
    client = producer(three_brokers)
    assert send(client, topic, b"before", partition=2) is None
    three_brokers.pause(3)
    try:
        client.produce(topic, b"held up", partition=2)
        assert client.flush(1) == 1
        # What others can do goes on, although a client may have asked the frozen one first.
        assert wait_until(lambda: three_brokers.leader_of(f"{topic}-copied", 2) in (1, 2))
        assert send(producer(three_brokers), f"{topic}-copied", b"elsewhere", partition=2) is None
        assert values(three_brokers, f"{topic}-copied") == [b"elsewhere"]
        with pytest.raises(TimeoutError, match=r"is a broker down"):
            three_brokers.records(topic, timeout=1)
    finally:
        three_brokers.resume(3)
    assert client.flush(120) == 0
    assert values(three_brokers, topic) == [b"before", b"held up"]
    three_brokers.wait_in_sync(f"{topic}-copied")
    three_brokers.resume(3)  # twice is harmless


@needs_proc
def test_a_broker_is_frozen_when_pause_returns(kafka_cluster: KafkaCluster) -> None:
    pid = kafka_cluster._nodes[1].pid
    for _ in range(50):
        kafka_cluster.pause(1)
        try:
            threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat")]
            assert {thread.rpartition(")")[2].split()[0] for thread in threads} == {"T"}
        finally:
            kafka_cluster.resume(1)


def test_a_cluster_without_answers_says_so_in_the_time_given(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic)
    client = producer(kafka_cluster)
    assert send(client, topic, b"before") is None
    kafka_cluster.pause(1)
    try:
        for ask in (kafka_cluster.records, kafka_cluster.watermarks, lambda t, **o: kafka_cluster.leader_of(t, 0, **o)):
            with pytest.raises(TimeoutError, match=r"KafkaCluster of 1 .* gave no answer within 0\.2 s"):
                ask(topic, timeout=0.2)  # and named that time: they waited for nothing else
    finally:
        kafka_cluster.resume(1)
    assert send(client, topic, b"after") is None
    assert values(kafka_cluster, topic) == [b"before", b"after"]


# tools and logs


def test_kafkas_own_programs_can_be_run(kafka_cluster: KafkaCluster) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{22}\n", kafka_cluster.run_tool("kafka.tools.StorageTool", "random-uuid"))
    with pytest.raises(RuntimeError, match=r"no\.such\.Tool ended with status 1:(.|\n)*ClassNotFoundException"):
        kafka_cluster.run_tool("no.such.Tool")


def test_the_log_of_a_broker(kafka_cluster: KafkaCluster) -> None:
    # A single broker is the controller too, and that begins with a warning.
    assert " WARN " in kafka_cluster.log_of(1)


# mistakes


@pytest.mark.parametrize("brokers", [0, -1, 5])
def test_a_cluster_needs_a_sane_number_of_brokers(kafka_available: None, brokers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 4 brokers, not {brokers}"):
        KafkaCluster(brokers)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda c, t: c.kill(2), "no broker 2; the cluster has 1 to 1"),
        (lambda c, t: c.stop(0), "no broker 0"),
        (lambda c, t: c.restart(-1), "no broker -1"),
        (lambda c, t: c.pause("1"), "no broker '1'"),
        (lambda c, t: c.resume(100), "no broker 100"),
        (lambda c, t: c.log_of(7), "no broker 7"),
        (lambda c, t: c.set_leader(t, 0, 9), "no broker 9"),
        (lambda c, t: c.set_leader(t, 3, 1), "topic '.*' has no partition 3"),
        (lambda c, t: c.leader_of(t, -1), "topic '.*' has no partition -1"),
        (lambda c, t: c.leader_of("nope", 0), r"no topic 'nope'; create_topic\('nope'\) makes it"),
        (lambda c, t: c.watermarks("nope"), "no topic 'nope'"),
        (lambda c, t: c.records("nope"), "no topic 'nope'"),
        (lambda c, t: c.wait_in_sync("nope"), "no topic 'nope'"),
        (lambda c, t: c.create_topic(t), "'.*' exists already; choose another name"),
        (lambda c, t: c.create_topic("new", 0), "at least 1 partition, not 0"),
        (lambda c, t: c.create_topic("new", 1, 2), "replication_factor=2 does not fit a cluster of 1; give 1 to 1"),
        (lambda c, t: c.create_topic("new", 1, 0), "replication_factor=0 does not fit"),
        (lambda c, t: c.create_topic("white space"), "topic name 'white space'"),
        (lambda c, t: c.create_topic("a" * 250), "topic name 'aaa"),
        (lambda c, t: c.create_topic(""), "topic name ''"),
        (lambda c, t: c.client_config("alice"), r"no user 'alice'; KafkaCluster\(users=.*\) was given \[\]"),
        (lambda c, t: c.client_config(tls=True), r"does not listen for TLS; .*KafkaCluster\(tls=True\)"),
    ],
)
def test_mistakes_name_the_value_and_the_way_out(
    kafka_cluster: KafkaCluster, mistake: Callable[[KafkaCluster, str], object], message: str
) -> None:
    topic = "mistakes"
    with suppress(ValueError):  # there from the second time on
        kafka_cluster.create_topic(topic, 2)
    with pytest.raises(ValueError, match=message):
        mistake(kafka_cluster, topic)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # Refused by the program that prepares the data folder, and by the broker itself.
        ({"log.dirs": "/dev/null/data"}, r"StorageTool ended with status 1:(.|\n)*/dev/null/data"),
        ({"metric.reporters": "no.Such"}, r"node 1 ended with status 1:(.|\n)*no\.Such"),
    ],
    ids=["tool", "broker"],
)
def test_a_broker_that_cannot_start_says_why(
    kafka_available: None, quick_java: None, tmp_path: Path, config: dict[str, str], words: str
) -> None:
    # Not a TimeoutError: it ends with the broker, not with our patience.
    with pytest.raises(RuntimeError, match=words):
        KafkaCluster(config=config, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


# one from its beginning to its end


def test_a_cluster_of_ones_own(
    kafka_available: None, quick_java: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    from fastprod.testing._java import kafka_jars

    # The way of those who have unpacked Kafka themselves; relative names are what a shell user would give.
    home = tmp_path / "my kafka"
    home.mkdir()
    (home / "libs").symlink_to(kafka_jars())
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAFKA_HOME", home.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not to be filled"))
    with KafkaCluster(
        topics={"first": 1, "second": 2},
        config={"auto.create.topics.enable": True, "num.partitions": 4},
        heap_mb=256,
        folder="data",
    ) as cluster:
        address = cluster.bootstrap_servers
        assert address in repr(cluster)
        assert "closed" not in repr(cluster)
        assert list((tmp_path / "data").iterdir())
        assert [len(cluster.watermarks(name)) for name in ("first", "second")] == [1, 2]
        # A property given to the constructor beats ours.
        assert send(producer(cluster), topic, b"made by asking", partition=-1) is None
        assert len(cluster.watermarks(topic)) == 4
        assert cluster.client_config() == {"bootstrap.servers": address, "security.protocol": "PLAINTEXT"}
    assert list((tmp_path / "data").iterdir()) == []
    assert not (tmp_path / "not to be filled").exists()
    assert "closed" in repr(cluster)
    cluster.close()
    for use in (
        lambda: cluster.create_topic("new"),
        lambda: cluster.leader_of("first", 0),
        lambda: cluster.watermarks("first"),
        lambda: cluster.records("first"),
        lambda: cluster.wait_in_sync("first"),
        lambda: cluster.set_leader("first", 0, 1),
        lambda: cluster.kill(1),
        lambda: cluster.stop(1),
        lambda: cluster.restart(1),
        lambda: cluster.pause(1),
        lambda: cluster.resume(1),
        lambda: cluster.log_of(1),
        lambda: cluster.run_tool("kafka.tools.StorageTool", "random-uuid"),
    ):
        with pytest.raises(RuntimeError, match="this Kafka cluster is closed; use it inside its with block"):
            use()


# nothing outlives the test run


class Run(Program):
    """Says everything on stdout."""

    def __init__(self, *command: str, cwd: Path, **environment: str) -> None:
        env = {**os.environ, "PYTHONPATH": PYTHON_PATH, **environment}
        super().__init__("-W", "ignore", *command, env=env, cwd=cwd, stderr=subprocess.STDOUT)

    def until(self, word: str) -> str:
        """What the program has said when it says a word."""
        assert self.stdout is not None
        said = ""
        while word not in said:
            line = self.stdout.readline()
            assert line, f"ended without {word!r}:\n{said}"
            said += line
        return said


@pytest.fixture
def start(tmp_path: Path, quick_java: None) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*command: str, **environment: str) -> Run:
        runs.append(Run(*command, cwd=tmp_path, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@needs_proc
def test_nothing_survives_a_killed_process(kafka_available: None, tmp_path: Path, start: Callable[..., Run]) -> None:
    program = """
        import sys, time
        from fastprod.testing import KafkaCluster
        cluster = KafkaCluster(2, folder=sys.argv[1])
        for broker in cluster.brokers:
            cluster.pause(broker)
        print("ready", flush=True)
        time.sleep(600)
    """
    data = tmp_path / "data"
    data.mkdir()
    run = start("-c", textwrap.dedent(program), str(data))
    run.until("ready")
    brokers = run.descendants("kafka.Kafka")
    assert len(brokers) >= 3, brokers  # and their keepers
    assert list(data.iterdir())
    # The worst that can happen: one keeper is killed with the program, and brokers are frozen at that moment. (Others
    # see that their data is gone, and end by themselves.)
    (keeper,) = run.descendants("_keeper.py", "node-1/")
    os.kill(run.pid, signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)
    run.wait()
    assert wait_until(lambda: not run.descendants()), run.descendants()
    assert wait_until(lambda: not list(data.iterdir()))


@needs_proc
def test_nothing_survives_a_process_that_forgets_to_close(
    kafka_available: None, tmp_path: Path, start: Callable[..., Run]
) -> None:
    program = """
        import os, sys
        from fastprod.testing import KafkaCluster
        cluster = KafkaCluster(topics={"t": 1}, folder=sys.argv[1])
        child = os.fork()
        if child == 0:
            for use in (lambda: cluster.leader_of("t", 0), lambda: cluster.kill(1), lambda: cluster.run_tool("x")):
                try:
                    use()
                except RuntimeError as error:
                    print(error, flush=True)
            cluster.close()
            sys.exit(7) if sys.argv[2] == "exit" else os._exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, len(os.listdir(sys.argv[1])), cluster.leader_of("t", 0), flush=True)
        if sys.argv[2] == "raise":
            raise ZeroDivisionError
    """
    runs = {}
    for way in ("exit", "raise"):  # at the same time: most of it is waiting for brokers to start
        (tmp_path / way).mkdir()
        runs[way] = start("-c", textwrap.dedent(program), str(tmp_path / way), way)
    for way, run in runs.items():
        said, _ = run.finish()
        refusal = rf"(this Kafka cluster belongs to process {run.pid}, not to its fork \d+; pass .*\n)" + "{3}"
        # The child's close() and its end have not touched the parent's cluster.
        assert re.match(refusal + "7 1 1\n", said), said
        assert (way == "raise") == ("ZeroDivisionError" in said)
        assert run.returncode == (way == "raise")
        assert not run.descendants()
        assert list((tmp_path / way).iterdir()) == []


# pytest's door


def small_suite(folder: Path, test: str) -> list[str]:
    """The command that runs one test in a folder, with fastprod's plugin whether it is installed or not."""
    shutil.copy(TREE / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    return ["-m", "pytest", "-ra", "-s", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]


@needs_proc
def test_ctrl_c_ends_the_test_run_and_then_the_brokers(
    kafka_available: None, tmp_path: Path, start: Callable[..., Run]
) -> None:
    test = """
        import time

        def test_it(kafka_cluster):
            try:
                print("ready", flush=True)
                time.sleep(600)
            except KeyboardInterrupt:
                kafka_cluster.create_topic("afterwards")
                print("still served", kafka_cluster.leader_of("afterwards", 0), flush=True)
                raise
    """
    run = start(*small_suite(tmp_path, test))
    run.until("ready")
    (keeper,) = run.descendants("_keeper.py")
    (broker,) = run.descendants("kafka.Kafka").keys() - {keeper}
    folder = Path(os.readlink(f"/proc/{broker}/cwd")).parent
    assert folder.is_dir()
    # A terminal sends the signal to all of a group.
    assert run.pid not in {os.getpgid(pid) for pid in (keeper, broker)}
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.finish()
    assert "still served 1" in said
    assert run.returncode == pytest.ExitCode.INTERRUPTED, said
    assert not run.descendants()
    assert not folder.exists()


@pytest.mark.parametrize("required", ["", "0", "1"])
def test_where_java_is_missing_tests_are_skipped_or_fail_if_kafka_is_required(
    tmp_path: Path, start: Callable[..., Run], required: str
) -> None:
    command = small_suite(tmp_path, "def test_it(kafka_cluster): pass")
    run = start(*command, PATH=str(tmp_path), JAVA_HOME="", FASTPROD_REQUIRE_KAFKA=required)
    said, _ = run.finish()
    reason = r"Apache Kafka needs Java, and there is no 'java' on the PATH; install a JDK of version 17 or newer"
    if required == "1":
        assert run.returncode == pytest.ExitCode.TESTS_FAILED, said
        assert re.search(f"FASTPROD_REQUIRE_KAFKA is set, but {reason}", said), said
    else:
        assert run.returncode == pytest.ExitCode.OK, said
        assert re.search(f"SKIPPED .*{reason}", said), said


# where Java and Kafka come from


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty machine; programs can be put into the folder that is its whole PATH."""
    for name in ("JAVA_HOME", "KAFKA_HOME"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return programs


def put_program(folder: Path, name: str, script: str) -> None:
    # With the real PATH inside, for the script's own needs.
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH={shlex.quote(os.defpath)}\n{textwrap.dedent(script)}")
    path.chmod(0o755)


MAVEN_THAT_WORKS = """
    for argument; do case "$argument" in -DoutputDirectory=*) folder="${argument#*=}";; esac; done
    mkdir -p "$folder" && echo jar > "$folder/kafka-clients-0.jar"
"""


def cached(tmp_path: Path) -> list[str]:
    """Names of all files in the cache, also the hidden ones."""
    return sorted(str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").glob("fastprod/**/*"))


def test_no_java(machine: Path) -> None:
    with pytest.raises(KafkaUnavailable, match=r"no 'java' on the PATH; install a JDK of version 17 or .*JAVA_HOME"):
        KafkaCluster()


def test_wrong_java_home(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(machine, "java", "exit 1")  # not the one that was asked for
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(KafkaUnavailable, match=r"JAVA_HOME is '/nowhere', but .* /nowhere/bin/java; correct or unset"):
        KafkaCluster()


def test_java_too_old(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(machine, "java", "echo java.lang.UnsupportedClassVersionError: kafka/tools/StorageTool >&2; exit 1")
    (tmp_path / "kafka-clients-4.jar").touch()
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(KafkaUnavailable, match=rf"version 17 or newer, and {machine}/java is older"):
        KafkaCluster()


def test_wrong_kafka_home(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_program(machine, "java", "exit 1")
    put_program(machine, "mvn", MAVEN_THAT_WORKS)
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(KafkaUnavailable, match=rf"KAFKA_HOME is '{tmp_path}', but there is no libs/kafka-clients"):
        KafkaCluster()
    assert cached(tmp_path) == [], "asked for one Kafka, got another"


def test_no_kafka_and_no_maven(machine: Path) -> None:
    put_program(machine, "java", "exit 1")
    with pytest.raises(KafkaUnavailable, match=r"set KAFKA_HOME to .* Apache Kafka 4, or install Maven"):
        KafkaCluster()


def test_no_place_for_the_cache(machine: Path, tmp_path: Path) -> None:
    put_program(machine, "java", "exit 1")
    put_program(machine, "mvn", MAVEN_THAT_WORKS)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(KafkaUnavailable, match=rf"cannot be kept in {tmp_path}/cache/fastprod .*set XDG_CACHE_HOME"):
        KafkaCluster()


@pytest.mark.parametrize("status", [0, 1])
def test_maven_fails_and_nothing_half_done_stays(machine: Path, tmp_path: Path, status: int) -> None:
    put_program(machine, "java", "exit 1")
    put_program(
        machine,
        "mvn",
        f"""
        mkdir jars && {"echo half > jars/kafka-clients-0.jar" if status else "true"}
        echo "Could not transfer artifact from repo.example"
        exit {status}
        """,
    )
    with pytest.raises(KafkaUnavailable, match=r"set KAFKA_HOME(.|\n)* transfer artifact from repo\.example"):
        KafkaCluster()
    assert cached(tmp_path) == []


def test_processes_may_fetch_at_the_same_time(machine: Path, tmp_path: Path, start: Callable[..., Run]) -> None:
    (tmp_path / "begun").mkdir()
    put_program(machine, "java", "exit 1")
    slow = f"touch {tmp_path}/begun/$$\nsleep 1\n"
    put_program(machine, "mvn", slow + textwrap.dedent(MAVEN_THAT_WORKS))
    program = "from fastprod.testing._java import kafka_jars; print(kafka_jars())"
    said = [run.finish()[0] for run in [start("-c", program) for _ in range(2)]]
    folder = tmp_path / "cache" / "fastprod" / "kafka-4.3.0"
    assert [text.splitlines()[-1] for text in said] == [str(folder)] * 2
    assert cached(tmp_path) == ["fastprod/kafka-4.3.0", "fastprod/kafka-4.3.0/kafka-clients-0.jar"]
    assert len(list((tmp_path / "begun").iterdir())) == 1, "the second waits for the first"


def test_a_broker_whose_java_vanishes_is_reported(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prepares the data folder, as far as anybody can tell, and is gone when the broker is to start.
    put_program(machine, "java", 'rm "$0"')
    (tmp_path / "kafka-clients-4.jar").touch()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"node 1 could not be started:\n(.|\n)*No such file .*{machine}/java"):
        KafkaCluster(folder=tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
