"""What all subcommands share: their way to fail, and the options of clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click
import confluent_kafka
from confluent_kafka import KafkaException

from fastprod.cli import _load

SECRET = re.compile(r"^(sasl|ssl)\.|password|passphrase|secret|token|credential|\.pem$", re.IGNORECASE)


class Failure(click.ClickException):
    """Ends the command with one line on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code  # type: ignore[misc]  # click says: of the class


def pairs(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """-X key=value, repeated."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter("write it as key=value")  # without an echo: it may hold a password
        found[name.strip()] = value.strip()
    return found


def file(ctx: click.Context, param: click.Parameter, path: str | None) -> dict[str, str]:
    """-F FILE with key=value lines."""
    found: dict[str, str] = {}
    if path is None:
        return found
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                name, sign, value = line.strip().partition("=")
                if not line.strip() or line.lstrip().startswith("#"):
                    continue
                if not sign or not name.strip():
                    raise click.BadParameter(f"line {number} of {path} is not key=value")
                found[name.strip()] = value.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return found


def configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked by making a client, which connects to nobody before it is asked to."""
    try:
        conf = _load.full_configuration(given)
        confluent_kafka.Producer({**_load.for_librdkafka(conf), "bootstrap.servers": ""}).close()
    except KafkaException as problem:
        raise Failure(problem.args[0].str(), 2) from None
    except (TypeError, ValueError) as problem:
        raise Failure(f"unusable option: {problem}", 2) from None
    return conf


def without_secrets(conf: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that may be shown."""
    return {name: "***" if SECRET.search(name) else value for name, value in sorted(conf.items())}
