"""Java's producer as a client under test: Kafka's own ProducerPerformance, with the clock in the right places.

    JavaRunner        one virtual machine per run, kept by fastprod.testing's _keeper.py, so that it never outlives us
      v
    Clock.main        calls ProducerPerformance.main(): several times to warm up, once for the measured records
      v
    Clock, as the producer's interceptor, reads time and CPU when the measured records begin and when all are through

ProducerPerformance's own figures would not do for a comparison. They start before there is a connection. With
--warmup-records, the clock of the steady state starts while up to buffer.memory of warm-up records still waits to be
sent, and stops only after the latencies of the whole run are sorted.

What counts is the same as for every client: from the first measured record, with connections open and nothing on its
way, until all are acknowledged; user and system CPU of the whole process in between, here with the threads of the
garbage collector and the compiler. Starting the virtual machine does not count, and most of the compiling is over by
then: it gets the warm-up many times, see WARM_CALLS. The interceptor costs a comparison and a volatile read per record.

Two things remain that the tool does and the Python clients do not: it gives each record a callback, and it draws the
letters of short records while sending. The latter is in its favour, see DRAWN.

Beside that stands the tool as its users start it: one process without Clock and without a warm-up. There the throughput
is what its last line says, and the CPU is that of the process from its start to its end.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from fastprod import _config
from fastprod.cli._load import PERCENTILES, RUNNERS, Advance, DeliveryError, Load, Round, Runner, Unfit

TUNED = "ProducerPerformance"
DEFAULTS = "ProducerPerformance, defaults"
STARTED = "ProducerPerformance, as started"
WIRE_BATCH = 1_000_000  # librdkafka's batch.size
WARM_CALLS = 20  # so many times the warm-up: compiling is over after seconds, not after 100,000 records
WARM_S = 20.0  # but no longer than this
HEAP_MB = 512  # as kafka-producer-perf-test has it, and so are the others:
JVM = ("-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
ENGLISH = ("-Duser.language=en", "-Duser.country=US")  # figures with a decimal point
# Below so many bytes ProducerPerformance draws each value by chance, from there on it takes ours, ready made: whichever
# is better for Java. CPU per record on a busy machine, medians, drawn against ready made: 100 B 1.6 and 2.2 us, 300 B
# 2.9 and 4.0, 1 KB 12 and 5, 10 KB 93 and 45. With short values the time that drawing takes probably pays because the
# buffer stays shallow meanwhile: at 100 B the median latency was 10 ms against 70 ms.
DRAWN = 512
EXTRA = 2  # records of each call before its clock starts
LOOK_S = 0.5  # between looks at what it prints

UNSAFE = re.compile(r"[^A-Za-z0-9._,/-]+")
TICK = re.compile(r"^clock (\d+) (\d+) (\d+)$", re.MULTILINE)
LATENCIES = re.compile(
    r"^(\d+) steady state records sent, .*, ([\d.]+) ms avg latency, ([\d.]+) ms max latency, "
    r"(\d+) ms 50th, (\d+) ms 95th, (\d+) ms 99th, (\d+) ms 99\.9th\.$",
    re.MULTILINE,
)
SUMMARY = re.compile(r"^\d+ records sent, ([\d.]+) records/sec .* 99\.9th\.$", re.MULTILINE)
FAILURE = re.compile(r"^([\w.]+(?:Exception|Error)\b.*)\n", re.MULTILINE)  # of a record; others end the program

CLOCK = """
import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.stream.Stream;
import org.apache.kafka.clients.producer.ProducerInterceptor;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.tools.ProducerPerformance;

