"""Options that a job brings along from Spark's own Kafka sink."""

from pathlib import Path

import pytest

import fastprod.spark
from fastprod import Producer
from fastprod._java_options import translate
from fastprod.spark import partition_writer, write

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
SECRET = "hunter2"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\n" + "A" * 64 + "\nQUJD\n-----END CERTIFICATE-----\n"
KEY = CERTIFICATE.replace("CERTIFICATE", "ENCRYPTED PRIVATE KEY")


def login(options: str, module: str = PLAIN, mechanism: str = "PLAIN") -> dict:
    return translate({"sasl.mechanism": mechanism, "sasl.jaas.config": f"{module} {options}"})


@pytest.mark.parametrize(
    ("options", "user", "password"),
    [
        ('required username="ann" password="word";', "ann", "word"),
        ("REQUIRED\n  username='ann'\n\tpassword = 'two words' ;", "ann", "two words"),
        (r'required password="a\"b\\c" username="d;e=f";', "d;e=f", 'a"b\\c'),
        (r'required username="\141\t\x" password="";', "a\tx", ""),
        ('sufficient /* who */ username=ann // and\n password="#1/*2*/";', "ann", "#1/*2*/"),
        ('required username="a\'b" password=\'c"d\' user_ann="e";', "a'b", 'c"d'),
        ('required username="ann" password="old" password="new";', "ann", "new"),
        ('required username="änn" password="wörd";', "änn", "wörd"),
    ],
)
def test_a_login_is_read_as_java_reads_it(options, user, password) -> None:
    for module, mechanism in ((PLAIN, "PLAIN"), (SCRAM, "SCRAM-SHA-256"), (f"kafkashaded.{SCRAM}", "scram-sha-512")):
        settings = login(options, module, mechanism)
        assert settings == {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}


