# librdkafka's public C interface, as far as fastprod calls it.
#
# confluent-kafka's wheel carries a librdkafka without headers or link name, so the types below restate the
# public ABI and `api` holds one pointer per function, resolved when `_rdkafka` is imported. Callers write
# `rdkafka.produce_batch(...)` after `from fastprod._core._rdkafka cimport api as rdkafka`.

from libc.stdint cimport int16_t, int32_t, int64_t

cdef extern from * nogil:
    """
    typedef struct rd_kafka_s rd_kafka_t;
    typedef struct rd_kafka_conf_s rd_kafka_conf_t;
    typedef struct rd_kafka_topic_s rd_kafka_topic_t;
    typedef struct rd_kafka_topic_conf_s rd_kafka_topic_conf_t;
    typedef struct rd_kafka_queue_s rd_kafka_queue_t;
    typedef struct rd_kafka_event_s rd_kafka_event_t;
    typedef struct rd_kafka_error_s rd_kafka_error_t;
    typedef struct rd_kafka_headers_s rd_kafka_headers_t;
    typedef struct rd_kafka_mock_cluster_s rd_kafka_mock_cluster_t;
    typedef struct rd_kafka_mock_request_s rd_kafka_mock_request_t;
    """
    ctypedef struct rd_kafka_t:
        pass
    ctypedef struct rd_kafka_conf_t:
        pass
    ctypedef struct rd_kafka_topic_t:
        pass
    ctypedef struct rd_kafka_topic_conf_t:
        pass
    ctypedef struct rd_kafka_queue_t:
        pass
    ctypedef struct rd_kafka_event_t:
        pass
    ctypedef struct rd_kafka_error_t:
        pass
    ctypedef struct rd_kafka_headers_t:
        pass
    ctypedef struct rd_kafka_mock_cluster_t:
        pass
    ctypedef struct rd_kafka_mock_request_t:
        pass

ctypedef int rd_kafka_resp_err_t

ctypedef struct rd_kafka_message_t:
    rd_kafka_resp_err_t err   # outcome: per message after produce_batch, final in an acknowledgement
    rd_kafka_topic_t* rkt     # may be NULL in an acknowledgement
    int32_t partition
    void* payload             # NULL = null value; without a copy flag the very pointer we passed
    size_t len
    void* key                 # NULL = null key; always librdkafka's own copy in an acknowledgement
    size_t key_len
    int64_t offset            # assigned by the broker, -1001 when it told none (acks=0, some retries)
    void* _private            # ours: a token; confluent's delivery callback must never see it

cdef union rd_kafka_vu_value:
    const char* cstr
    rd_kafka_topic_t* rkt
    int i
    int32_t i32
    int64_t i64
    void* ptr
    rd_kafka_headers_t* headers
    char pad[64]

ctypedef struct rd_kafka_vu_t:
    int vtype
    rd_kafka_vu_value u

cdef struct rd_kafka_vu_mem:  # the (pointer, size) form of the union, for values and keys
    void* ptr
    size_t size

ctypedef struct rd_kafka_metadata_broker_t:
    int32_t id
    char* host
    int port

ctypedef struct rd_kafka_metadata_partition_t:
    int32_t id
    rd_kafka_resp_err_t err
    int32_t leader
    int replica_cnt
    int32_t* replicas
    int isr_cnt
    int32_t* isrs

ctypedef struct rd_kafka_metadata_topic_t:
    char* topic
    int partition_cnt
    rd_kafka_metadata_partition_t* partitions
    rd_kafka_resp_err_t err

ctypedef struct rd_kafka_metadata_t:
    int broker_cnt
    rd_kafka_metadata_broker_t* brokers
    int topic_cnt
    rd_kafka_metadata_topic_t* topics
    int32_t orig_broker_id
    char* orig_broker_name

cdef enum:
    PURGE_F_QUEUE = 0x1
    PURGE_F_INFLIGHT = 0x2
    PURGE_F_NON_BLOCKING = 0x4
    TYPE_PRODUCER = 0

    VTYPE_RKT = 2
    VTYPE_PARTITION = 3
    VTYPE_VALUE = 4
    VTYPE_KEY = 5
    VTYPE_OPAQUE = 6
    VTYPE_MSGFLAGS = 7
    VTYPE_TIMESTAMP = 8
    VTYPE_HEADERS = 10

    EVENT_DR = 0x1
    EVENT_LOG = 0x4
    EVENT_ERROR = 0x8
    EVENT_STATS = 0x40

    CONF_OK = 0

    # error codes that our own logic names; everything else passes through as a number
    ERR__DESTROY = -197
    ERR__TRANSPORT = -195
    ERR__RESOLVE = -193
    ERR__MSG_TIMED_OUT = -192
    ERR__UNKNOWN_PARTITION = -190
    ERR__UNKNOWN_TOPIC = -188
    ERR__ALL_BROKERS_DOWN = -187
    ERR__INVALID_ARG = -186
    ERR__TIMED_OUT = -185
    ERR__QUEUE_FULL = -184
    ERR__SSL = -181
    ERR__STATE = -172
    ERR__AUTHENTICATION = -169
    ERR__PURGE_QUEUE = -152
    ERR__FATAL = -150
    ERR__INCONSISTENT = -149
    ERR__GAPLESS_GUARANTEE = -148
    ERR__PURGE_INFLIGHT = -151
    ERR_UNKNOWN_TOPIC_OR_PART = 3
    ERR_MSG_SIZE_TOO_LARGE = 10
    ERR_TOPIC_EXCEPTION = 17
    ERR_TOPIC_AUTHORIZATION_FAILED = 29

