"""Encryption and authentication on a real broker: they work, say why when they do not, and give no secret away."""

import base64
import gc
import json
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from reference import java_partition

from fastprod import AuthenticationError, BufferFullError, Producer
from fastprod.testing import KafkaCluster, audit

PASSWORD = "alice-s3cret"
WRONG = "n0t-the-s3cret"
# Whatever may be in a password and means something in a file of properties, in JAAS or in SCRAM.
USERS = {"alice": PASSWORD, "bob": 'p=s,s"w\\o;r d ✓'}
RECORDS = 3000

# Of somebody else: made with keytool -genkeypair -keyalg EC -dname CN=somebody.else; nobody has the key.
OTHER_CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBRTCB7aADAgECAghgb7N//P8l5jAKBggqhkjOPQQDAjAYMRYwFAYDVQQDEw1z
b21lYm9keS5lbHNlMB4XDTI2MTExNjA3MDE1OVoXDTQ2MTExMTA3MDE1OVowGDEW
MBQGA1UEAxMNc29tZWJvZHkuZWxzZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IA
BJ7kS4GlFq/gWed22nlDtct3kJ5NwgIFS2CuvMq6NL5WDNyxv7/a50Sju3eWmMeD
vSdG5D4gicSU2dkcsxV/G+6jITAfMB0GA1UdDgQWBBRV9/fifEsVYc2RmAadMBpG
R5WstDAKBggqhkjOPQQDAgNHADBEAiB5EnyubNS679/UwqTsGo5GGQKTRxtVzWyw
x83/VbyjqgIgKGaxNo8VqAsLdC2WuF6+9fej2p67PjhrADHKUeF9KgM=
-----END CERTIFICATE-----
"""


@pytest.fixture(scope="module")
def secure(kafka_available: None) -> Iterator[KafkaCluster]:
    with KafkaCluster(tls=True, users=USERS, topics={"events": 3}) as cluster:
        yield cluster


class Errors(list[KafkaError]):
    """An error_cb that keeps what it is told."""

    def __call__(self, error: KafkaError) -> None:
        self.append(error)

    def text(self) -> str:
        return "\n".join(f"{error.name()} {error.str()}" for error in self)


def until(producer: Producer, condition: Callable[[], object], timeout: float = 120.0) -> bool:
    """Poll until something has happened."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        producer.poll(0.05)
    return bool(condition())


def give_up(producer: Producer) -> None:
    """Close without waiting for records that will never be delivered."""
    producer.purge()
    producer.close(10)


# it works


@pytest.mark.parametrize(("user", "tls"), [(None, True), ("alice", False), ("alice", True), ("bob", True)], ids=str)
def test_records_arrive_over_every_protocol(secure: KafkaCluster, topic: str, user: str | None, tls: bool) -> None:
    secure.create_topic(topic, 3)
    config = secure.client_config(user, tls=tls)
    values = [b"%d some more bytes" % number for number in range(2 * RECORDS)]
    keys = [b"key-%d" % (number % 97) for number in range(2 * RECORDS)]
    errors = Errors()
    with Producer({**config, "error_cb": errors}) as producer:
        for value, key in zip(values[:RECORDS], keys[:RECORDS], strict=True):
            producer.produce(topic, value, key)
        receipt = producer.produce_many(topic, values[RECORDS:], keys[RECORDS:])
        assert producer.flush(120) == 0
    assert receipt.acknowledged == RECORDS
    assert errors == []
    # Read back through the same door, by a plain consumer.
    found = audit(config, topic, 2 * RECORDS, partition_of=java_partition(3))
    assert found.clean, str(found)


