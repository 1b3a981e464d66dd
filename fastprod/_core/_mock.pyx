"""librdkafka's mock brokers as one object: real sockets on the loopback, served by a thread of this process.

The methods are the primitives that `fastprod.testing` builds on. Arguments and results are plain numbers,
strings and lists, so that the same calls also travel as JSON to a cluster in another process; outcomes are
librdkafka's error codes (0 = done). Callers check arguments, because librdkafka asserts on some wrong ones.
"""

import threading

from libc.stdint cimport INT64_MAX, int16_t, int32_t
from libc.stdlib cimport free, malloc

from fastprod._core._rdkafka cimport (
    CONF_OK,
    ERR_UNKNOWN_TOPIC_OR_PART,
    TYPE_PRODUCER,
    api as rdkafka,
    rd_kafka_conf_t,
    rd_kafka_mock_cluster_t,
    rd_kafka_mock_request_t,
    rd_kafka_resp_err_t,
    rd_kafka_t,
)

cdef extern from "<unistd.h>" nogil:
    int getpid()
    int usleep(unsigned int)

cdef extern from "<signal.h>" nogil:
    ctypedef struct sigset_t:
        pass
    int SIG_SETMASK
    int sigfillset(sigset_t*)
    int pthread_sigmask(int, const sigset_t*, sigset_t*)

cdef enum:
    PRODUCE = 0
    FETCH = 1
    # From the next versions on a NOT_LEADER answer also names the new leader, and librdkafka's brokers follow
    # a null pointer when there is none. Up to these, clients ask for metadata instead, and no process dies.
    LAST_SAFE_PRODUCE = 9
    LAST_SAFE_FETCH = 11


cdef void _settle() noexcept nogil:
    # The brokers' thread answers a command first and empties its wake-up pipe second. A command that comes in
    # between loses its wake-up and waits until the thread looks again: a full second if the brokers are idle.
    usleep(200)


