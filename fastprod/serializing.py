"""`fastprod.SerializingProducer`: keys and values go through serializers first."""

from __future__ import annotations

from typing import Any

from confluent_kafka.error import KeySerializationError, ValueSerializationError
from confluent_kafka.serialization import MessageField, SerializationContext

from fastprod.producer import DeliveryCallback, Producer


class SerializingProducer(Producer):
    """Does the job of confluent_kafka.SerializingProducer, with the same configuration.

    `key.serializer` and `value.serializer` are callables `(object, SerializationContext) -> bytes`, for instance
    those of `confluent_kafka.schema_registry`.
    """

    def __init__(self, conf: dict[str, Any]) -> None:
        conf = dict(conf)
        self._key_serializer = conf.pop("key.serializer", None)
        self._value_serializer = conf.pop("value.serializer", None)
        super().__init__(conf)

    def produce(  # type: ignore[override]
        self,
        topic: str,
        key: Any = None,
        value: Any = None,
        partition: int = -1,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Serializes, then produces. Note the order: here `key` comes before `value`, as in confluent-kafka."""
        context = SerializationContext(topic, MessageField.KEY, headers)
        if self._key_serializer is not None:
            try:
                key = self._key_serializer(key, context)
            except Exception as error:
                raise KeySerializationError(error) from error
        context.field = MessageField.VALUE
        if self._value_serializer is not None:
            try:
                value = self._value_serializer(value, context)
            except Exception as error:
                raise ValueSerializationError(error) from error
        super().produce(topic, value, key, partition, on_delivery, None, timestamp, headers)
