"""A real Apache Kafka for tests: brokers in KRaft mode on this machine, without containers, with faults on request.

    KafkaCluster                 what a user calls
      |  one _Node per process: its properties, data folder, log and ports
      v
    _keeper.py                   kills the broker when this process is gone, however it ended
      v
    java kafka.Kafka             jars from KAFKA_HOME, or brought by Maven once (_java.py)

A single broker is its own controller. Two and more get a controller in a process of its own, so that any broker
can be killed or paused without touching the metadata of the others.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import ElectionType, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ClusterMetadata,
    NewTopic,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from fastprod.testing._cluster import Cluster
from fastprod.testing._java import KafkaUnavailable, java_program, kafka_jars

__all__ = ["KafkaCluster", "KafkaUnavailable"]

HOST = "127.0.0.1"
MAX_BROKERS = 4
CONTROLLER_ID = 100
START_S = 300.0  # a cluster that is not up by then never will be, even where many programs share the CPUs
ANSWER_S = 60.0  # the same for a request to a running one
BATCH_HEAD = 61  # bytes before the records of a batch
ROOM = 2 << 30  # bytes that a memory-backed folder must have free to be used
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")  # short-lived or idle programs
MECHANISM = "SCRAM-SHA-512"


@dataclass
class _Node:
    """One process of the cluster."""

    id: int
    roles: str
    ports: dict[str, int]  # listener -> port
    folder: Path
    heap_mb: int
    keeper: subprocess.Popen[str] | None = None
    pid: int = 0  # of the Java process, while the keeper runs
    paused: bool = False
    told_to_end: bool = False
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log.txt"

    @property
    def running(self) -> bool:
        return self.keeper is not None and self.keeper.poll() is None

    @property
    def answers(self) -> bool:
        return self.running and not self.paused

    def signal(self, number: int) -> None:
        """Send a signal to the Java process, or to the keeper's whole session if it has not told us the process."""
        if self.keeper is not None and self.keeper.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid or -self.keeper.pid, number)

    def ended(self, timeout: float | None) -> bool:
        """Wait until the process is gone."""
        if self.keeper is not None:
            with suppress(subprocess.TimeoutExpired):
                self.keeper.wait(timeout)
        return not self.running

    def last_words(self) -> str:
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
        return ""