public class Clock implements ProducerInterceptor<byte[], byte[]> {
    static final int EXTRA = %(extra)d;
    static final OperatingSystemMXBean SYSTEM = (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

    /** Warm-up: records per call, calls, nanoseconds; measured: records, options; then what every call gets. */
    public static void main(String[] args) throws Exception {
        long until = System.nanoTime() + Long.parseLong(args[2]);
        for (int left = Integer.parseInt(args[1]); left > 0 && System.nanoTime() < until; left--)
            send(args, args[0], "--throughput=-1");
        send(args, args[3], args[4].split(" "));
    }

    static void send(String[] args, String records, String... options) throws Exception {
        Stream<String> own = Stream.of("--num-records=" + (Long.parseLong(records) + EXTRA));
        Stream<String> all = Stream.concat(Stream.concat(own, Stream.of(options)), Stream.of(args).skip(5));
        ProducerPerformance.main(all.toArray(String[]::new));
    }

    private final CountDownLatch connected = new CountDownLatch(1);
    private long records, time, cpu;

    public ProducerRecord<byte[], byte[]> onSend(ProducerRecord<byte[], byte[]> record) {
        if (++records <= EXTRA + 1)
            start();
        return record;
    }

    private void start() {
        try {
            if (records == EXTRA)
                connected.await();
        } catch (InterruptedException stop) {
            Thread.currentThread().interrupt();
        }
        time = System.nanoTime();
        cpu = SYSTEM.getProcessCpuTime();
    }

    public void onAcknowledgement(RecordMetadata place, Exception error) {
        connected.countDown();
    }

    public void close() {
        long seconds = System.nanoTime() - time, used = SYSTEM.getProcessCpuTime() - cpu;
        System.out.printf("clock %%d %%d %%d%%n", records, seconds, used);
    }

    public void configure(Map<String, ?> settings) {}
}
"""

# ---- configuration

# Options that Java's producer has under the same name, with the same meaning.
SAME = {
    "acks",
    "bootstrap.servers",
    "buffer.memory",
    "client.id",
    "compression.type",
    "connections.max.idle.ms",
    "enable.idempotence",
    "enable.metrics.push",
    "linger.ms",
    "max.block.ms",
    "max.in.flight.requests.per.connection",
    "partitioner.adaptive.partitioning.enable",
    "partitioner.availability.timeout.ms",
    "partitioner.ignore.keys",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retries",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "sasl.mechanism",
    "security.protocol",
}
RENAMED = {
    "compression.codec": "compression.type",
    "message.max.bytes": "max.request.size",
    "message.timeout.ms": "delivery.timeout.ms",
    "sasl.mechanisms": "sasl.mechanism",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
    "socket.send.buffer.bytes": "send.buffer.bytes",
}
# Nothing that changes how records travel: what the Python clients tell, and fastprod's own.
WITHOUT = {
    "debug",
    "delivery.report.only.error",
    "log.connection.close",
    "log_level",
    "statistics.interval.ms",
    "sticky.batch.size",
}
FLAGS = {
    "enable.idempotence",
    "enable.metrics.push",
    "partitioner.adaptive.partitioning.enable",
    "partitioner.ignore.keys",
}
LOGIN = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def java_settings(conf: Mapping[str, Any]) -> dict[str, str]:
    """The options of Java's producer that say the same as librdkafka's and ours; Unfit where there are none."""
    found: dict[str, str] = {"enable.idempotence": "false"}  # librdkafka's default; Java's is true
    left = dict(conf)
    for name in WITHOUT | {"sasl.username", "sasl.password", "batch.size"}:
        left.pop(name, None)
    for name in (SAME | set(RENAMED)) & set(left):
        found[RENAMED.get(name, name)] = _value(name, left.pop(name))
    if "sasl.mechanism" in found:
        found["sasl.jaas.config"] = _login(found["sasl.mechanism"], conf)
    if "ssl.ca.location" in left:
        found |= _trusted(str(left.pop("ssl.ca.location")))
    if "ssl.endpoint.identification.algorithm" in left:
        algorithm = str(left.pop("ssl.endpoint.identification.algorithm"))
        found["ssl.endpoint.identification.algorithm"] = "" if algorithm == "none" else algorithm
    policy = left.pop("partitioner", "uniform")
    if policy == "round_robin":
        found["partitioner.class"] = "org.apache.kafka.clients.producer.RoundRobinPartitioner"
    elif policy not in _config.OWN_POLICIES:
        raise Unfit(f"java cannot be compared with partitioner={policy}: its producer has nothing of the kind")
    if left:
        names = ", ".join(sorted(left))
        raise Unfit(f"java cannot be compared with {names}: its producer has no option that says the same")
    return found


def _value(name: str, value: Any) -> str:
    text = str(value)
    if name in FLAGS:
        return "true" if text.lower() in ("true", "t", "1") else "false"
    if name == "security.protocol":
        return text.upper()
    if name in ("linger.ms", "max.block.ms"):
        if not float(text).is_integer():
            raise Unfit(f"java cannot be compared with {name}={text}: its producer takes whole milliseconds")
        return str(int(float(text)))
    return text


def _login(mechanism: str, conf: Mapping[str, Any]) -> str:
    if mechanism not in LOGIN:
        raise Unfit(f"java cannot be compared with sasl.mechanism={mechanism}, only with {', '.join(LOGIN)}")
    name, word = (re.sub(r'(["\\])', r"\\\1", str(conf.get(key, ""))) for key in ("sasl.username", "sasl.password"))
    return f'{LOGIN[mechanism]} required username="{name}" password="{word}";'


def _trusted(path: str) -> dict[str, str]:
    if not os.path.isfile(path):
        raise Unfit(f"java cannot be compared with ssl.ca.location={path}: its producer wants one file")
    return {"ssl.truststore.type": "PEM", "ssl.truststore.location": os.path.abspath(path)}


def properties(settings: Mapping[str, str]) -> str:
    """As the lines of a file that java.util.Properties reads: Latin-1, and a backslash begins an escape."""

    def escaped(found: re.Match[str]) -> str:
        return "".join(f"\\u{unit}" for unit in found[0].encode("utf-16-be").hex(" ", 2).split())

    return "".join(f"{name}={UNSAFE.sub(escaped, value)}\n" for name, value in sorted(settings.items()))


# ---- the client


class JavaRunner(Runner):
    """ProducerPerformance with librdkafka's batch size, with its own, and with librdkafka's in a fresh process."""

    name = "java"
    calls: ClassVar = {"bulk": (TUNED, DEFAULTS, STARTED), "single": (), "callback": ()}
    needs_real_broker = True  # mock brokers do not speak to Java's client

    def ways(self, mode: str, rate: float | None) -> tuple[str, ...]:
        # At a rate, latencies until the callback are compared, and batches are never full.
        return (TUNED,) if rate is not None and mode == "callback" else super().ways(mode, rate)

    def check(self, load: Load, conf: Mapping[str, Any]) -> None:
        from fastprod.testing._java import KafkaUnavailable, java_program
        from fastprod.testing.kafka import find_kafka

        if load.block.keys is not None:
            raise Unfit("java cannot be compared with --keys: its ProducerPerformance sends records without")
        if not load.block.values[0]:
            raise Unfit("java cannot be compared with --record-size 0: its ProducerPerformance refuses it")
        java_settings(conf)
        try:
            find_kafka()
            java_program("javac")
        except KafkaUnavailable as missing:
            raise Unfit(f"java cannot be compared: {missing}") from None

    def run(
        self, mode: str, call: str, load: Load, conf: Mapping[str, Any], partitions: int, advance: Advance
    ) -> Round:
        with tempfile.TemporaryDirectory(prefix="fastprod-java-", ignore_cleanup_errors=True) as name:
            folder, log = Path(name), Path(name, "log.txt")
            done = Round(self.name, mode, call, load.records, 0.0, 0.0)
            begun = time.perf_counter()
            try:
                command = self._prepare(folder, call, load, conf)
                before = _cpu_of_ended()
                with _kept(command, folder, log) as machine:
                    _watch(machine, log, call)
                done.cpu_seconds = _cpu_of_ended() - before
            except KeyboardInterrupt:
                done.interrupted = True
                done.seconds = time.perf_counter() - begun
                return done
            said = log.read_text(errors="replace")
        (_read_summary if call == STARTED else _read)(said, done, load)
        advance(load.records)
        return done

    def _prepare(self, folder: Path, call: str, load: Load, conf: Mapping[str, Any]) -> list[str]:
        """Writes what the virtual machine needs, secrets among it; returns its command."""
        from fastprod.testing._java import java_program
        from fastprod.testing.kafka import QUICK_JVM, _log_level, find_kafka

        java, jars = find_kafka()
        settings = java_settings(conf)
        if call != DEFAULTS:
            settings["batch.size"] = str(conf.get("batch.size", WIRE_BATCH))
        heap = HEAP_MB + int(settings.get("buffer.memory", 0)) // (1 << 20)
        machine = [java, f"-Xmx{heap}m", *JVM, *ENGLISH, *_log_level("ERROR"), "-cp"]
        rate = f"--throughput={-1 if load.rate is None else load.rate}"
        if call == STARTED:
            program = [jars, "org.apache.kafka.tools.ProducerPerformance", f"--num-records={load.records}", rate]
        else:
            (folder / "Clock.java").write_text(CLOCK % {"extra": EXTRA})
            compiler = [java_program("javac"), *(f"-J{option}" for option in QUICK_JVM), "-cp", jars, "Clock.java"]
            _run_briefly(compiler, folder)
            settings["interceptor.classes"] = "Clock"
            if load.rate is not None:
                rate += f" --warmup-records={EXTRA}"  # has the latencies of the others told
            program = [
                os.pathsep.join((str(folder), jars)),
                "Clock",
                *(str(load.warmup), str(WARM_CALLS if load.warmup else 0), str(int(WARM_S * 1e9))),
                *(str(load.records), rate),
            ]
        config = folder / "client.properties"
        config.touch(0o600)
        config.write_text(properties(settings))
        values = self._values(folder, load, settings)
        return [*machine, *program, f"--topic={load.topic}", values, f"--command-config={config}"]

    def _values(self, folder: Path, load: Load, settings: Mapping[str, str]) -> str:
        size = len(load.block.values[0])
        if size < DRAWN and settings.get("compression.type", "none") == "none":
            return f"--record-size={size}"
        file = folder / "values.txt"  # the very same values: they are what is compressed
        file.write_bytes(b"\n".join(dict.fromkeys(load.block.values)) + b"\n")
        return f"--payload-file={file}"


def _run_briefly(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise DeliveryError(f"{command[0]} failed: {_last_words(done.stdout + done.stderr)}")


@contextmanager
def _kept(command: list[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a process group of its own, together with a keeper that ends it, and the folder, after us."""
    from fastprod.testing import _keeper