def test_the_mechanism_and_its_two_names() -> None:
    config = {"sasl.jaas.config": f'{PLAIN} required username="ann" password="word";'}
    assert translate(config)["sasl.mechanism"] == "PLAIN"
    assert "sasl.mechanism" not in translate({**config, "sasl.mechanisms": "PLAIN"})
    assert translate({**config, "sasl.username": "ann"})["sasl.username"] == "ann"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sasl.jaas.config": ""}, "cannot be read"),
        ({"sasl.jaas.config": f'{PLAIN} required username="ann" password="{SECRET}"'}, 'a ";" at the end'),
        ({"sasl.jaas.config": f'{PLAIN} required username="ann" password="{SECRET};'}, "cannot be read"),
        ({"sasl.jaas.config": f'{PLAIN} username="ann" password="{SECRET}";'}, "cannot be read"),
        ({"sasl.jaas.config": f'{PLAIN} perhaps username="ann" password="{SECRET}";'}, "cannot be read"),
        ({"sasl.jaas.config": f'{PLAIN} required username "{SECRET}";'}, "cannot be read"),
        ({"sasl.jaas.config": f'{PLAIN} required password="{SECRET}";'}, 'no username="..."'),
        ({"sasl.jaas.config": f'{PLAIN} required username="{SECRET}";'}, 'no password="..."'),
        (
            {"sasl.jaas.config": f'{PLAIN} required username="a" password="{SECRET}"; {SCRAM} required;'},
            "more than one login module",
        ),
        (
            {"sasl.jaas.config": f'{PLAIN} required username="a" password="{SECRET}";', "sasl.password": "other"},
            "sasl.jaas.config and sasl.password say different things",
        ),
        (
            {"sasl.jaas.config": f'{SCRAM} required username="a" password="{SECRET}";'},
            "goes with sasl.mechanism=SCRAM-SHA-256 or SCRAM-SHA-512, not ''",
        ),
        (
            {
                "sasl.jaas.config": f'{PLAIN} required username="a" password="{SECRET}";',
                "sasl.mechanism": "SCRAM-SHA-512",
            },
            "goes with sasl.mechanism=PLAIN, not 'SCRAM-SHA-512'",
        ),
        (
            {
                "sasl.jaas.config": f'{SCRAM} required username="a" password="{SECRET}" tokenauth="true";',
                "sasl.mechanism": "SCRAM-SHA-512",
            },
            "delegation tokens",
        ),
        (
            {"sasl.jaas.config": f'com.sun.security.auth.module.Krb5LoginModule required keyTab="{SECRET}";'},
            "use sasl.kerberos.principal, sasl.kerberos.keytab",
        ),
        (
            {
                "sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
                f'clientSecret="{SECRET}";'
            },
            "sasl.oauthbearer.method=oidc",
        ),
        ({"sasl.jaas.config": f'own.Login required a="{SECRET}";'}, "knows no own.Login"),
        ({"ssl.truststore.location": "t.jks", "ssl.truststore.password": SECRET}, "keytool -list -rfc -keystore t.jks"),
        ({"ssl.truststore.location": "t.p12", "ssl.truststore.type": "PKCS12"}, "ssl.ca.location"),
        ({"ssl.keystore.location": "k.jks", "ssl.keystore.password": SECRET}, "-deststoretype PKCS12"),
        ({"ssl.keystore.location": "k", "ssl.keystore.type": "JKS"}, "JKS store, which librdkafka cannot read"),
        ({"ssl.keystore.location": "k", "ssl.keystore.type": "BCFKS"}, "BCFKS store, which librdkafka cannot read"),
        (
            {"ssl.truststore.location": "a", "ssl.truststore.type": "PEM", "ssl.ca.location": "b"},
            "ssl.truststore.location and ssl.ca.location say different things",
        ),
        ({"ssl.enabled.protocols": "TLSv1.3"}, "ssl.enabled.protocols is an option of the Java client"),
        ({"ssl.protocol": "TLSv1.1"}, "ssl.protocol is an option of the Java client"),
        ({"ssl.cipher.suites": "TLS_AES_256_GCM_SHA384"}, "OpenSSL's names"),
        (
            {"value.serializer": "io.confluent.kafka.serializers.KafkaAvroSerializer"},
            "value.serializer is an option of the Java client: .* the bytes that KafkaAvroSerializer makes",
        ),
        ({"key.deserializer": "x"}, "leave it out"),
        ({"partitioner.class": "org.apache.kafka.clients.producer.RoundRobin"}, 'use partitioner: "uniform"'),
        ({"interceptor.classes": "x"}, "there is no counterpart; leave it out"),
        ({"metric.reporters": "x"}, r"Producer\.stats\(\)"),
        ({"metrics.recording.level": "DEBUG"}, r"Producer\.stats\(\)"),
        ({"security.providers": "x"}, "ssl.providers"),
        ({"sasl.login.callback.handler.class": "x"}, "oauth_cb"),
        ({"sasl.client.callback.handler.class": "x"}, "sasl.username"),
        ({"compression.zstd.level": "9"}, "use compression.level"),
        ({"send.buffer.bytes": "1"}, "use socket.send.buffer.bytes"),
    ],
)
def test_what_only_java_can_do_is_refused_in_one_line(config, message) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        translate(config)
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) < 300
    assert SECRET not in said


def test_certificates() -> None:
    trust = {"ssl.truststore.location": "ca.pem", "ssl.truststore.type": "pem"}
    assert translate(trust) == {"ssl.ca.location": "ca.pem"}
    assert translate({"ssl.keystore.location": "me.pem", "ssl.keystore.type": "PEM", "ssl.key.password": "word"}) == {
        "ssl.certificate.location": "me.pem",
        "ssl.key.location": "me.pem",
        "ssl.key.password": "word",
    }
    store = {"ssl.keystore.location": "me.p12", "ssl.keystore.password": "word"}
    for kind in ({}, {"ssl.keystore.type": "PKCS12"}, {"ssl.keystore.type": "JKS"}):  # Java opens either with "JKS"
        assert translate({**store, **kind}) == store
    for form in (CERTIFICATE, CERTIFICATE.replace("\n", " "), CERTIFICATE.replace("\n", "\\\n"), CERTIFICATE * 2):
        settings = translate(
            {
                "ssl.truststore.type": "PEM",
                "ssl.truststore.certificates": form,
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": form,
                "ssl.keystore.key": form.replace("CERTIFICATE", "ENCRYPTED PRIVATE KEY"),
            }
        )
        count = form.count("BEGIN")
        assert settings == {
            "ssl.ca.pem": CERTIFICATE * count,
            "ssl.certificate.pem": CERTIFICATE * count,
            "ssl.key.pem": KEY * count,
        }
    assert translate({"ssl.ca.pem": "as it is"}) == {"ssl.ca.pem": "as it is"}
    assert translate({"ssl.truststore.certificates": "no PEM"}) == {"ssl.ca.pem": "no PEM"}