class KafkaCluster(Cluster):
    """One to four brokers of Apache Kafka 4 on the loopback, in processes of their own.

    Start-up takes about 5 seconds for one broker. Data lies in a temporary folder, in memory where there is
    room, and is removed at the end. No broker outlives this process, even if it is killed.

    Java 17 or newer is needed. Kafka comes from the folder that the environment variable KAFKA_HOME names, else Maven
    fetches it once into the user's cache. Without either, `KafkaUnavailable` says what to install.

    Topics are not created by asking for them, unlike Kafka's default: give `config={"auto.create.topics.enable":
    True}` for that. Replicas are taken out of sync after 3 s, and one of several brokers that says nothing
    is given up after 3 s, so that tests need not wait for Kafka's usual timeouts.

    Args:
        brokers: how many, 1 to 4; their ids are 1 to brokers.
        topics: topics to create, each with its number of partitions.
        config: broker properties, on top of or instead of those chosen here.
        tls: whether brokers also listen for TLS, with a certificate made on the spot; see `client_config`.
        users: names and passwords for SASL/SCRAM; brokers then also listen for clients that log in.
        heap_mb: memory for each broker's heap.
        folder: where the data goes, instead of a temporary folder; what is made there is removed too.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        topics: Mapping[str, int] | None = None,
        config: Mapping[str, Any] | None = None,
        tls: bool = False,
        users: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 1 <= brokers <= MAX_BROKERS:
            raise ValueError(f"a KafkaCluster has 1 to {MAX_BROKERS} brokers, not {brokers!r}")
        self._java, self._classpath = find_kafka()
        self._owner = os.getpid()
        self._closed = False
        self._admin_client: AdminClient | None = None
        self._users = dict(users or {})
        self._tls = tls
        self.brokers = tuple(range(1, brokers + 1))
        # Absolute, because brokers run in folders of their own.
        self._folder = Path(tempfile.mkdtemp(prefix="fastprod-kafka-", dir=folder or _memory_folder())).absolute()
        self._reserved: list[socket.socket] = []
        self._nodes: dict[int, _Node] = {}
        self._finalizer = weakref.finalize(self, _end, self._owner, self._nodes, self._reserved, self._folder)
        try:
            self._make_nodes(brokers, heap_mb)
            self.bootstrap_servers = self._servers("PLAINTEXT")
            self._write_files(config or {})
            for node in self._nodes.values():
                self._launch(node)
            self._wait(lambda: self._alive(self.brokers), "the brokers to be up", START_S)
            self._create_users()
            for name, partitions in (topics or {}).items():
                self.create_topic(name, partitions)
        except BaseException:
            self.close()
            raise

    # topics

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a topic whose leaders are spread evenly and in the same way every time.

        The replication factor is 3, or the number of brokers if there are fewer, unless given. Partition 0 is led
        by broker 1, partition 1 by broker 2, and so on around.
        """
        copies = self._copies(name, partitions, replication_factor)
        count = len(self.brokers)
        places = [[(first + copy) % count + 1 for copy in range(copies)] for first in range(partitions)]
        topic = NewTopic(
            name, partitions, replica_assignment=places, config={k: _text(v) for k, v in (config or {}).items()}
        )
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                self._answer(
                    self._admin.create_topics([topic], request_timeout=ANSWER_S)[name], f"create topic {name!r}"
                )
                break
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    raise ValueError(f"topic {name!r} exists already; choose another name") from None
                # Whose heartbeats a busy machine has held up is fenced until the next one.
                fenced = error.args[0].code() == KafkaError.INVALID_REPLICA_ASSIGNMENT
                if not fenced or not self._able() or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        # A broker may answer before it knows of its leadership. Copies on brokers that are down can wait.
        able = self._able()
        self._wait(lambda: self._in_sync(name, partitions, able), f"topic {name!r} to have its leaders", ANSWER_S)

    def set_leader(self, topic: str, partition: int, broker: int) -> None:
        """Let another broker lead a partition, one that holds a copy of it and is in sync. Takes some seconds."""
        self._require(topic, partition)
        self._known(broker)
        described = self._admin.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions[partition]
        if broker not in described.isrs:
            raise ValueError(f"broker {broker} has no copy in sync of {topic} [{partition}]; {described.isrs} have")
        silent = sorted(set(described.replicas) - self._able())
        if silent:  # Kafka's tool would wait a minute for them
            raise RuntimeError(f"brokers {silent} hold copies of {topic} [{partition}] but do not run; bring them back")
        order = [broker, *(replica for replica in described.replicas if replica != broker)]
        plan = self._folder / f"plan-{uuid.uuid4()}.json"
        plan.write_text(
            f'{{"version": 1, "partitions": [{{"topic": "{topic}", "partition": {partition}, "replicas": {order}}}]}}'
        )
        tool = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
        self.run_tool(
            tool, "--bootstrap-server", self.bootstrap_servers, "--reassignment-json-file", str(plan), "--execute"
        )

        def moved() -> bool:
            election = self._admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, partition)])
            self._answer(election, f"elect the leader of {topic} [{partition}]")
            # Any broker may answer, and some hear of it later than others.
            return all(self.leader_of(topic, partition) == broker for _ in range(5))

        self._wait(moved, f"broker {broker} to lead {topic} [{partition}]", ANSWER_S)

    def wait_in_sync(self, topic: str, *, timeout: float = START_S) -> None:
        """Wait until every partition of a topic has a leader and all its copies are in sync."""
        self._require(topic)
        self._wait(lambda: self._in_sync(topic), f"topic {topic!r} to be in sync", timeout)

    # faults

    def kill(self, broker: int) -> None:
        """End a broker at once, with SIGKILL; `restart` brings it back."""
        node = self._node(broker)
        self._admin_client = None  # the next one keeps away from this broker
        node.told_to_end = True
        node.signal(signal.SIGKILL)
        node.ended(None)

    def stop(self, broker: int, *, timeout: float = START_S) -> None:
        """Let a broker hand over what it leads and end in good order; `restart` brings it back."""
        node = self._node(broker)
        self.resume(broker)
        self._admin_client = None
        node.told_to_end = True
        node.signal(signal.SIGTERM)
        if not node.ended(timeout):
            raise TimeoutError(f"broker {broker} has not ended in {timeout:g} s; kill({broker}) does not ask")

    def restart(self, broker: int, *, timeout: float = START_S) -> None:
        """Start a broker that was killed or stopped, or stop and start it; same address, same data.

        Returns when the cluster knows it again; `wait_in_sync` also waits until it has caught up.
        """
        node = self._node(broker)
        if node.running:
            self.stop(broker)
        self._launch(node)
        self._wait(lambda: self._alive([broker]), f"broker {broker} to be back", timeout)

    def pause(self, broker: int) -> None:
        """Freeze a broker with SIGSTOP: its connections stay open and nothing is answered, until `resume`."""
        node = self._node(broker)
        if not node.running:
            raise RuntimeError(f"broker {broker} does not run; restart({broker}) first")
        self._admin_client = None
        node.signal(signal.SIGSTOP)
        node.paused = True
        # The kernel stops a process when one of its threads next gets a CPU; on a busy machine the others go on serving
        # requests until then.
        while node.running and not _is_stopped(node.pid):
            time.sleep(0.001)

    def resume(self, broker: int) -> None:
        """Let a paused broker go on; nothing happens if it is not paused."""
        node = self._node(broker)
        node.signal(signal.SIGCONT)
        node.paused = False

    @contextmanager
    def slowed(self, *brokers: int, share: float = 0.8, period: float = 1.0) -> Iterator[None]:
        """While the with block runs, freeze brokers for a share of every period: slow ones, that are never gone.

        They run for the rest of the period, as under a CPU quota. A freeze has to stay below the 3 s after which the
        cluster gives a silent broker up.
        """
        for broker in brokers:
            self._node(broker)
        if not 0 < share < 1 or not 0 < share * period < 3:
            raise ValueError(f"share={share} of period={period} s must be a part of it, and shorter than 3 s")
        over = threading.Event()

        def stop_and_go() -> None:
            while not over.is_set():
                for broker in brokers:
                    self.pause(broker)
                over.wait(period * share)
                for broker in brokers:
                    self.resume(broker)
                over.wait(period * (1 - share))

        thread = threading.Thread(target=stop_and_go, name="slow brokers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            for broker in brokers:  # the thread ends early if one of them is killed
                with suppress(RuntimeError, ValueError):
                    self.resume(broker)

    def batches(self, topic: str, since: Mapping[int, int] | None = None) -> list[int]:
        """How many records each batch in the logs of a topic holds, as the brokers have stored them.

        `since` has an offset for partitions of which only later batches count. Batches of control records, which end
        transactions, are among them; a copy on a second broker is not counted again.
        """
        self._require(topic)
        found: list[int] = []
        seen: set[tuple[int, int]] = set()
        for number in self.brokers:
            for folder in (self._node(number).folder / "data").glob(f"{topic}-*"):
                partition = folder.name.rpartition("-")[2]
                if folder.name != f"{topic}-{partition}" or not partition.isdigit():
                    continue
                first = (since or {}).get(int(partition), 0)
                for log in sorted(folder.glob("*.log")):
                    for offset, records in _batches(log):
                        if offset >= first and (int(partition), offset) not in seen:
                            seen.add((int(partition), offset))
                            found.append(records)
        return found

    def log_of(self, broker: int) -> str:
        """What a broker has logged so far: warnings and errors."""
        with suppress(FileNotFoundError):
            return self._node(broker).log.read_text(errors="replace")
        return ""

    # clients

    def client_config(self, user: str | None = None, *, tls: bool = False) -> dict[str, str]:
        """What a librdkafka client needs to connect, with the password of a user and the certificate to trust."""
        if user is not None and user not in self._users:
            raise ValueError(f"there is no user {user!r}; KafkaCluster(users={{...}}) was given {sorted(self._users)}")
        if tls and not self._tls:
            raise ValueError("this cluster does not listen for TLS; make it with KafkaCluster(tls=True)")
        protocol = _protocol(user is not None, tls)
        config = {"bootstrap.servers": self._servers(protocol), "security.protocol": protocol}
        if tls:
            config["ssl.ca.location"] = str(self._folder / "ca.pem")
        if user is not None:
            config |= {"sasl.mechanism": MECHANISM, "sasl.username": user, "sasl.password": self._users[user]}
        return config

    def run_tool(self, main_class: str, *arguments: str, timeout: float = START_S) -> str:
        """Run a program of Kafka's, such as "org.apache.kafka.tools.TopicCommand", and return what it printed."""
        self._check_usable()
        command = [self._java, *QUICK_JVM, *_log_level("ERROR"), "-cp", self._classpath, main_class, *arguments]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, cwd=self._folder
        )
        if "UnsupportedClassVersionError" in done.stderr:
            raise KafkaUnavailable(
                f"Apache Kafka needs Java of version 17 or newer, and {self._java} is older; install one "
                "(Debian: openjdk-17-jdk-headless), or set JAVA_HOME"
            )
        if done.returncode:
            raise RuntimeError(f"{main_class} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def close(self) -> None:
        if self._owner == os.getpid() and not self._closed:
            self._closed = True
            self._admin_client = None
            self._finalizer()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<KafkaCluster of {len(self.brokers)} at {getattr(self, 'bootstrap_servers', '(starting)')}{state}>"

    # set-up

    def _make_nodes(self, brokers: int, heap_mb: int) -> None:
        listeners = ["PLAINTEXT"]
        if self._tls:
            listeners.append(_protocol(False, True))
        if self._users:
            listeners.append(_protocol(True, False))
        if self._tls and self._users:
            listeners.append(_protocol(True, True))

        def node(number: int, roles: str, names: Iterable[str], heap: int) -> None:
            folder = self._folder / f"node-{number}"
            folder.mkdir()
            self._nodes[number] = _Node(number, roles, {name: self._reserve() for name in names}, folder, heap)

        if brokers == 1:
            node(1, "broker,controller", [*listeners, "CONTROLLER"], heap_mb)
            return
        node(CONTROLLER_ID, "controller", ["CONTROLLER"], 256)
        for number in self.brokers:
            node(number, "broker", listeners, heap_mb)

    def _reserve(self) -> int:
        """A free port that stays ours also while its broker is down."""
        holder = socket.socket()
        # Java sets the same flag: the kernel then lets a broker listen where we only hold the address.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, 0))
        port: int = holder.getsockname()[1]
        if sys.platform == "linux":
            self._reserved.append(holder)
        else:
            holder.close()
        return port

    def _write_files(self, config: Mapping[str, Any]) -> None:
        store = self._make_certificate() if self._tls else None
        controller = next(node for node in self._nodes.values() if "controller" in node.roles)
        cluster_id = _kafka_uuid()
        for node in self._nodes.values():
            settings = {**self._settings(node, controller, store), **config}
            (node.folder / "server.properties").write_text(
                "".join(f"{name}={_text(value)}\n" for name, value in settings.items())
            )
            if node is not controller:
                data = node.folder / "data"
                data.mkdir()
                (data / "meta.properties").write_text(
                    f"version=1\ncluster.id={cluster_id}\nnode.id={node.id}\ndirectory.id={_kafka_uuid()}\n"
                )
        # Only a controller's folder holds more than that: the features that the cluster starts with.
        self.run_tool(
            "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(controller.folder / "server.properties")
        )

    def _settings(self, node: _Node, controller: _Node, store: tuple[Path, str] | None) -> dict[str, Any]:
        count = len(self.brokers)
        copies = min(3, count)
        in_sync = min(2, copies)
        settings: dict[str, Any] = {
            "process.roles": node.roles,
            "node.id": node.id,
            "controller.quorum.voters": f"{controller.id}@{HOST}:{controller.ports['CONTROLLER']}",
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in node.ports.items()),
            "log.dirs": node.folder / "data",
            "auto.create.topics.enable": False,
            "offsets.topic.num.partitions": 4,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": 4,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": in_sync,
            "group.initial.rebalance.delay.ms": 0,
            "broker.session.timeout.ms": 3000 if count > 1 else 60_000,  # nobody could take a single one's place
            "broker.heartbeat.interval.ms": 500,
            "replica.lag.time.max.ms": 3000,
            "log.cleaner.dedupe.buffer.size": 4 << 20,
        }
        if "broker" in node.roles:
            settings["inter.broker.listener.name"] = "PLAINTEXT"
        if "controller" in node.roles:
            settings |= {"default.replication.factor": copies, "min.insync.replicas": in_sync}
        names = {"CONTROLLER": "PLAINTEXT", **{name: name for name in node.ports if name != "CONTROLLER"}}
        settings["listener.security.protocol.map"] = ",".join(f"{name}:{kind}" for name, kind in names.items())
        if store is not None:
            path, password = store
            settings |= {
                "ssl.keystore.type": "PKCS12",
                "ssl.keystore.location": path,
                "ssl.keystore.password": password,
            }
        if self._users:
            settings["sasl.enabled.mechanisms"] = MECHANISM
            login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            for name in node.ports:
                if name.startswith("SASL_"):
                    settings[f"listener.name.{name.lower()}.{MECHANISM.lower()}.sasl.jaas.config"] = login
        return settings

    def _make_certificate(self) -> tuple[Path, str]:
        """A key store for the brokers; clients trust its one certificate, in ca.pem."""
        store, password = self._folder / "broker.p12", uuid.uuid4().hex
        keytool = [java_program("keytool"), *(f"-J{option}" for option in QUICK_JVM)]
        access = ["-alias", "broker", "-keystore", str(store), "-storetype", "PKCS12", "-storepass:env", "STORE"]
        names = f"SAN=dns:localhost,ip:{HOST}"
        for request in (
            ["-genkeypair", "-keyalg", "EC", "-dname", "CN=fastprod.testing", "-validity", "30", "-ext", names],
            ["-exportcert", "-rfc", "-file", str(self._folder / "ca.pem")],
        ):
            done = subprocess.run(
                [*keytool, *request, *access], env={**os.environ, "STORE": password}, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"keytool could not make a certificate: {done.stdout}{done.stderr}")
        return store, password

    def _create_users(self) -> None:
        if not self._users:
            return
        kind = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = (UserScramCredentialUpsertion(name, kind, word.encode()) for name, word in self._users.items())
        for done in self._admin.alter_user_scram_credentials(list(wanted)).values():
            self._answer(done, "create the users")

    def _launch(self, node: _Node) -> None:
        self._check_usable()
        wanted = os.environ.get("KAFKA_JVM_PERFORMANCE_OPTS", "").split()  # as Kafka's own scripts have it
        options = (*(QUICK_JVM if node.roles == "controller" else wanted), *_log_level("WARN"))
        java = [self._java, f"-Xmx{node.heap_mb}m", *options, "-cp", self._classpath, "kafka.Kafka"]
        keeper = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_keeper.py"))]
        node.pid = 0  # not known until the keeper says it
        with node.log.open("a") as log:
            node.keeper = subprocess.Popen(
                [*keeper, str(self._owner), str(self._folder), *java, str(node.folder / "server.properties")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C is for us, not for the broker
                cwd=node.folder,
            )
        assert node.keeper.stdout is not None
        node.paused = node.told_to_end = False
        with node.keeper.stdout as said:
            node.pid = int(said.readline() or 0)
        if not node.pid:
            node.ended(None)
            raise RuntimeError(f"node {node.id} could not be started:\n{node.last_words()}")

    # state

    @property
    def _admin(self) -> AdminClient:
        self._check_usable()
        admin = self._admin_client
        if admin is None:
            # A client that knows a frozen broker only may wait for it as long as for an answer.
            admin = self._admin_client = AdminClient(_quiet(self._servers("PLAINTEXT", self._able() or self.brokers)))
        return admin

    def _able(self) -> set[int]:
        """The brokers that can answer."""
        return {broker for broker in self.brokers if self._nodes[broker].answers}

    def _answer(self, future: Future[Any], what: str) -> None:
        try:
            future.result(ANSWER_S + 5)  # librdkafka gives up first, and says why
        except TimeoutError:
            raise TimeoutError(f"{self!r} did not {what} in {ANSWER_S:g} s; is a broker down or paused?") from None

    def _views(self) -> Iterator[ClusterMetadata]:
        """The cluster as each broker that can answer sees it, which may lag behind what the others know."""
        for broker in sorted(self._able()):
            # A fresh client, because one that knows the other brokers asks any of them.
            client = AdminClient(_quiet(self._servers("PLAINTEXT", [broker])))
            yield client.list_topics(timeout=5.0)

    def _alive(self, brokers: Iterable[int]) -> bool:
        """Whether these can answer, and all that can know of each other."""
        able = self._able()
        with suppress(KafkaException):
            return able.issuperset(brokers) and all(set(view.brokers) >= able for view in self._views())
        return False

    def _in_sync(self, topic: str, partitions: int = 1, among: Collection[int] | None = None) -> bool:
        """Whether every partition has a leader and all its copies are in sync, or all those on some brokers."""
        brokers = self.brokers if among is None else among
        with suppress(KafkaException):
            for view in self._views():
                found = view.topics.get(topic)
                known = found.partitions.values() if found is not None else ()
                if len(known) < partitions or any(
                    one.leader not in one.isrs or not set(one.replicas).intersection(brokers) <= set(one.isrs)
                    for one in known
                ):
                    return False
            return bool(self._able())
        return False

    def _wait(self, condition: Callable[[], object], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            unasked = [node for node in self._nodes.values() if not node.running and not node.told_to_end]
            if unasked or time.monotonic() > deadline:
                node = (unasked or list(self._nodes.values()))[0]
                why = f"ended with status {node.keeper.returncode}" if unasked and node.keeper else "logged"
                raise (RuntimeError if unasked else TimeoutError)(
                    f"waited up to {timeout:g} s for {what}, in vain; node {node.id} {why}:\n{node.last_words()}"
                )
            time.sleep(0.05)

    def _require(self, topic: str, partition: int = 0) -> None:
        self._check_usable()
        if not self._able():
            return  # nobody can tell; what the caller asks next fails after a time that it has chosen
        try:
            found = self._admin.list_topics(timeout=ANSWER_S).topics.get(topic)
        except KafkaException as error:
            raise TimeoutError(f"{self!r} gave no answer within {ANSWER_S:g} s ({error.args[0].str()})") from error
        if found is None:
            raise ValueError(f"there is no topic {topic!r}; create_topic({topic!r}) makes it")
        if partition not in found.partitions:
            raise ValueError(f"topic {topic!r} has no partition {partition}")

    def _node(self, broker: int) -> _Node:
        self._check_usable()
        return self._nodes[self._known(broker)]

    def _servers(self, listener: str, brokers: Iterable[int] | None = None) -> str:
        chosen = self.brokers if brokers is None else brokers
        return ",".join(f"{HOST}:{self._nodes[broker].ports[listener]}" for broker in chosen)

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise RuntimeError(
                f"this Kafka cluster belongs to process {self._owner}, not to its fork {os.getpid()}; "
                "pass bootstrap_servers to the child and control the cluster from the parent"
            )
        if self._closed:
            raise RuntimeError("this Kafka cluster is closed; use it inside its with block, or before close()")


def find_kafka() -> tuple[str, str]:
    """The path of java and the class path of Kafka, or KafkaUnavailable."""
    return java_program(), str(kafka_jars() / "*")


def _batches(log: Path) -> Iterator[tuple[int, int]]:
    """First offset and number of records of each batch in a segment (Kafka's record batches, version 2)."""
    try:
        with log.open("rb") as file:
            while len(head := file.read(BATCH_HEAD)) == BATCH_HEAD:
                offset, size, records = *struct.unpack_from(">qi", head), struct.unpack_from(">i", head, 57)[0]
                if size <= 0:
                    return  # room that the broker has set aside
                yield offset, records
                file.seek(size + 12 - BATCH_HEAD, os.SEEK_CUR)
    except FileNotFoundError:  # deleted meanwhile
        return


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more, after SIGSTOP; true also if it is gone."""
    try:
        if sys.platform == "linux":
            facts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat")]
            return all(fact.rpartition(")")[2].split()[0] in "TtZX" for fact in facts)
        said = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        return not said or said[0] in "TZ"
    except OSError:  # a thread has ended meanwhile: look again
        return not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end(owner: int, nodes: dict[int, _Node], reserved: list[socket.socket], folder: Path) -> None:
    if owner != os.getpid():
        return  # a fork's copy
    for node in nodes.values():
        node.signal(signal.SIGKILL)
    for node in nodes.values():
        node.ended(None)
    for holder in reserved:
        holder.close()
    shutil.rmtree(folder, ignore_errors=True)


def _quiet(servers: str) -> dict[str, Any]:
    # Brokers that are just starting are worth trying often.
    return {
        "bootstrap.servers": servers,
        "reconnect.backoff.max.ms": 100,
        "enable.metrics.push": False,
        "log_level": 0,
    }


def _protocol(sasl: bool, tls: bool) -> str:
    return ("SASL_SSL" if tls else "SASL_PLAINTEXT") if sasl else ("SSL" if tls else "PLAINTEXT")


def _log_level(level: str) -> tuple[str, ...]:
    return (f"-Dlog4j2.level={level}", "-Dlog4j2.StatusLogger.level=OFF")


def _text(value: object) -> str:
    """A value as Java's properties want it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kafka_uuid() -> str:
    """Base64 of a UUID, without a dash in front, which Kafka's tools take for an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _memory_folder() -> str | None:
    """A folder in memory, if there is one with room: brokers then do not wait for a disk."""
    with suppress(OSError):
        if shutil.disk_usage("/dev/shm").free > ROOM and os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return None
