"""Records as callbacks see them."""

import confluent_kafka

cimport cython

from fastprod._core._headers cimport unpack_headers


@cython.final
@cython.freelist(256)
cdef class Message:
    """A delivered or failed record, as confluent_kafka.Message presents it."""

    @property
    def __class__(self):
        """Code that checks isinstance(msg, confluent_kafka.Message) keeps working."""
        return confluent_kafka.Message

    def error(self):
        """The KafkaError of a failed record, None for a delivered one."""
        return self._error

    def topic(self):
        return self._topic

    def partition(self):
        return None if self._partition < 0 else self._partition

    def offset(self):
        return None if self._offset < 0 else self._offset

    def key(self):
        return self._key

    def value(self):
        return self._value

    def deserialized_key(self):
        """As key(): nothing is deserialized here."""
        return self._key

    def deserialized_value(self):
        """As value(): nothing is deserialized here."""
        return self._value

    def timestamp(self):
        """(type, milliseconds), as in confluent_kafka: type 1 is create time, 2 log append time, 0 none."""
        return (self._timestamp_type, self._timestamp)

    def latency(self):
        """Seconds from produce() to the acknowledgement."""
        return None if self._latency_us < 0 else self._latency_us / 1e6

    def headers(self):
        """List of (name, value) or None."""
        if isinstance(self._headers, bytes):
            self._headers = unpack_headers(self._headers)
        return self._headers

    def leader_epoch(self):
        return None

    def delivery_count(self):
        return None

    def set_headers(self, headers):
        self._headers = headers

    def set_key(self, key):
        self._key = key

    def set_value(self, value):
        self._value = value

    def set_topic(self, topic):
        self._topic = topic

    def set_error(self, error):
        self._error = error

    def __len__(self):
        return 0 if self._value is None else len(self._value)

    def __repr__(self):
        return f"<Message topic={self._topic!r} partition={self.partition()} offset={self.offset()} error={self._error}>"