def test_names_that_mean_the_same_pass() -> None:
    """A producer takes them, which is to say that librdkafka or fastprod knows them all."""
    config = {
        "acks": "all",
        "batch.size": "65536",
        "bootstrap.servers": "x:1",
        "buffer.memory": "33554432",
        "client.dns.lookup": "use_all_dns_ips",
        "client.id": "me",
        "compression.type": "zstd",
        "connections.max.idle.ms": "540000",
        "delivery.timeout.ms": "120000",
        "enable.idempotence": "true",
        "enable.metrics.push": "false",
        "key.serializer": "org.apache.kafka.common.serialization.ByteArraySerializer",
        "linger.ms": "5",
        "max.block.ms": "60000",
        "max.in.flight.requests.per.connection": "5",
        "max.request.size": "1048576",
        "metadata.max.age.ms": "300000",
        "metadata.recovery.strategy": "rebootstrap",
        "partitioner.adaptive.partitioning.enable": "true",
        "partitioner.availability.timeout.ms": "0",
        "partitioner.ignore.keys": "false",
        "reconnect.backoff.max.ms": "1000",
        "reconnect.backoff.ms": "50",
        "request.timeout.ms": "30000",
        "retries": "2147483647",
        "retry.backoff.max.ms": "1000",
        "retry.backoff.ms": "100",
        "security.protocol": "PLAINTEXT",
        "socket.connection.setup.timeout.ms": "10000",
        "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
        "ssl.endpoint.identification.algorithm": "",
        "ssl.protocol": "TLSv1.3",
        "transaction.timeout.ms": "60000",
        "value.serializer": "org.apache.kafka.common.serialization.StringSerializer",
    }
    Producer({**translate(config), "log_level": 0}).close()
    untouched = {name: value for name, value in config.items() if not name.startswith(("ssl.", "key.", "value."))}
    assert translate(untouched) == untouched


def java_config(cluster) -> dict[str, str]:
    """What a Java client would be given."""
    config = cluster.client_config("root", tls=True)
    quoted = config["sasl.password"].replace("\\", "\\\\").replace('"', '\\"')
    return {
        "bootstrap.servers": config["bootstrap.servers"],
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": f'{SCRAM} required username="root" password="{quoted}";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": Path(config["ssl.ca.location"]).read_text().replace("\n", " "),
        "key.serializer": "org.apache.kafka.common.serialization.StringSerializer",
    }


def test_a_job_with_javas_options(spark, guarded, topic) -> None:
    guarded.create_topic(topic, 2)
    fastprod.spark.register(spark)
    config = java_config(guarded)
    df = spark.range(100).selectExpr("cast(id AS string) AS value")
    assert write(df, topic, config).records == 100
    writer = df.write.format("fastprod").mode("append").option("topic", topic)
    writer.options(**{f"kafka.{name}": value for name, value in config.items()}).save()
    (report,) = spark.sparkContext.parallelize([b"v"] * 100, 1).mapPartitions(partition_writer(config, topic)).collect()
    assert report.records == 100
    assert len(guarded.records(topic)) == 300
    with pytest.raises(ValueError, match=r"partitioner.class is an option of the Java client: use partitioner"):
        write(df, topic, {**config, "partitioner.class": "x"})
    with pytest.raises(Exception, match="is an option of the Java client") as refused:
        writer.option("kafka.value.serializer", "own.AvroSerializer").save()
    first, *others = str(refused.value).splitlines()
    assert "ValueError: value.serializer is an option of the Java client" in first
    assert len(others) <= 1
