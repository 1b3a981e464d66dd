"""The producer's side of librdkafka, in C terms: hooks, hand-over, delivery reports, metadata. Never takes the GIL.

    sender    gives ready chunks to librdkafka, watches linger and timeouts, takes delivery reports
    scout     asks for metadata, which blocks

librdkafka's main queue is read as events, so confluent-kafka's own callbacks (which need its poll() on the stack)
never run. Inside a transaction confluent-kafka reads that queue itself; there an interceptor on librdkafka's threads
tells us the outcomes instead. It is not used otherwise: the broker thread is the first to be busy.

librdkafka is never called with one of our locks held, so its callbacks may take them.
"""

from libc.stdint cimport INT64_MAX, UINT32_MAX, int16_t, int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, strcmp, strdup, strlen, strncpy

from fastprod._core._accumulator cimport (
    EXPIRED,
    PENDING,
    POLICY_PYTHON,
    accumulator_t,
    break_off,
    chunk_of,
    chunk_done,
    chunk_t,
    detach,
    enter_flight,
    expire_flying,
    fail_lane,
    fail_waiting,
    index_of,
    is_broken,
    is_known,
    lane_t,
    next_deadline,
    next_ready,
    queued_records,
    reattach,
    release_split,
    resolve,
    rich_at,
    rich_t,
    route_undecided,
    slot_at,
    slot_t,
    tell_news,
    token_of,
    topic_find,
    topic_t,
    topic_update,
    unlink_flying,
)
from fastprod._core._hash cimport murmur2_bytes
from fastprod._core._headers cimport librdkafka_headers
from fastprod._core._histogram cimport histogram_add
from fastprod._core._platform cimport (
    fp_add64,
    fp_cas_ptr,
    fp_cond_wait_until,
    fp_grow64,
    fp_load64,
    fp_load_ptr,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    fp_store64,
    fp_store_ptr,
    fp_swap_ptr,
    pthread_atfork,
    pthread_cond_broadcast,
    pthread_cond_signal,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_t,
    sched_yield,
)
from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from * nogil:
    """
    /* The client that confluent_kafka.Producer() is making on this thread, for the plugin hook below. */
    static __thread void *fp_newborn;
    /* Set while this thread gives records to librdkafka: if one is refused, the call says so, and the
       acknowledgement that librdkafka makes of it first is not needed. */
    static __thread int fp_handing_over;
    static int fp_is_handing_over(void) { return fp_handing_over; }
    static void fp_hand_over(int now) { fp_handing_over = now; }
    /* The broker whose answer this thread is handling, until the first record has its outcome by it. */
    static __thread void *fp_answering;
    static void *fp_get_answering(void) { return fp_answering; }
    static void fp_set_answering(void *broker) { fp_answering = broker; }
    /* Whether that answer told offsets. */
    static __thread int fp_told;
    static int fp_is_told(void) { return fp_told; }
    static void fp_set_told(int told) { fp_told = told; }
    static void *fp_get_newborn(void) { return fp_newborn; }
    static void fp_set_newborn(void *client) { fp_newborn = client; }

    /* A thread that leaves signals to Python's main thread. */
    #include <signal.h>
    static int fp_start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
        sigset_t all, old;
        int failed;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        failed = pthread_create(thread, NULL, run, argument);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        return failed;
    }

    /* librdkafka allocates up to message.max.bytes for every request and frees it with the answer. glibc gets blocks
       of that size from the kernel and gives them back, which is a page fault for each 4 KB: a fifth of a broker
       thread's time. From the largest block that was freed it learns what a program will want again (mallopt(3),
       M_MMAP_THRESHOLD), unless the user has set that himself: so here is one, never touched. */
    #include <stdlib.h>
    static void fp_teach_malloc(size_t size) {
        void *volatile block = malloc(size);  /* volatile, or the compiler leaves both out */
        free(block);
    }

    /* librdkafka finds this by name: our module is listed in plugin.library.paths. */
    static int fp_conf_init(void *conf);
    __attribute__((visibility("default")))
    int conf_init(void *conf, void **opaque, char *errstr, size_t errstr_size) {
        (void)opaque; (void)errstr; (void)errstr_size;
        return fp_conf_init(conf);
    }
    """
    void* fp_get_newborn()
    void fp_set_newborn(void*)
    void* fp_get_answering()
    void fp_set_answering(void*)
    int fp_is_told()
    void fp_set_told(int)
    int fp_is_handing_over()
    void fp_hand_over(int)
    void fp_teach_malloc(size_t)
    int fp_start_thread(pthread_t*, void* (*)(void*) noexcept nogil, void*)

cdef enum:
    RETRY_US = 2000             # pause after librdkafka's queue was full
    HOLDING = 5                 # messages of a request on its way that keep librdkafka from making the partition's next one
    REFUSED = 5                 # records, after which a partition's first need not go alone any more
    LATE_US = 200000            # records that waited longer keep their own timestamp, one call each
    STUCK_US = 1000000          # no acknowledgement for so long: look for a new leader
    GRACE_US = 1500000          # librdkafka looks for timed-out messages once a second
    EVENTS_KEPT = 10000         # events that wait for poll()
    REUSED_BYTES = 8 << 20      # blocks up to this size, and twice as much in all, stay with malloc; with 2 MB nothing is gained

cdef const char* UNANSWERED = b"128"  # requests that a broker may have at a time: as many as CREDIT is lanes
cdef const char* UNSENT = b"32"       # of these, that wait for the socket: a slow connection must not keep them until they time out

cdef int fork_generation = 0

# All clients of the process, for the one hook that librdkafka calls without our pointer.
cdef client_t* _clients = NULL
cdef int _clients_lock = 0


cdef void _forked() noexcept nogil:
    global fork_generation, _clients, _clients_lock
    fork_generation += 1
    _clients_lock = 0  # whoever held it is not here
    _clients = NULL


pthread_atfork(NULL, NULL, _forked)
fp_teach_malloc(REUSED_BYTES)

include "client/brokers.pyx"
include "client/hooks.pyx"
include "client/reports.pyx"
include "client/sender.pyx"
include "client/scout.pyx"


cdef int start_threads(client_t* client) noexcept nogil:
    """-1 when the system has no more threads; `client.threads` tells how many run."""
    if fp_start_thread(&client.sender, sender_main, client) == 0:
        client.threads = 1
        if fp_start_thread(&client.scout, scout_main, client) == 0:
            client.threads = 2
    return 0 if client.threads == 2 else -1


cdef int forks() noexcept nogil:
    """How often this process has been forked off since the module was loaded."""
    return fork_generation


def plugin_path():
    """Path of this module, for librdkafka's plugin.library.paths."""
    return __file__
