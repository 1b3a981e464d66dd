"""Tells a pipe when a consumer of confluent-kafka's has something, so that one wait serves many consumers.

confluent-kafka offers no way to wait for several consumers at once. librdkafka has one: it writes to a file descriptor
when a queue is no longer empty. The queue is found as that of producers is, by a plugin that sees the client being made.
"""

from libc.errno cimport errno
from libc.stdlib cimport calloc, free
from libc.string cimport strerror
from posix.unistd cimport close, dup

from confluent_kafka import Message

from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from * nogil:
    """
    /* What becomes of the consumer that this thread is making. */
    static __thread void *fp_cradle;
    static void *fp_get_cradle(void) { return fp_cradle; }
    static void fp_set_cradle(void *watched) { fp_cradle = watched; }

    /* librdkafka finds this by name: our module is listed in plugin.library.paths. */
    static int fp_conf_init(void *conf);
    __attribute__((visibility("default")))
    int conf_init(void *conf, void **opaque, char *errstr, size_t errstr_size) {
        (void)opaque; (void)errstr; (void)errstr_size;
        return fp_conf_init(conf);
    }

    /* A method without arguments as the function behind it, or NULL. */
    static PyCFunction fp_plain_method(PyObject *descriptor) {
        PyMethodDef *method;
        if (Py_TYPE(descriptor) != &PyMethodDescr_Type)
            return NULL;
        method = ((PyMethodDescrObject *)descriptor)->d_method;
        return method->ml_flags & METH_NOARGS ? method->ml_meth : NULL;
    }
    """
    ctypedef object (*method_t "PyCFunction")(object, void*)
    method_t fp_plain_method(object descriptor)
    void* fp_get_cradle()
    void fp_set_cradle(void*)

ctypedef struct watched_t:    # owned by announce(), then by the consumer
    rd_kafka_t* rk            # NULL = there is none, or it is gone
    rd_kafka_queue_t* queue   # counted reference, or NULL
    int descriptor            # our own, so that nobody can close it before librdkafka has forgotten it
    bint handed_on            # the end of the consumer frees it


cdef int _conf_init "fp_conf_init"(void* conf) noexcept nogil:
    cdef void* watched = fp_get_cradle()
    if watched == NULL:
        return 0  # somebody else's client listed our library
    return rdkafka.conf_interceptor_add_on_new(<rd_kafka_conf_t*>conf, b"fastprod", _on_new, watched)


cdef rd_kafka_resp_err_t _on_new(
    rd_kafka_t* rk, const rd_kafka_conf_t* conf, void* opaque, char* errstr, size_t errstr_size
) noexcept nogil:
    (<watched_t*>opaque).rk = rk
    return rdkafka.interceptor_add_on_destroy(rk, b"fastprod", _on_destroy, opaque)


cdef rd_kafka_resp_err_t _on_destroy(rd_kafka_t* rk, void* opaque) noexcept nogil:
    """Our reference to the queue goes before the client does."""
    cdef watched_t* watched = <watched_t*>opaque
    watched.rk = NULL
    if watched.queue != NULL:
        rdkafka.queue_io_event_enable(watched.queue, -1, NULL, 0)
        rdkafka.queue_destroy(watched.queue)
    if watched.handed_on:
        close(watched.descriptor)
        free(watched)
    return 0


def plugin_path():
    """Path of this module, for librdkafka's plugin.library.paths."""
    return __file__


def announce(make, int descriptor):
    """Runs `make`, which creates a confluent-kafka consumer on this thread, and returns that.

    From then on a byte is written to `descriptor`, which must not block, whenever the consumer's queue was empty and is
    no longer, until the consumer is closed.
    """
    cdef watched_t* watched = <watched_t*>calloc(1, sizeof(watched_t))
    if watched == NULL:
        raise MemoryError()
    watched.descriptor = dup(descriptor)
    if watched.descriptor < 0:
        free(watched)
        raise OSError(errno, strerror(errno).decode())
    fp_set_cradle(watched)
    try:
        consumer = make()
    finally:
        fp_set_cradle(NULL)
        if watched.rk != NULL:
            watched.handed_on = True
            watched.queue = rdkafka.queue_get_consumer(watched.rk)
            rdkafka.queue_io_event_enable(watched.queue, watched.descriptor, b"!", 1)
        else:
            close(watched.descriptor)
            free(watched)
            watched = NULL
    if watched == NULL:
        raise RuntimeError(
            "librdkafka did not load fastprod's hook; does this confluent-kafka support plugin.library.paths?"
        )
    return consumer


cdef method_t error_of = fp_plain_method(Message.error)


def any_error(list messages):
    """Whether any of these confluent_kafka.Message objects is an error: asked of every record that a poll brings."""
    for message in messages:
        # The function behind the method does not look at the type.
        if error_of != NULL and type(message) is Message:
            error = error_of(message, NULL)
        else:
            error = message.error()
        if error is not None:
            return True
    return False