# of keys: topic (not looked at), key, its size, number of partitions, two opaque pointers
ctypedef int32_t (*hash_f)(const void*, const void*, size_t, int32_t, void*, void*) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_new_f)(
    rd_kafka_t*, const rd_kafka_conf_t*, void*, char*, size_t) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_destroy_f)(rd_kafka_t*, void*) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_acknowledgement_f)(
    rd_kafka_t*, rd_kafka_message_t*, void*) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_broker_state_f)(
    rd_kafka_t*, int32_t, const char*, const char*, int, const char*, void*) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_request_sent_f)(
    rd_kafka_t*, int, const char*, int32_t, int16_t, int16_t, int32_t, size_t, void*) noexcept nogil
ctypedef rd_kafka_resp_err_t (*on_response_received_f)(
    rd_kafka_t*, int, const char*, int32_t, int16_t, int16_t, int32_t, size_t, int64_t, rd_kafka_resp_err_t, void*
) noexcept nogil
ctypedef void (*throttle_f)(rd_kafka_t*, const char*, int32_t, int, void*) noexcept nogil

cdef struct rdkafka_api:
    # client
    const char* (*version_str)() noexcept nogil
    const char* (*err2str)(rd_kafka_resp_err_t) noexcept nogil
    const char* (*name)(const rd_kafka_t*) noexcept nogil
    rd_kafka_conf_t* (*conf_new)() noexcept nogil
    int (*conf_set)(rd_kafka_conf_t*, const char*, const char*, char*, size_t) noexcept nogil
    void (*conf_destroy)(rd_kafka_conf_t*) noexcept nogil
    rd_kafka_t* (*new)(int, rd_kafka_conf_t*, char*, size_t) noexcept nogil
    void (*destroy)(rd_kafka_t*) noexcept nogil
    # topics and metadata
    rd_kafka_topic_t* (*topic_new)(rd_kafka_t*, const char*, rd_kafka_topic_conf_t*) noexcept nogil
    void (*topic_destroy)(rd_kafka_topic_t*) noexcept nogil
    rd_kafka_resp_err_t (*last_error)() noexcept nogil
    rd_kafka_resp_err_t (*metadata)(
        rd_kafka_t*, int, rd_kafka_topic_t*, const rd_kafka_metadata_t**, int) noexcept nogil
    void (*metadata_destroy)(const rd_kafka_metadata_t*) noexcept nogil
    # producing
    int (*produce_batch)(rd_kafka_topic_t*, int32_t, int, rd_kafka_message_t*, int) noexcept nogil
    rd_kafka_error_t* (*produceva)(rd_kafka_t*, const rd_kafka_vu_t*, size_t) noexcept nogil
    rd_kafka_resp_err_t (*purge)(rd_kafka_t*, int) noexcept nogil
    hash_f msg_partitioner_consistent
    hash_f msg_partitioner_murmur2
    hash_f msg_partitioner_fnv1a
    rd_kafka_resp_err_t (*error_code)(const rd_kafka_error_t*) noexcept nogil
    void (*error_destroy)(rd_kafka_error_t*) noexcept nogil
    rd_kafka_headers_t* (*headers_new)(size_t) noexcept nogil
    rd_kafka_resp_err_t (*header_add)(
        rd_kafka_headers_t*, const char*, Py_ssize_t, const void*, Py_ssize_t) noexcept nogil
    void (*headers_destroy)(rd_kafka_headers_t*) noexcept nogil
    int64_t (*message_timestamp)(const rd_kafka_message_t*, int*) noexcept nogil
    int32_t (*message_broker_id)(const rd_kafka_message_t*) noexcept nogil
    # events
    rd_kafka_queue_t* (*queue_get_main)(rd_kafka_t*) noexcept nogil
    rd_kafka_queue_t* (*queue_get_consumer)(rd_kafka_t*) noexcept nogil
    void (*queue_io_event_enable)(rd_kafka_queue_t*, int, const void*, size_t) noexcept nogil
    void (*queue_destroy)(rd_kafka_queue_t*) noexcept nogil
    rd_kafka_event_t* (*queue_poll)(rd_kafka_queue_t*, int) noexcept nogil
    void (*queue_cb_event_enable)(
        rd_kafka_queue_t*, void (*)(rd_kafka_t*, void*) noexcept nogil, void*) noexcept nogil
    int (*event_type)(const rd_kafka_event_t*) noexcept nogil
    void (*event_destroy)(rd_kafka_event_t*) noexcept nogil
    const rd_kafka_message_t* (*event_message_next)(rd_kafka_event_t*) noexcept nogil
    size_t (*event_message_count)(rd_kafka_event_t*) noexcept nogil
    rd_kafka_resp_err_t (*event_error)(rd_kafka_event_t*) noexcept nogil
    const char* (*event_error_string)(rd_kafka_event_t*) noexcept nogil
    int (*event_error_is_fatal)(rd_kafka_event_t*) noexcept nogil
    const char* (*event_stats)(rd_kafka_event_t*) noexcept nogil
    int (*event_log)(rd_kafka_event_t*, const char**, const char**, int*) noexcept nogil
    # interceptors
    rd_kafka_resp_err_t (*conf_interceptor_add_on_new)(
        rd_kafka_conf_t*, const char*, on_new_f, void*) noexcept nogil
    rd_kafka_resp_err_t (*interceptor_add_on_destroy)(
        rd_kafka_t*, const char*, on_destroy_f, void*) noexcept nogil
    rd_kafka_resp_err_t (*interceptor_add_on_acknowledgement)(
        rd_kafka_t*, const char*, on_acknowledgement_f, void*) noexcept nogil
    rd_kafka_resp_err_t (*interceptor_add_on_broker_state_change)(
        rd_kafka_t*, const char*, on_broker_state_f, void*) noexcept nogil
    rd_kafka_resp_err_t (*interceptor_add_on_request_sent)(
        rd_kafka_t*, const char*, on_request_sent_f, void*) noexcept nogil
    rd_kafka_resp_err_t (*interceptor_add_on_response_received)(
        rd_kafka_t*, const char*, on_response_received_f, void*) noexcept nogil
    void (*conf_set_throttle_cb)(rd_kafka_conf_t*, throttle_f) noexcept nogil
    # mock cluster
    rd_kafka_mock_cluster_t* (*mock_cluster_new)(rd_kafka_t*, int) noexcept nogil
    void (*mock_cluster_destroy)(rd_kafka_mock_cluster_t*) noexcept nogil
    const char* (*mock_cluster_bootstraps)(const rd_kafka_mock_cluster_t*) noexcept nogil
    void (*mock_clear_request_errors)(rd_kafka_mock_cluster_t*, int16_t) noexcept nogil
    void (*mock_push_request_errors_array)(
        rd_kafka_mock_cluster_t*, int16_t, size_t, const rd_kafka_resp_err_t*) noexcept nogil
    rd_kafka_resp_err_t (*mock_broker_push_request_error_rtts)(
        rd_kafka_mock_cluster_t*, int32_t, int16_t, size_t, ...) noexcept nogil
    void (*mock_topic_set_error)(rd_kafka_mock_cluster_t*, const char*, rd_kafka_resp_err_t) noexcept nogil
    rd_kafka_resp_err_t (*mock_topic_create)(rd_kafka_mock_cluster_t*, const char*, int, int) noexcept nogil
    rd_kafka_resp_err_t (*mock_partition_set_leader)(
        rd_kafka_mock_cluster_t*, const char*, int32_t, int32_t) noexcept nogil
    rd_kafka_resp_err_t (*mock_broker_set_down)(rd_kafka_mock_cluster_t*, int32_t) noexcept nogil
    rd_kafka_resp_err_t (*mock_broker_set_up)(rd_kafka_mock_cluster_t*, int32_t) noexcept nogil
    rd_kafka_resp_err_t (*mock_broker_set_rtt)(rd_kafka_mock_cluster_t*, int32_t, int) noexcept nogil
    rd_kafka_resp_err_t (*mock_set_apiversion)(
        rd_kafka_mock_cluster_t*, int16_t, int16_t, int16_t) noexcept nogil
    void (*mock_start_request_tracking)(rd_kafka_mock_cluster_t*) noexcept nogil
    void (*mock_stop_request_tracking)(rd_kafka_mock_cluster_t*) noexcept nogil
    rd_kafka_mock_request_t** (*mock_get_requests)(rd_kafka_mock_cluster_t*, size_t*) noexcept nogil
    void (*mock_request_destroy_array)(rd_kafka_mock_request_t**, size_t) noexcept nogil
    void (*mock_clear_requests)(rd_kafka_mock_cluster_t*) noexcept nogil
    int32_t (*mock_request_id)(rd_kafka_mock_request_t*) noexcept nogil
    int16_t (*mock_request_api_key)(rd_kafka_mock_request_t*) noexcept nogil
    int64_t (*mock_request_timestamp)(rd_kafka_mock_request_t*) noexcept nogil
    rd_kafka_resp_err_t (*mock_broker_error_stack_cnt)(
        rd_kafka_mock_cluster_t*, int32_t, int16_t, size_t*) noexcept nogil
    rd_kafka_resp_err_t (*mock_partition_delete_records)(
        rd_kafka_mock_cluster_t*, const char*, int32_t, int64_t) noexcept nogil

cdef rdkafka_api* api
