"""Options as the Java client names them, in librdkafka's words: for jobs that come from Spark's own Kafka sink.

    sasl.jaas.config                  PLAIN and SCRAM: sasl.username, sasl.password
    ssl.truststore.*, type PEM        ssl.ca.location, ssl.ca.pem
    ssl.keystore.*,   type PEM        ssl.certificate.location and ssl.key.location, or the same with .pem
    ssl.keystore.*,   type PKCS12     the same without the type
    key.serializer, value.serializer  left out where they pass on bytes and text, as we do

Most other names are the same in both clients and pass through. What only Java can do is refused in one line that says
what to use instead. Nothing here puts a value that may be secret into an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["translate"]

# A quoted string, a sign or a word, as java.io.StreamTokenizer cuts them; blanks and comments have no group.
TOKEN = re.compile(
    r"""\s+|//[^\n]*|/\*.*?\*/|"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'|([=;])|([^\s=;"']+)""", re.DOTALL
)
ESCAPE = re.compile(r"\\([0-3]?[0-7]{1,2}|.)", re.DOTALL)
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
FLAGS = ("required", "requisite", "sufficient", "optional")
PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----([A-Za-z0-9+/=\s\\]+)-----END \1-----")
PLAIN_SERIALIZERS = ("ByteArraySerializer", "StringSerializer")

NONE = "there is no counterpart; leave it out"
FIGURES = "leave it out; Producer.stats() and the report of an export have the figures"
LOGIN = "use sasl.username and sasl.password; for OAUTHBEARER, sasl.oauthbearer.method=oidc or oauth_cb"
BYTES_ONLY = "a producer reads nothing; leave it out"
INSTEAD = {  # names that librdkafka does not know, and what to do
    "auto.include.jmx.reporter": FIGURES,
    "compression.gzip.level": "use compression.level",
    "compression.lz4.level": "use compression.level",
    "compression.zstd.level": "use compression.level",
    "config.providers": "put the values themselves into the options",
    "interceptor.classes": NONE,
    "key.deserializer": BYTES_ONLY,
    "metadata.max.idle.ms": NONE,
    "metric.reporters": FIGURES,
    "partitioner.class": (
        'use partitioner: "uniform" (the default, as in Java), "sticky" or "round_robin", with partitioner.ignore.keys '
        "if keys are not to count, or an object with a method partition()"
    ),
    "receive.buffer.bytes": "use socket.receive.buffer.bytes",
    "sasl.client.callback.handler.class": LOGIN,
    "security.providers": "librdkafka has OpenSSL and its ssl.providers; leave it out",
    "send.buffer.bytes": "use socket.send.buffer.bytes",
    "socket.connection.setup.timeout.max.ms": "use socket.connection.setup.timeout.ms",
    "ssl.engine.factory.class": NONE,
    "ssl.keymanager.algorithm": NONE,
    "ssl.provider": "librdkafka has OpenSSL and its ssl.providers; leave it out",
    "ssl.secure.random.implementation": NONE,
    "ssl.trustmanager.algorithm": NONE,
    "transaction.two.phase.commit.enable": NONE,
    "value.deserializer": BYTES_ONLY,
}
FAMILIES = {  # the same for all names with a beginning
    "metrics.": FIGURES,
    "sasl.login.": LOGIN,
    "sasl.kerberos.ticket.": "use sasl.kerberos.min.time.before.relogin",
    "sasl.oauthbearer.expected.": NONE,
    "sasl.oauthbearer.jwks.": NONE,
}
MODULES = {  # login modules that librdkafka has no password for
    "Krb5LoginModule": "use sasl.kerberos.principal, sasl.kerberos.keytab and sasl.kerberos.service.name",
    "OAuthBearerLoginModule": "use sasl.oauthbearer.method=oidc with sasl.oauthbearer.client.id and so on, or oauth_cb",
    "IAMLoginModule": "use sasl.mechanism=OAUTHBEARER with an oauth_cb that signs tokens for AWS",
}


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same options in librdkafka's words. Raises ValueError for what only the Java client can do."""
    settings = dict(config)
    _translate_login(settings)
    _translate_trust(settings)
    _translate_keys(settings)
    _translate_tls(settings)
    for name in ("key.serializer", "value.serializer"):
        serializer = str(settings.pop(name, PLAIN_SERIALIZERS[0])).rpartition(".")[2]
        if serializer not in PLAIN_SERIALIZERS:
            raise _refused(
                name, f"bytes and text go out as they are; let the rows have the bytes that {serializer} makes"
            )
    for name in settings:
        advice = INSTEAD.get(name) or next((word for start, word in FAMILIES.items() if name.startswith(start)), None)
        if advice is not None:
            raise _refused(name, advice)
    return settings