def test_what_client_config_gives_for_each_door(secure: KafkaCluster) -> None:
    doors = [secure.client_config(user, tls=tls) for user in (None, "alice") for tls in (False, True)]
    protocols = ["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    assert [door["security.protocol"] for door in doors] == protocols
    assert len({door["bootstrap.servers"] for door in doors}) == 4
    assert [("ssl.ca.location" in door, "sasl.password" in door) for door in doors] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    with pytest.raises(ValueError, match=r"no user 'carol'; .* was given \['alice', 'bob'\]"):
        secure.client_config("carol")


def test_wrong_credentials_can_be_corrected_while_records_wait(secure: KafkaCluster, topic: str) -> None:
    secure.create_topic(topic)
    errors = Errors()
    config = secure.client_config("alice", tls=True) | {"sasl.password": WRONG}
    with Producer({**config, "error_cb": errors}) as producer:
        producer.produce(topic, b"0 patient")
        receipt = producer.produce_many(topic, [b"1 patient", b"2 patient"])
        assert until(producer, lambda: errors.text().count("invalid credentials") >= 2), errors.text()
        assert receipt.acknowledged == 0
        producer.set_sasl_credentials("alice", PASSWORD)
        assert producer.flush(120) == 0
    found = audit(secure.bootstrap_servers, topic, 3)
    assert found.clean, str(found)


def test_without_error_cb_too_credentials_can_be_corrected(secure: KafkaCluster, topic: str) -> None:
    secure.create_topic(topic)
    config = secure.client_config("alice") | {"sasl.password": WRONG, "log_level": 0}
    with Producer(config) as producer:
        receipt = producer.produce_many(topic, [b"0 patient", b"1 patient"])
        for wait in (producer.flush, receipt.wait):
            with pytest.raises(AuthenticationError, match="invalid credentials"):
                wait(30)
        with pytest.raises(AuthenticationError, match="invalid credentials"):
            until(producer, lambda: False)
        assert len(producer) == 2, "a refusal takes no record away"
        producer.set_sasl_credentials("alice", PASSWORD)
        deadline = time.monotonic() + 120
        while not receipt.done and time.monotonic() < deadline:
            with suppress(AuthenticationError):  # of an attempt that was under way
                producer.flush(1)
    assert receipt.acknowledged == 2
    found = audit(secure.bootstrap_servers, topic, 2)
    assert found.clean, str(found)


def test_an_old_refusal_is_forgotten_when_the_door_opens(secure: KafkaCluster, topic: str) -> None:
    secure.create_topic(topic)
    producer = refused_and_corrected(secure)
    producer.list_topics(timeout=120)  # says that the login has succeeded
    producer.produce(topic, b"0 at last")
    assert producer.flush(120) == 0
    assert producer.close(60)


def test_closing_does_not_raise_an_old_refusal_when_nothing_waits(secure: KafkaCluster, topic: str) -> None:
    producer = refused_and_corrected(secure, **{"transactional.id": topic})
    deadline = time.monotonic() + 120
    ready = False
    while not ready and time.monotonic() < deadline:
        with suppress(KafkaException):  # the login needs a moment, and so does the coordinator
            producer.init_transactions(2)
            ready = True
    assert ready
    assert producer.close(60)


def trouble_of(producer: Producer) -> str:
    """Why brokers cannot be reached, as soon as the producer knows it."""
    deadline = time.monotonic() + 120
    while producer._runtime.trouble() is None and time.monotonic() < deadline:
        time.sleep(0.02)  # not in poll(), which would raise it
    return str(producer._runtime.trouble())


def refused_and_corrected(secure: KafkaCluster, **options: Any) -> Producer:
    """A producer without error_cb that has been refused once and then got the right password."""
    config = secure.client_config("alice") | {"sasl.password": WRONG, "log_level": 0}
    producer = Producer({**config, **options})
    assert "invalid credentials" in trouble_of(producer)
    producer.set_sasl_credentials("alice", PASSWORD)
    return producer


# it says why


def at_the_port_of(secure: KafkaCluster, **door: Any) -> dict[str, str]:
    return {"bootstrap.servers": secure.client_config(**door)["bootstrap.servers"]}


REFUSALS: dict[str, tuple[Callable[[KafkaCluster], dict[str, str]], int, str]] = {
    "wrong password": (
        lambda c: c.client_config("alice") | {"sasl.password": WRONG},
        KafkaError._AUTHENTICATION,
        "invalid credentials with SASL mechanism SCRAM-SHA-512",
    ),
    "wrong password over TLS": (
        lambda c: c.client_config("alice", tls=True) | {"sasl.password": WRONG},
        KafkaError._AUTHENTICATION,
        "invalid credentials with SASL mechanism SCRAM-SHA-512",
    ),
    "unknown user": (
        lambda c: c.client_config("alice", tls=True) | {"sasl.username": "mallory"},
        KafkaError._AUTHENTICATION,
        "invalid credentials",
    ),
    "mechanism that the broker has not": (
        lambda c: c.client_config("alice", tls=True) | {"sasl.mechanism": "PLAIN"},
        KafkaError._AUTHENTICATION,
        "Unsupported SASL mechanism: broker's supported mechanisms: SCRAM-SHA-512",
    ),
    "login where none is asked for": (
        lambda c: c.client_config("alice") | at_the_port_of(c),
        KafkaError._AUTHENTICATION,
        "Request not valid in current SASL state",
    ),
    "certificate of somebody else": (
        lambda c: _without(c.client_config(tls=True), "ssl.ca.location") | {"ssl.ca.pem": OTHER_CERTIFICATE},
        KafkaError._SSL,
        "certificate could not be verified, verify that ssl.ca.location is correctly configured",
    ),
    # 127.1 is the same address, but not a name in the certificate.
    "certificate for another host": (
        lambda c: (
            c.client_config(tls=True)
            | {"bootstrap.servers": c.client_config(tls=True)["bootstrap.servers"].replace("127.0.0.1", "127.1")}
        ),
        KafkaError._SSL,
        "certificate could not be verified",
    ),
}
# What librdkafka does not count as a refusal: it goes on trying, and records time out.
DISCONNECTS = {
    "TLS at a plain port": (
        lambda c: c.client_config(tls=True) | at_the_port_of(c),
        KafkaError._TRANSPORT,
        "connecting to a PLAINTEXT broker listener?",
    ),
}

# Now and then librdkafka says the same in fewer words.
SHORTER = ("SSL connection closed by peer", "SSL routines::certificate verify failed")


def _without(config: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in config.items() if key != name}


@pytest.mark.parametrize("case", [*REFUSALS, *DISCONNECTS])
def test_error_cb_is_told_the_reason_at_once_and_timeouts_repeat_it(secure: KafkaCluster, case: str) -> None:
    make, code, words = (REFUSALS | DISCONNECTS)[case]
    errors = Errors()
    outcomes: list[KafkaError] = []
    config = make(secure) | {"message.timeout.ms": 2000, "log_level": 0, "error_cb": errors}
    with Producer(config) as producer:
        # Before any record is there, let alone its time over.
        assert until(producer, lambda: any(e.code() == code and words in e.str() for e in errors)), errors.text()
        producer.produce("events", b"x", on_delivery=lambda error, _: outcomes.append(error))
        receipt = producer.produce_many("events", [b"y"])
        assert producer.flush(120) == 0
        (failed,) = receipt.errors
        for error in (*outcomes, failed.error):
            assert error.code() == KafkaError._MSG_TIMED_OUT
            assert any(reason in error.str() for reason in (words, *SHORTER))
    assert len(outcomes) == 1


@pytest.mark.parametrize("case", REFUSALS)
def test_without_error_cb_waiting_raises_the_reason(secure: KafkaCluster, case: str) -> None:
    make, code, words = REFUSALS[case]
    producer = Producer(make(secure) | {"log_level": 0})
    producer.produce("events", b"x")
    # message.timeout.ms is 5 minutes: without this, that long would a wrong password look like a slow broker.
    with pytest.raises(AuthenticationError) as raised:
        producer.flush(120)
    assert raised.value.args[0].code() == code
    assert words in raised.value.args[0].str()
    with pytest.warns(RuntimeWarning, match="1 records had not been acknowledged"), pytest.raises(AuthenticationError):
        producer.close()


def test_leaving_the_with_block_does_not_wait_for_what_cannot_be(secure: KafkaCluster) -> None:
    config = secure.client_config("alice") | {"sasl.password": WRONG, "log_level": 0}
    with (
        pytest.warns(RuntimeWarning, match="1 records had not been acknowledged"),
        pytest.raises(AuthenticationError, match="invalid credentials"),
        Producer(config) as producer,
    ):
        producer.produce("events", b"x")


@pytest.mark.parametrize("case", ["wrong password", "certificate of somebody else", "TLS at a plain port"])
def test_a_full_buffer_says_that_brokers_refuse_us(secure: KafkaCluster, case: str) -> None:
    make, _, words = (REFUSALS | DISCONNECTS)[case]
    errors = Errors()
    config = make(secure) | {"buffer.memory": 65_536, "max.block.ms": 1000, "log_level": 0, "error_cb": errors}
    producer = Producer(config)
    assert until(producer, lambda: words in errors.text()), errors.text()
    failed = producer.produce_many("events", [bytes(100)] * 2000).errors
    assert "max.block.ms = 1000" in str(failed[0].error)
    assert any(reason in str(failed[0].error) for reason in (words, *SHORTER))
    with pytest.raises(BufferFullError) as raised:
        producer.produce("events", bytes(100))
    assert any(reason in str(raised.value) for reason in (words, *SHORTER))
    give_up(producer)


@pytest.mark.parametrize("door", [{"tls": True}, {"user": "alice"}], ids=["TLS", "SASL"])
def test_a_plain_client_at_a_guarded_port_hears_of_it(secure: KafkaCluster, door: dict[str, Any], caplog: Any) -> None:
    # The broker just hangs up, and librdkafka tells the reason only to its log.
    errors = Errors()
    config = at_the_port_of(secure, **door) | {"error_cb": errors, "logger": logging.getLogger("plain")}
    producer = Producer(config)
    producer.produce("events", b"x")
    with caplog.at_level(logging.INFO, "plain"):
        assert until(producer, lambda: any(e.code() == KafkaError._ALL_BROKERS_DOWN for e in errors)), errors.text()
        assert until(producer, lambda: "Disconnected: connection closed by peer" in caplog.text)
    give_up(producer)


@pytest.mark.parametrize("door", [{"tls": True}, {"user": "alice"}], ids=["TLS", "SASL"])
def test_a_plain_client_at_a_guarded_port_reads_of_it_in_timeouts(secure: KafkaCluster, door: dict[str, Any]) -> None:
    with Producer(at_the_port_of(secure, **door) | {"message.timeout.ms": 1500, "log_level": 0}) as producer:
        assert "brokers are down" in trouble_of(producer)
        receipt = producer.produce_many("events", [b"x"])
        assert producer.flush(120) == 0
    assert "brokers are down" in receipt.errors[0].error.str()


def test_transactions_do_not_wait_for_brokers_that_refuse_us(secure: KafkaCluster, topic: str) -> None:
    config = secure.client_config("alice") | {"sasl.password": WRONG, "transactional.id": topic, "log_level": 0}
    producer = Producer(config)
    try:
        assert "invalid credentials" in trouble_of(producer)
        with pytest.raises(KafkaException, match="invalid credentials"):
            producer.init_transactions(3)
    finally:
        # confluent-kafka would like to abort what has not begun.
        with warnings.catch_warnings(action="ignore"):
            producer.close(0)


def test_asking_for_metadata_says_that_brokers_refuse_us(secure: KafkaCluster) -> None:
    producer = Producer(secure.client_config("alice") | {"sasl.password": WRONG, "log_level": 0})
    try:
        assert "invalid credentials" in trouble_of(producer)
        with pytest.raises(KafkaException, match="invalid credentials"):
            producer.list_topics(timeout=3)
    finally:
        producer.close(0)


# it keeps secrets


def disguises(secret: str) -> list[str]:
    """A secret as it is, and what shows of it in base64, wherever it begins in the encoded text."""
    raw = secret.encode()
    coded = [base64.b64encode(bytes(shift) + raw).decode() for shift in range(3)]
    # Characters at both ends also depend on the neighbours.
    return [secret, raw.hex(), *(text[4 if shift else 0 : -4] for shift, text in enumerate(coded))]


def assert_kept(secret: str, *texts: str) -> None:
    for text in texts:
        for disguise in disguises(secret):
            assert disguise not in text


def test_disguises_are_found() -> None:
    assert_kept(PASSWORD, "alice", "s3cret", base64.b64encode(b"alice").decode())
    for front in (b"", b"\0alice\0", b"user:", b"n,,n=alice,"):
        with pytest.raises(AssertionError):
            assert_kept(PASSWORD, base64.b64encode(front + PASSWORD.encode() + b"; and more").decode())


@pytest.mark.parametrize("to_logger", [False, True], ids=["stderr", "logger"])
@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
@pytest.mark.parametrize("password", [PASSWORD, WRONG], ids=["right", "wrong"])
def test_no_password_in_what_a_producer_says(
    secure: KafkaCluster,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    password: str,
    mechanism: str,
    to_logger: bool,
) -> None:
    statistics: list[str] = []
    errors = Errors()
    outcomes: list[object] = []
    config: dict[str, Any] = secure.client_config("alice", tls=True) | {
        "sasl.password": password,
        "sasl.mechanism": mechanism,
        "debug": "security,broker,conf,plugin,interceptor",
        "statistics.interval.ms": 100,
        "stats_cb": statistics.append,
        "error_cb": errors,
    }
    if to_logger:
        caplog.set_level(logging.DEBUG)
        config["logger"] = logging.getLogger("secrets")
    delivered = password == PASSWORD and mechanism == "SCRAM-SHA-512"
    producer = Producer(config)
    producer.produce("events", b"x", on_delivery=lambda error, message: outcomes.extend((error, message)))
    receipt = producer.produce_many("events", [b"y"])
    assert until(producer, lambda: statistics and (errors or receipt.done))
    if not delivered:
        producer.purge()
    assert producer.flush(120) == 0
    said = [repr(producer), str(producer), repr(receipt), *map(repr, receipt.errors), *map(repr, outcomes)]
    producer.close()
    said += [repr(producer), errors.text(), repr(errors), *statistics]
    assert (receipt.acknowledged == 1) == delivered
    assert json.loads(statistics[-1])["type"] == "producer"
    logged = "\n".join(record.getMessage() for record in caplog.records)
    out, err = capfd.readouterr()
    # The tap is open: debug output, also about the login, has arrived where it was sent.
    assert "SASL" in (logged if to_logger else err)
    assert ("sasl.password = [redacted]" in logged) or not to_logger
    assert_kept(password, out, err, logged, *said)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"no.such.option": 1}, "no.such.option"),
        ({"buffer.memory": "much"}, "buffer.memory"),
        ({"linger.ms": None}, "linger.ms"),
        ({"on_delivery": 17}, "on_delivery"),
        ({"partitioner": object()}, "partitioner"),
        ({"acks": "perhaps"}, "acks"),
        ({"security.protocol": "SASL_TLS"}, "security.protocol"),
        ({"sasl.mechanism": "NO-SUCH"}, "NO-SUCH"),
        ({"ssl.ca.location": "/no/such/file"}, "ssl.ca.location"),
        ({"ssl.key.pem": "not a key"}, "ssl.key.pem"),
        ({"ssl.keystore.location": "/no/such/file"}, "ssl.keystore.location"),
        ({"sasl.jaas.config": "ScramLoginModule required;"}, "JAAS"),
        ({"sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc"}, "sasl.oauthbearer."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_no_secret_in_errors_about_other_options(
    mistake: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = {
        "sasl.password": "the-s3cret-of-sasl",
        "ssl.key.password": "the-s3cret-of-a-key",
        "ssl.keystore.password": "the-s3cret-of-a-store",
        "sasl.oauthbearer.client.secret": "the-s3cret-of-oauth",
    }
    config = {
        "bootstrap.servers": "127.0.0.1:1",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        **secrets,
        **mistake,
    }
    with pytest.raises(KafkaException) as raised:
        Producer(config)
    gc.collect()  # what a half-made producer has to say, too
    shown = "".join(traceback.format_exception(raised.value))
    assert words in shown
    out, err = capfd.readouterr()
    for secret in secrets.values():
        assert_kept(secret, shown, repr(raised.value), str(raised.value), repr(raised.value.args), out, err)


def test_no_password_in_what_the_runtime_raises(secure: KafkaCluster, capfd: pytest.CaptureFixture[str]) -> None:
    config = secure.client_config("alice") | {"sasl.password": WRONG, "log_level": 7}
    producer = Producer(config)
    producer.produce("events", b"x")
    shown = []
    for act in (
        lambda: producer.flush(120),
        lambda: producer.list_topics(timeout=1),
        lambda: producer.produce("events", b"x", partition="first"),
        lambda: producer.set_sasl_credentials("alice"),
        lambda: producer.set_sasl_credentials("alice", WRONG, WRONG),
        lambda: producer.close(30),
        lambda: producer.produce("events", b"x"),
    ):
        # Whatever it is, it must not tell; closing warns of the lost record as well.
        with warnings.catch_warnings(action="ignore"), pytest.raises(Exception) as raised:  # noqa: PT011
            act()
        shown += ["".join(traceback.format_exception(raised.value)), repr(raised.value)]
    assert "AuthenticationError" in shown[0]
    assert_kept(WRONG, *shown, *capfd.readouterr())


def test_no_password_in_a_cluster_and_no_access_to_its_files(secure: KafkaCluster) -> None:
    for password in USERS.values():
        assert_kept(password, repr(secure), str(secure), secure.log_of(1))
    folder = Path(secure.client_config(tls=True)["ssl.ca.location"]).parent
    assert folder.stat().st_mode & 0o077 == 0, "others could read the brokers' key"
