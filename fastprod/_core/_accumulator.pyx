"""The record accumulator: where records wait, how much memory they take, and which lane they go to.

Records are copied once, into chunks of one lane each; librdkafka is later given pointers into the chunk, and a token
that names chunk and slot comes back with the acknowledgement. A lane is ready for hand-over when
the batch that Java would have built is full, when `linger.ms` is over, on flush, or when memory is short.
"""

from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset, strdup, strlen

from fastprod._core._balance cimport (
    BATCH_HEADER_BYTES,
    load_table_build,
    load_table_find,
    load_table_free,
    load_table_reserve,
    partial_advance,
    partial_free,
    partial_grow,
    partial_next,
    partial_seed,
    pick_below,
    record_upper_bound,
    record_wire_size,
    sticky_append,
)
from fastprod._core._columns cimport CELL_VALUE, column_get, column_t
from fastprod._core._hash cimport murmur2_bytes
from fastprod._core._histogram cimport histogram_add, histogram_t
from fastprod._core._platform cimport (
    fp_about_now_us,
    fp_add64,
    fp_assert,
    fp_cond_init,
    fp_grow64,
    fp_load64,
    fp_mutex_init,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    fp_store64,
    fp_store_ptr,
    fp_wall_ms,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)

cdef enum:
    AVERAGE_US = 100000                   # over which queues are averaged
    FADE_US = 2000000                     # the same for what would make uneven queues look even again
    STALL_US = 20000                      # a full pool is worth a note from here on
    SPAN_US = 50000                       # between the first and last record of a chunk that may wait long
    HELD_SPAN_US = 500000                 # the same while librdkafka has the lane: smaller chunks cost memory
    STRIKES = 10                          # rebuilds in a row that must find queues uneven
    CATCH_UP = 64                         # sticky bounds that a partition may be behind when they are even again
    START_US = 2000000                    # after which a lane's queue counts in any case
    MANY_LANES = 256                      # more than librdkafka has something of at a time, on a few brokers
    LITTLE = 64                           # a broker with less than this part of the pool out gets more, though memory is short
    FLOOR = 8                             # each so manieth turn is that of whoever has waited longest, of whatever level
    CREDIT_US = 200000                    # a lane that librdkafka has had for so long does not count any more
    RECORD_BYTES = 36                     # at most around key and value in a request, headers apart
    GRANT_BYTES = 262144                  # what a thread waits for when memory is short: a full chunk of small records

cdef uint32_t* CLASS_BYTES = [1024, 8192, 32768, 65536]  # whole allocations, header included

include "accumulator/topics.pyx"
include "accumulator/pool.pyx"
include "accumulator/lists.pyx"
include "accumulator/placing.pyx"
include "accumulator/balancing.pyx"
include "accumulator/routing.pyx"
include "accumulator/outcomes.pyx"
include "accumulator/receipts.pyx"
