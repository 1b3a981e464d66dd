"""Resolves librdkafka's functions from the library that confluent-kafka has already loaded.

One librdkafka serves the whole process: opening confluent-kafka's extension module with RTLD_NOLOAD gives a
handle whose dependencies `dlsym` searches too, whether librdkafka was bundled under another name (wheels) or
linked dynamically (conda, distributions). Nothing is loaded twice and no header of theirs is needed.
"""

from confluent_kafka import cimpl


cdef extern from "<dlfcn.h>" nogil:
    void* dlopen(const char*, int)
    void* dlsym(void*, const char*)
    char* dlerror()
    int RTLD_NOW
    int RTLD_NOLOAD

cdef rdkafka_api _table
api = &_table


cdef void* _resolve(void* library, bytes name) except NULL:
    cdef void* symbol = dlsym(library, b"rd_kafka_" + name)
    if symbol == NULL:
        raise ImportError(
            f"confluent-kafka {cimpl.version()} carries librdkafka {cimpl.libversion()[0]}, which has no function "
            f"rd_kafka_{name.decode()}; fastprod needs confluent-kafka 2.15 or newer"
        )
    return symbol


cdef int _load() except -1:
    cdef void* library = dlopen(cimpl.__file__.encode(), RTLD_NOW | RTLD_NOLOAD)
    if library == NULL:
        raise ImportError(f"cannot reach librdkafka through {cimpl.__file__}: {dlerror().decode()}")
    (<void**>&_table.version_str)[0] = _resolve(library, b"version_str")
    (<void**>&_table.err2str)[0] = _resolve(library, b"err2str")
    (<void**>&_table.name)[0] = _resolve(library, b"name")
    (<void**>&_table.conf_new)[0] = _resolve(library, b"conf_new")
    (<void**>&_table.conf_set)[0] = _resolve(library, b"conf_set")
    (<void**>&_table.conf_destroy)[0] = _resolve(library, b"conf_destroy")
    (<void**>&_table.new)[0] = _resolve(library, b"new")
    (<void**>&_table.destroy)[0] = _resolve(library, b"destroy")
    (<void**>&_table.topic_new)[0] = _resolve(library, b"topic_new")
    (<void**>&_table.topic_destroy)[0] = _resolve(library, b"topic_destroy")
    (<void**>&_table.last_error)[0] = _resolve(library, b"last_error")
    (<void**>&_table.metadata)[0] = _resolve(library, b"metadata")
    (<void**>&_table.metadata_destroy)[0] = _resolve(library, b"metadata_destroy")
    (<void**>&_table.produce_batch)[0] = _resolve(library, b"produce_batch")
    (<void**>&_table.produceva)[0] = _resolve(library, b"produceva")
    (<void**>&_table.purge)[0] = _resolve(library, b"purge")
    (<void**>&_table.msg_partitioner_consistent)[0] = _resolve(library, b"msg_partitioner_consistent")
    (<void**>&_table.msg_partitioner_murmur2)[0] = _resolve(library, b"msg_partitioner_murmur2")
    (<void**>&_table.msg_partitioner_fnv1a)[0] = _resolve(library, b"msg_partitioner_fnv1a")
    (<void**>&_table.error_code)[0] = _resolve(library, b"error_code")
    (<void**>&_table.error_destroy)[0] = _resolve(library, b"error_destroy")
    (<void**>&_table.headers_new)[0] = _resolve(library, b"headers_new")
    (<void**>&_table.header_add)[0] = _resolve(library, b"header_add")
    (<void**>&_table.headers_destroy)[0] = _resolve(library, b"headers_destroy")
    (<void**>&_table.message_timestamp)[0] = _resolve(library, b"message_timestamp")
    (<void**>&_table.message_broker_id)[0] = _resolve(library, b"message_broker_id")
    (<void**>&_table.queue_get_main)[0] = _resolve(library, b"queue_get_main")
    (<void**>&_table.queue_get_consumer)[0] = _resolve(library, b"queue_get_consumer")
    (<void**>&_table.queue_io_event_enable)[0] = _resolve(library, b"queue_io_event_enable")
    (<void**>&_table.queue_destroy)[0] = _resolve(library, b"queue_destroy")
    (<void**>&_table.queue_poll)[0] = _resolve(library, b"queue_poll")
    (<void**>&_table.queue_cb_event_enable)[0] = _resolve(library, b"queue_cb_event_enable")
    (<void**>&_table.event_type)[0] = _resolve(library, b"event_type")
    (<void**>&_table.event_destroy)[0] = _resolve(library, b"event_destroy")
    (<void**>&_table.event_message_next)[0] = _resolve(library, b"event_message_next")
    (<void**>&_table.event_message_count)[0] = _resolve(library, b"event_message_count")
    (<void**>&_table.event_error)[0] = _resolve(library, b"event_error")
    (<void**>&_table.event_error_string)[0] = _resolve(library, b"event_error_string")
    (<void**>&_table.event_error_is_fatal)[0] = _resolve(library, b"event_error_is_fatal")
    (<void**>&_table.event_stats)[0] = _resolve(library, b"event_stats")
    (<void**>&_table.event_log)[0] = _resolve(library, b"event_log")
    (<void**>&_table.conf_interceptor_add_on_new)[0] = _resolve(library, b"conf_interceptor_add_on_new")
    (<void**>&_table.interceptor_add_on_destroy)[0] = _resolve(library, b"interceptor_add_on_destroy")
    (<void**>&_table.interceptor_add_on_acknowledgement)[0] = _resolve(library, b"interceptor_add_on_acknowledgement")
    (<void**>&_table.interceptor_add_on_broker_state_change)[0] = _resolve(
        library, b"interceptor_add_on_broker_state_change")
    (<void**>&_table.interceptor_add_on_request_sent)[0] = _resolve(library, b"interceptor_add_on_request_sent")
    (<void**>&_table.interceptor_add_on_response_received)[0] = _resolve(
        library, b"interceptor_add_on_response_received")
    (<void**>&_table.conf_set_throttle_cb)[0] = _resolve(library, b"conf_set_throttle_cb")
    (<void**>&_table.mock_cluster_new)[0] = _resolve(library, b"mock_cluster_new")
    (<void**>&_table.mock_cluster_destroy)[0] = _resolve(library, b"mock_cluster_destroy")
    (<void**>&_table.mock_cluster_bootstraps)[0] = _resolve(library, b"mock_cluster_bootstraps")
    (<void**>&_table.mock_clear_request_errors)[0] = _resolve(library, b"mock_clear_request_errors")
    (<void**>&_table.mock_push_request_errors_array)[0] = _resolve(library, b"mock_push_request_errors_array")
    (<void**>&_table.mock_broker_push_request_error_rtts)[0] = _resolve(library, b"mock_broker_push_request_error_rtts")
    (<void**>&_table.mock_topic_set_error)[0] = _resolve(library, b"mock_topic_set_error")
    (<void**>&_table.mock_topic_create)[0] = _resolve(library, b"mock_topic_create")
    (<void**>&_table.mock_partition_set_leader)[0] = _resolve(library, b"mock_partition_set_leader")
    (<void**>&_table.mock_broker_set_down)[0] = _resolve(library, b"mock_broker_set_down")
    (<void**>&_table.mock_broker_set_up)[0] = _resolve(library, b"mock_broker_set_up")
    (<void**>&_table.mock_broker_set_rtt)[0] = _resolve(library, b"mock_broker_set_rtt")
    (<void**>&_table.mock_set_apiversion)[0] = _resolve(library, b"mock_set_apiversion")
    (<void**>&_table.mock_start_request_tracking)[0] = _resolve(library, b"mock_start_request_tracking")
    (<void**>&_table.mock_stop_request_tracking)[0] = _resolve(library, b"mock_stop_request_tracking")
    (<void**>&_table.mock_get_requests)[0] = _resolve(library, b"mock_get_requests")
    (<void**>&_table.mock_request_destroy_array)[0] = _resolve(library, b"mock_request_destroy_array")
    (<void**>&_table.mock_clear_requests)[0] = _resolve(library, b"mock_clear_requests")
    (<void**>&_table.mock_request_id)[0] = _resolve(library, b"mock_request_id")
    (<void**>&_table.mock_request_api_key)[0] = _resolve(library, b"mock_request_api_key")
    (<void**>&_table.mock_request_timestamp)[0] = _resolve(library, b"mock_request_timestamp")
    (<void**>&_table.mock_broker_error_stack_cnt)[0] = _resolve(library, b"mock_broker_error_stack_cnt")
    (<void**>&_table.mock_partition_delete_records)[0] = _resolve(library, b"mock_partition_delete_records")
    return 0


_load()


def librdkafka_version() -> str:
    """The version of the librdkafka in use, as it names itself."""
    return api.version_str().decode()


def error_text(int code) -> str:
    """librdkafka's sentence for an error code."""
    return api.err2str(code).decode()
