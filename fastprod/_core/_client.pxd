# A producer's client: what its threads share. See _client.pyx.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from fastprod._core._accumulator cimport accumulator_t, topic_t
from fastprod._core._histogram cimport histogram_t
from fastprod._core._platform cimport pthread_cond_t, pthread_t
from fastprod._core._rdkafka cimport rd_kafka_event_t, rd_kafka_message_t, rd_kafka_queue_t, rd_kafka_t

cdef enum:
    SCRATCH_MESSAGES = 4096     # most that go to librdkafka in one call; a chunk never holds more
    PRODUCE_REQUEST = 0         # Kafka's numbers for them
    END_TXN_REQUEST = 26

ctypedef struct broker_t:       # what went to one broker; brokers are added and never removed, under client_t.brokers_lock
    broker_t* next
    int32_t id                  # negative: one of bootstrap.servers, not known by number yet
    bint up                     # connected, login and all
    bint known                  # has been
    int64_t sent                # Produce requests
    int64_t answered            # of them, also by an error or a lost connection
    int64_t failed              # answered by one of those
    int64_t handled             # of those answered, whose delivery reports are in the queue by now, if they made any
    int64_t settled             # requests whose records had their outcome with the answer; the others are repeated
    int64_t repeated            # most that were seen to be
    int64_t due                 # count_repeated's
    histogram_t round_trip      # from sending a Produce request to its answer

ctypedef struct event_t:        # something for a user's callback: an event of librdkafka's, or throttling
    event_t* next
    rd_kafka_event_t* event     # NULL = throttling
    char* broker
    int32_t broker_id
    int throttle_ms

ctypedef struct client_t:
    accumulator_t acc
    rd_kafka_t* rk              # owned by the confluent_kafka.Producer
    rd_kafka_queue_t* queue     # its main queue
    void* completed             # stack of chunks that librdkafka has given back entirely, not yet published
    rd_kafka_message_t* scratch # the sender's
    pthread_t sender
    pthread_t scout
    int threads                 # how many of them run
    bint stop
    int64_t news                # atomic: librdkafka's queue has something
    event_t* events             # changed under `acc.lock`, and looked at without
    event_t* last_event
    int64_t event_count
    int64_t poller              # atomic: thread that last ran callbacks, 0 = none yet
    int64_t poller_us           # atomic: when it began to
    int64_t former_poller       # atomic: another one that did before, 0 = none
    int64_t former_us           # atomic: when it last began to
    int64_t listeners           # atomic: threads that wait for callbacks to run
    bint delivering             # and is running some
    bint sending                # the sender has chunks that are in no list
    int guests                  # other threads that are inside librdkafka for us: stop() waits for them
    pthread_cond_t scout_wake   # a topic is new, or looks stuck
    int64_t refresh_us          # topic.metadata.refresh.interval.ms
    int64_t propagation_us      # how long a topic may stay unknown
    bint transactional
    int64_t parts_back          # atomic: how often it gave back all that it had of a chunk, and that was a part
    int64_t patience_us       # of librdkafka with the first hand-over of a partition; 0: one record of it goes alone
    bint pipelined            # many requests to a broker at a time, each of another partition
    int64_t ends_sent           # requests to end a transaction; under `brokers_lock`
    int64_t ends_lost           # of them, those without an answer: brokers may still act on them
    int64_t connected           # brokers with a usable connection; changed under `brokers_lock`
    client_t* next_client       # in the list of all
    # The last error about reaching a broker; guarded by `acc.lock`, numbers are read without.
    char trouble[512]
    int64_t trouble_code
    int64_t trouble_us          # when, 0 = never
    int64_t reached_us          # when a connection was last made, login and all; 0 = never
    int64_t progress_us         # when records were last acknowledged, 0 = never
    broker_t* brokers           # owned
    int brokers_lock            # a leaf lock: librdkafka's threads take it
    int64_t draining            # threads that may have taken delivery reports which are not counted yet
    char* statistics            # owned: librdkafka's last ones, as JSON, or NULL; under `acc.lock`
    bint statistics_wanted      # by the user's callback too
    int64_t fatal               # atomic: librdkafka has said that it will send nothing more
    bint no_offsets             # acks=0: librdkafka counts on from its «invalid offset», which means nothing

cdef void set_newborn(client_t*) noexcept nogil
cdef int start_threads(client_t*) noexcept nogil
cdef int forks() noexcept nogil
cdef void register_client(client_t*) noexcept nogil
cdef void forget_client(client_t*) noexcept nogil
cdef void on_queue(rd_kafka_t*, void* client) noexcept nogil
cdef void drain(client_t*) noexcept nogil
cdef bint enter_as_guest(client_t*) noexcept nogil
cdef void leave_as_guest(client_t*) noexcept nogil
cdef void drain_as_guest(client_t*, int purge_flags) noexcept nogil
cdef void publish_completed(client_t*) noexcept nogil
cdef void drop_event(event_t*) noexcept nogil
cdef void count_repeated(client_t*, bint open) noexcept nogil
cdef void free_brokers(client_t*) noexcept nogil