    keeper = [sys.executable, "-I", "-S", str(_keeper.__file__), str(os.getpid()), str(folder)]
    with log.open("wb") as said:
        machine = subprocess.Popen(
            [*keeper, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the process id, which the group makes needless
            stderr=said,
            start_new_session=True,  # Ctrl-C comes to us first
        )
    try:
        yield machine
    finally:
        if machine.poll() is None:
            os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()


def _watch(machine: subprocess.Popen[bytes], log: Path, call: str) -> None:
    """Waits for the end; DeliveryError at the first record that failed: ProducerPerformance would go on for hours."""
    with log.open(errors="replace") as said:
        text = ""
        while True:
            with suppress(subprocess.TimeoutExpired):
                machine.wait(LOOK_S)
            text += said.read()
            if (failed := FAILURE.search(text)) is not None:
                raise DeliveryError(f"java {call} failed: {failed[1]}")
            if machine.returncode is not None:
                break
    if machine.returncode:
        raise DeliveryError(f"java {call} ended with status {machine.returncode}: {_last_words(text)}")


def _last_words(text: str) -> str:
    """The end of what was printed, without the places in the code and the clock's lines."""
    return " ".join(line.strip() for line in text.splitlines() if not line.startswith(("\t", "clock ")))[-500:]


def _cpu_of_ended() -> float:
    """Of all processes that we have started and that are over; the keeper adds some 20 ms to Java's."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _read_summary(said: str, done: Round, load: Load) -> None:
    """Takes the throughput from the line that ProducerPerformance ends with."""
    found = SUMMARY.search(said)
    if found is None:
        raise DeliveryError(f"java {done.call} told no figures: {_last_words(said)}")
    done.seconds = load.records / float(found[1])


def _read(said: str, done: Round, load: Load) -> None:
    """Takes the figures from what was printed: the clock's, and the latencies where they were asked for."""
    calls = [tuple(map(int, found.groups())) for found in TICK.finditer(said)]
    if not calls:
        raise DeliveryError(f"java {done.call} told no figures: {_last_words(said)}")
    _, nanoseconds, cpu = calls[-1]
    done.seconds, done.cpu_seconds = nanoseconds / 1e9, cpu / 1e9
    done.warmup = sum(records for records, _, _ in calls) - load.records
    if load.rate is not None and (found := LATENCIES.search(said)) is not None:
        count, *figures = found.groups()
        names = ("avg", "max", *PERCENTILES)
        done.told = {"samples": int(count), **dict(zip(names, map(float, figures), strict=True))}


RUNNERS[JavaRunner.name] = JavaRunner()
