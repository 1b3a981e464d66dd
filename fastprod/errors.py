"""Exceptions that fastprod raises, each also a kind that existing code already catches."""

from confluent_kafka import KafkaException


class BufferFullError(BufferError):
    """No room in `buffer.memory` within `max.block.ms`. Nothing was accepted: poll or wait, then produce again."""


class RecordError(KafkaException, ValueError):
    """One record cannot be accepted; `args[0]` is the KafkaError."""


class ConfigError(KafkaException, ValueError):
    """A configuration value is not usable; `args[0]` is the KafkaError."""


class AuthenticationError(KafkaException):
    """The brokers refuse this client, or it refuses them: wrong credentials, or TLS that does not fit.

    `args[0]` is the KafkaError with the reason. Raised by poll(), flush(), close() and Receipt.wait() as long as
    nothing was ever acknowledged and there is no `error_cb`; records are kept, so a call can be repeated after
    set_sasl_credentials().
    """


class RebalanceError(KafkaException):
    """A producer group has taken the running transaction away: nothing of it will ever be seen.

    `args[0]` is the KafkaError with the reason. By the time it is raised, `ProducerGroup.assignment` is what this
    member has to do now, and from where: read each of these source partitions again from its position.
    """


class ForkError(RuntimeError):
    """A producer made before fork() is used in the child process."""