def _refused(name: str, advice: str) -> ValueError:
    return ValueError(f"{name} is an option of the Java client: {advice}")


def _put(settings: dict[str, Any], name: str, value: Any, source: str) -> None:
    if settings.get(name, value) != value:
        raise ValueError(f"{source} and {name} say different things: give one of them")
    settings[name] = value


# ---- SASL


def _translate_login(settings: dict[str, Any]) -> None:
    name = "sasl.jaas.config"
    if name not in settings:
        return
    module, options = _login(str(settings.pop(name)))
    kind = module.rpartition(".")[2]  # vendors ship Kafka's classes under names of their own
    if kind not in ("PlainLoginModule", "ScramLoginModule"):
        raise _refused(name, MODULES.get(kind, f"librdkafka knows no {module}; use sasl.username and sasl.password"))
    chosen = "sasl.mechanisms" if "sasl.mechanisms" in settings else "sasl.mechanism"
    scram = kind == "ScramLoginModule"
    mechanism = str(settings.setdefault(chosen, "" if scram else "PLAIN")).upper()
    if not (mechanism.startswith("SCRAM-") if scram else mechanism == "PLAIN"):
        wanted = "SCRAM-SHA-256 or SCRAM-SHA-512" if scram else "PLAIN"
        raise ValueError(f"{name} names the {kind}, which goes with sasl.mechanism={wanted}, not {mechanism!r}")
    if str(options.get("tokenauth", "")).lower() == "true":
        raise ValueError(f"{name} has tokenauth: librdkafka cannot log in with delegation tokens")
    for option in ("username", "password"):
        if option not in options:
            raise ValueError(f'{name} has no {option}="..."')
        _put(settings, f"sasl.{option}", options[option], name)


def _login(text: str) -> tuple[str, dict[str, str]]:
    """The login module and its options, of the text that Java's JAAS takes."""
    told = ValueError(
        'sasl.jaas.config cannot be read: it is a login module, "required", pairs such as username="..." with '
        'backslashes before quotes and backslashes, and a ";" at the end'
    )
    tokens = list(_tokens(text, told))
    if len(tokens) < 3 or tokens[-1] != (";", True) or any(sign for _, sign in tokens[:2]):
        raise told
    if tokens[1][0].lower() not in FLAGS:
        raise told
    options: dict[str, str] = {}
    rest = tokens[2:-1]
    for place in range(0, len(rest), 3):
        match rest[place : place + 3]:
            case [(name, False), ("=", True), (value, False)]:
                options[name] = value
            case [(";", True), *_]:
                raise ValueError("sasl.jaas.config has more than one login module; leave the one that counts")
            case _:
                raise told
    return tokens[0][0], options


def _tokens(text: str, told: ValueError) -> Iterator[tuple[str, bool]]:
    """Words, and whether each is a sign."""
    place = 0
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:  # a quote that does not end
            raise told
        place = found.end()
        quoted = found[1] if found[1] is not None else found[2]
        if quoted is not None:
            yield ESCAPE.sub(_unescaped, quoted), False
        elif found[3] is not None:
            yield found[3], True
        elif found[4] is not None:
            yield found[4], False


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code, 8)) if code[0] in "01234567" else ESCAPED.get(code, code)