cdef class Cluster:
    """Owns the brokers and a client that librdkafka wants for its bookkeeping and that never connects.

    The process that made the cluster is the only one that may use or end it: a forked child has the pointers
    but not the threads behind them, so there every call is refused and nothing is freed.
    """

    cdef rd_kafka_t* _client                  # owned; NULL once closed
    cdef rd_kafka_mock_cluster_t* _cluster    # owned; NULL once closed; must go before _client
    cdef int _pid                             # the process that owns both
    cdef object _lock                         # keeps close() out while another thread is inside librdkafka
    cdef readonly str bootstrap_servers

    def __cinit__(self):
        self._client = NULL
        self._cluster = NULL
        self._pid = getpid()
        self._lock = threading.Lock()

    def __init__(self, int brokers):
        cdef char reason[512]
        cdef sigset_t every, usual
        cdef rd_kafka_conf_t* conf
        if self._client != NULL:
            raise RuntimeError("a mock cluster starts only once")
        reason[0] = 0
        conf = rdkafka.conf_new()
        # Quiet, since a broker that goes down is what tests want, not news; and open to requests of any size.
        if (
            rdkafka.conf_set(conf, b"log_level", b"0", reason, sizeof(reason)) != CONF_OK
            or rdkafka.conf_set(
                conf, b"receive.message.max.bytes", b"2147483647", reason, sizeof(reason)) != CONF_OK
        ):
            rdkafka.conf_destroy(conf)
            raise RuntimeError(f"librdkafka refused the mock cluster's settings: {reason.decode()}")
        with nogil:
            self._client = rdkafka.new(TYPE_PRODUCER, conf, reason, sizeof(reason))
        if self._client == NULL:
            rdkafka.conf_destroy(conf)
            raise RuntimeError(f"librdkafka could not create the mock cluster's client: {reason.decode()}")
        with nogil:
            # The brokers' thread inherits this: librdkafka ends it, and later frees it twice, when a signal wakes it.
            sigfillset(&every)
            pthread_sigmask(SIG_SETMASK, &every, &usual)
            self._cluster = rdkafka.mock_cluster_new(self._client, brokers)
            pthread_sigmask(SIG_SETMASK, &usual, NULL)
        if self._cluster == NULL:
            raise RuntimeError(f"librdkafka could not start {brokers} mock brokers; are sockets left?")
        with nogil:
            rdkafka.mock_set_apiversion(self._cluster, PRODUCE, 0, LAST_SAFE_PRODUCE)
            _settle()
            rdkafka.mock_set_apiversion(self._cluster, FETCH, 0, LAST_SAFE_FETCH)
            _settle()
        self.bootstrap_servers = rdkafka.mock_cluster_bootstraps(self._cluster).decode()

    def __dealloc__(self):
        if self._pid == getpid():
            self._destroy()

    cdef void _destroy(self) noexcept:
        # Joins librdkafka's threads, hence without the GIL.
        cdef rd_kafka_mock_cluster_t* cluster = self._cluster
        cdef rd_kafka_t* client = self._client
        self._cluster = NULL
        self._client = NULL
        with nogil:
            if cluster != NULL:
                rdkafka.mock_cluster_destroy(cluster)
            if client != NULL:
                rdkafka.destroy(client)

    cdef object _guard(self):
        # The lock; in a child a vanished thread may hold its copy for ever, so the process is checked first.
        if self._pid != getpid():
            raise RuntimeError(
                f"this mock cluster belongs to process {self._pid}, not to its fork {getpid()}; "
                "pass bootstrap_servers to the child and control the cluster from the parent"
            )
        return self._lock

    cdef rd_kafka_mock_cluster_t* _open(self) except NULL:
        if self._cluster == NULL:
            raise RuntimeError("this mock cluster is closed; use it inside its with block, or before close()")
        return self._cluster

    def close(self) -> None:
        """End the brokers and every connection to them; a second call does nothing."""
        if self._pid != getpid():
            self._cluster = NULL
            self._client = NULL
            return
        with self._lock:
            self._destroy()

    def create_topic(self, str name, int partitions, int replication_factor) -> int:
        cdef bytes encoded = name.encode()
        cdef const char* topic = encoded
        cdef rd_kafka_resp_err_t err = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                err = rdkafka.mock_topic_create(cluster, topic, partitions, replication_factor)
                _settle()
        return err

    def has_partition(self, str name, int32_t partition) -> bool:
        # Deleting records up to a position beyond every end is refused after the partition was looked up: the
        # one question librdkafka answers about a topic without creating it.
        cdef bytes encoded = name.encode()
        cdef const char* topic = encoded
        cdef rd_kafka_resp_err_t err = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                err = rdkafka.mock_partition_delete_records(cluster, topic, partition, INT64_MAX)
                _settle()
        return err != ERR_UNKNOWN_TOPIC_OR_PART

    def set_leader(self, str name, int32_t partition, int32_t broker) -> int:
        cdef bytes encoded = name.encode()
        cdef const char* topic = encoded
        cdef rd_kafka_resp_err_t err = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                err = rdkafka.mock_partition_set_leader(cluster, topic, partition, broker)
                _settle()
        return err

    def set_rtt(self, int32_t broker, int milliseconds) -> int:
        cdef rd_kafka_resp_err_t err = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                err = rdkafka.mock_broker_set_rtt(cluster, broker, milliseconds)
                _settle()
        return err

    def set_up(self, int32_t broker, bint up) -> int:
        cdef rd_kafka_resp_err_t err = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                if up:
                    err = rdkafka.mock_broker_set_up(cluster, broker)
                else:
                    err = rdkafka.mock_broker_set_down(cluster, broker)
                _settle()
        return err

    def push_errors(self, int16_t api_key, list codes) -> int:
        cdef Py_ssize_t count = len(codes), i
        cdef rd_kafka_resp_err_t* errors
        errors = <rd_kafka_resp_err_t*>malloc((count + 1) * sizeof(rd_kafka_resp_err_t))
        if errors == NULL:
            raise MemoryError
        try:
            for i in range(count):
                errors[i] = codes[i]
            with self._guard():
                cluster = self._open()
                with nogil:
                    rdkafka.mock_push_request_errors_array(cluster, api_key, count, errors)
        finally:
            free(errors)
        return 0

    def push_broker_errors(self, int32_t broker, int16_t api_key, list codes, int rtt_ms) -> int:
        cdef rd_kafka_resp_err_t err = 0, code
        with self._guard():
            cluster = self._open()
            for code in codes:
                with nogil:
                    err = rdkafka.mock_broker_push_request_error_rtts(
                        cluster, broker, api_key, 1, <int>code, <int>rtt_ms)
                if err:
                    break
        return err

    def pending_broker_errors(self, int32_t broker, int16_t api_key) -> int:
        cdef size_t count = 0
        with self._guard():
            cluster = self._open()
            with nogil:
                rdkafka.mock_broker_error_stack_cnt(cluster, broker, api_key, &count)
        return count

    def clear_errors(self, int16_t api_key) -> int:
        with self._guard():
            cluster = self._open()
            with nogil:
                rdkafka.mock_clear_request_errors(cluster, api_key)
        return 0

    def topic_error(self, str name, int code) -> int:
        cdef bytes encoded = name.encode()
        cdef const char* topic = encoded
        with self._guard():
            cluster = self._open()
            with nogil:
                rdkafka.mock_topic_set_error(cluster, topic, code)
                _settle()
        return 0

    def track_requests(self, bint on) -> int:
        with self._guard():
            cluster = self._open()
            with nogil:
                if on:
                    rdkafka.mock_start_request_tracking(cluster)
                else:
                    rdkafka.mock_stop_request_tracking(cluster)
        return 0

    def requests(self) -> list[tuple[int, int, int]]:
        cdef size_t count = 0, i
        cdef rd_kafka_mock_request_t** found = NULL
        with self._guard():
            cluster = self._open()
            with nogil:
                found = rdkafka.mock_get_requests(cluster, &count)
        if found == NULL:
            return []
        try:
            return [
                (
                    rdkafka.mock_request_id(found[i]),
                    rdkafka.mock_request_api_key(found[i]),
                    rdkafka.mock_request_timestamp(found[i]),
                )
                for i in range(count)
            ]
        finally:
            rdkafka.mock_request_destroy_array(found, count)

    def clear_requests(self) -> int:
        with self._guard():
            cluster = self._open()
            with nogil:
                rdkafka.mock_clear_requests(cluster)
        return 0
