class Cluster:
    """librdkafka's mock brokers behind `fastprod.testing`; methods return error codes, 0 when done."""

    @property
    def bootstrap_servers(self) -> str: ...
    def __init__(self, brokers: int) -> None: ...
    def close(self) -> None:
        """End the brokers and every connection to them; a second call does nothing."""
    def create_topic(self, name: str, partitions: int, replication_factor: int) -> int: ...
    def has_partition(self, name: str, partition: int) -> bool: ...
    def set_leader(self, name: str, partition: int, broker: int) -> int:
        """Broker -1 leaves the partition without a leader; an unknown topic is created."""
    def set_rtt(self, broker: int, milliseconds: int) -> int:
        """Broker -1 stands for all of them."""
    def set_up(self, broker: int, up: bool) -> int:
        """Broker -1 stands for all of them."""
    def push_errors(self, api_key: int, codes: list[int]) -> int: ...
    def push_broker_errors(self, broker: int, api_key: int, codes: list[int], rtt_ms: int) -> int: ...
    def pending_broker_errors(self, broker: int, api_key: int) -> int: ...
    def clear_errors(self, api_key: int) -> int:
        """Clears what push_errors() left; there is no way to clear what push_broker_errors() left."""
    def topic_error(self, name: str, code: int) -> int:
        """An unknown topic is created."""
    def track_requests(self, on: bool) -> int:
        """Starts from an empty list; stopping forgets the list."""
    def requests(self) -> list[tuple[int, int, int]]:
        """(broker, API key, microseconds on librdkafka's clock) of each request since tracking began."""
    def clear_requests(self) -> int: ...