# ---- TLS


def _translate_trust(settings: dict[str, Any]) -> None:
    """Certificates to trust."""
    place, text = settings.pop("ssl.truststore.location", None), settings.pop("ssl.truststore.certificates", None)
    kind = str(settings.pop("ssl.truststore.type", "JKS")).upper()
    settings.pop("ssl.truststore.password", None)
    if text is not None:
        _put(settings, "ssl.ca.pem", _lines(str(text)), "ssl.truststore.certificates")
    if place is not None and kind == "PEM":
        _put(settings, "ssl.ca.location", place, "ssl.truststore.location")
    elif place is not None:
        raise ValueError(
            f"ssl.truststore.location is a {kind} store, which librdkafka cannot read: use ssl.ca.location=ca.pem, a "
            f"file that keytool -list -rfc -keystore {place} > ca.pem makes"
        )


def _translate_keys(settings: dict[str, Any]) -> None:
    """A key and certificates of our own."""
    chain, key = settings.pop("ssl.keystore.certificate.chain", None), settings.pop("ssl.keystore.key", None)
    kind = str(settings.pop("ssl.keystore.type", "")).upper()
    if chain is not None:
        _put(settings, "ssl.certificate.pem", _lines(str(chain)), "ssl.keystore.certificate.chain")
    if key is not None:
        _put(settings, "ssl.key.pem", _lines(str(key)), "ssl.keystore.key")
    place = settings.get("ssl.keystore.location")
    if place is None:
        return
    if kind == "PEM":  # one file with both
        del settings["ssl.keystore.location"]
        settings.pop("ssl.keystore.password", None)
        for name in ("ssl.certificate.location", "ssl.key.location"):
            _put(settings, name, place, "ssl.keystore.location")
        return
    named = str(place).lower()
    if kind not in ("", "PKCS12", "JKS") or (
        named.endswith(".jks") or (kind == "JKS" and not named.endswith((".p12", ".pfx")))
    ):
        raise ValueError(
            f"ssl.keystore.location is a {kind or 'JKS'} store, which librdkafka cannot read: convert it with keytool "
            f"-importkeystore -srckeystore {place} -destkeystore client.p12 -deststoretype PKCS12"
        )


def _lines(text: str) -> str:
    """PEM as OpenSSL wants it; Java also takes it in one line, which suits option files."""
    blocks = [(found[1], re.sub(r"[\s\\]+", "", found[2])) for found in PEM.finditer(text)]
    if not blocks:
        return text  # such as a key with headers of its own
    return "".join(
        f"-----BEGIN {kind}-----\n"
        + "".join(f"{body[at : at + 64]}\n" for at in range(0, len(body), 64))
        + f"-----END {kind}-----\n"
        for kind, body in blocks
    )


def _translate_tls(settings: dict[str, Any]) -> None:
    name = "ssl.endpoint.identification.algorithm"
    if settings.get(name) == "":  # how Java is told not to look at names
        settings[name] = "none"
    versions = {word.strip() for word in str(settings.pop("ssl.enabled.protocols", "")).split(",")} - {""}
    if versions and versions != {"TLSv1.2", "TLSv1.3"}:
        raise _refused("ssl.enabled.protocols", "librdkafka agrees on TLS 1.2 or 1.3 with the brokers; leave it out")
    if str(settings.pop("ssl.protocol", "TLS")) not in ("TLS", "TLSv1.2", "TLSv1.3"):
        raise _refused("ssl.protocol", "librdkafka agrees on TLS 1.2 or 1.3 with the brokers; leave it out")
    if str(settings.get("ssl.cipher.suites", "")).startswith("TLS_"):
        raise _refused(
            "ssl.cipher.suites", "librdkafka takes OpenSSL's names, such as ECDHE-RSA-AES256-GCM-SHA384, with colons"
        )
