# The record accumulator: lanes of chunks, one bounded pool, routing of records to lanes.
#
#   accumulator_t ── topic_t ── lane_t (one per opened partition) ── chunk_t ── chunk_t ...
#                                                                     │
#   one allocation:   [ chunk_t | data grows up ->      <- slots grow down ]
#
# Every function here that takes an accumulator_t* wants its `lock` held, unless it says otherwise. A lane's
# in-flight list has its own leaf lock, because acknowledgements arrive on librdkafka's threads.

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from fastprod._core._balance cimport load_table_t, partial_t, random_t, sticky_t
from fastprod._core._columns cimport column_t
from fastprod._core._headers cimport headers_head
from fastprod._core._histogram cimport histogram_t
from fastprod._core._platform cimport fp_grow64, fp_load64, fp_store64, pthread_cond_t, pthread_mutex_t

cdef enum:
    POLICY_UNIFORM = 0      # KIP-794: sticky by bytes, weighted by queue size
    POLICY_STICKY = 1       # KIP-480: another partition at every new batch
    POLICY_ROUND_ROBIN = 2
    POLICY_PYTHON = 3       # the user's object decides, with the GIL
    POLICY_PARTIAL = 4      # PIP-79: round robin over some of the partitions

    APPEND_OK = 0
    APPEND_NO_ROOM = 1            # the pool is full: wait, then append again
    APPEND_UNKNOWN_PARTITION = 2
    APPEND_TOO_LARGE = 3          # larger than the whole pool
    APPEND_NO_MEMORY = 4          # malloc failed
    APPEND_NO_CHOICE = 5          # metadata came meanwhile: ask the Python partitioner, then append again
    APPEND_CLOSED = 6             # the producer is closed
    APPEND_NO_TRANSACTION = 7     # none has begun, or it is being committed or aborted

    GATE_OPEN = 0                 # whether records are taken at all: accumulator_t.gate
    GATE_NO_TRANSACTION = 1
    GATE_CLOSED = 2

    PENDING = 0x7fffffff  # slot_t.state while the outcome is open
    MOVED = 0x7ffffffe    # the record went on to another chunk
    EXPIRED = 0x7ffffffd  # timed out here, but librdkafka has not given it back yet
    CHUNK_SLOTS = 4096    # a chunk has fewer, so that a number below it fits into a token
    SIZE_CLASSES = 4
    ERR_TIMED_OUT = -192  # librdkafka's codes for what ends a record here
    ERR_UNKNOWN_PARTITION = -190
    ERR_PURGED = -152
    ERR_APPLICATION = -143
    CHOICE_FAILED = -2    # among a Python partitioner's choices: it raised

    TABLE_US = 5000       # the load table is rebuilt at most this often

    LIST_NONE = 0
    LIST_LINGER = 1
    LIST_READY = 2
    LIST_HELD = 3         # librdkafka has a request's worth of the lane: one at a time

ctypedef struct slot_t:       # one record in a chunk
    const char* payload       # in the chunk, or in a pinned buffer of the caller; NULL = null value
    const char* key           # likewise
    uint32_t size             # bytes of the value
    uint32_t key_size
    uint32_t index            # position in the receipt
    int32_t state             # PENDING, 0 = acknowledged, else error; the wanted partition in the undecided lane

ctypedef struct rich_t:       # follows the slot in chunks of records with callback, headers or timestamp
    void* callback            # owned reference to a Python callable, or NULL
    const char* headers       # a headers_t in the chunk, or NULL
    int64_t timestamp         # ms; 0 = time of hand-over; after the acknowledgement what librdkafka used
    int64_t offset
    int64_t clock_us          # when produced; after the acknowledgement the latency
    int32_t partition         # wanted, then final
    int32_t timestamp_type

ctypedef struct failure_t:
    int64_t index
    topic_t* topic
    int32_t error
    int32_t partition
    char* copy                # owned: value and key as they were given; NULL = they still are where they came from
    int32_t size              # of the value in the copy, -1 = null
    int32_t key_size

ctypedef struct extent_t:     # what a bulk call wrote to one partition
    topic_t* topic
    int32_t partition
    int64_t records
    int64_t first             # lowest and highest offset, -1 = unknown
    int64_t last
    int64_t unknown           # of the records, those whose offset the broker did not tell

ctypedef struct receipt_t:    # outcome of bulk calls; under the accumulator's lock
    int32_t refs              # the Python Receipt and every block
    int64_t accepted
    int64_t bytes             # of their keys and values
    int64_t acknowledged
    int64_t failed            # of the accepted ones
    extent_t* extents         # owned: a hash table; places without a topic are free
    int32_t extent_count
    int32_t extent_capacity   # its places

ctypedef struct block_t:      # records of a bulk call that share their source buffers; under the lock as well
    int32_t refs              # the Python side and every chunk: at 1 librdkafka is done with the buffers
    receipt_t* receipt        # counted reference
    int64_t taken             # records that were accepted
    bint fleeting             # the buffers may be written to: chunks have copies, and so must failures
    failure_t* failures       # owned
    int64_t failure_count
    int64_t failure_capacity

ctypedef struct run_t:        # neighbours in a chunk that came by the same bulk call, or by none
    run_t* next
    block_t* block            # counted reference, or NULL
    int64_t first_offset      # lowest and highest offset acknowledged, -1 = none
    int64_t last_offset
    uint32_t start            # slot of the first
    uint32_t failed
    uint32_t moved            # records that went on to another chunk
    uint32_t unknown          # acknowledged, but the broker did not tell the offset

ctypedef struct chunk_t:
    chunk_t* next             # next in the lane's waiting list or the delivery list
    chunk_t* fly_next         # next in the lane's in-flight list, then in the completion stack
    chunk_t* fly_prev
    lane_t* lane
    run_t runs                # the first; others lie among the data
    run_t* last_run
    run_t* ending             # where an outcome came last; a guess
    int64_t charge            # bytes taken from the pool
    int64_t reserved          # of these, for records to come
    int64_t created_us        # monotonic, when its first record came
    int64_t created_ms        # wall clock
    uint32_t capacity         # bytes after this header
    uint32_t used             # data bytes
    uint32_t stride           # bytes per slot
    uint32_t count            # records
    uint32_t sent             # records handed to librdkafka; changes under the lane's `spin`
    uint32_t charged          # of them, those for which `bookkeeping` is charged
    uint32_t resolved         # records whose outcome is known
    uint32_t returned         # records librdkafka has given back
    uint32_t failed
    uint32_t moved            # records that went on to another chunk
    uint32_t callbacks        # slots with a callback
    uint32_t delivered        # slots whose callback has run
    uint32_t epoch            # flush generation
    int32_t refs              # librdkafka/accumulator, delivery list
    int8_t size_class         # index into the free lists, -1 = odd size
    uint8_t rich
    uint8_t aged              # made of records that had waited for metadata
    uint8_t single            # has headers or timestamps: hand over one by one
    uint8_t sealed
    uint8_t handed            # to the sender, and counted in accumulator_t.flying
    uint8_t split             # librdkafka has some of it, and the rest waits until that is back
    uint8_t published
    uint8_t flying            # in the in-flight list

ctypedef struct list_t:       # of lanes
    lane_t* head
    lane_t* tail

ctypedef struct link_t:       # a lane's place in one
    lane_t* previous
    lane_t* next

ctypedef struct outlet_t:     # one broker: the lanes that it leads, and how many of them librdkafka has something of
    outlet_t* next
    int32_t broker            # -1: lanes without a leader
    list_t lingering          # by age
    list_t* ready             # owned: one for each level
    uint64_t turns            # hand-overs of lanes
    list_t held               # wait for what librdkafka has of them
    list_t out                # those handed over, the first one longest ago
    int32_t out_count
    int64_t records_out       # of these lanes
    bint spent                # the credit is used up, and not half of it back

ctypedef struct lane_t:
    topic_t* topic
    outlet_t* outlet          # of the leader
    int32_t partition         # -1: undecided
    int8_t size_class         # of the next chunk
    # waiting records
    chunk_t* head
    chunk_t* tail
    link_t link
    int where                 # LIST_*: which list of the outlet's it is linked in
    bint due                  # held, but it would be ready
    int64_t broken            # atomic: a record has failed, and the producer is strict: no later one may be written
    int64_t torn              # atomic: the first hand-over may have become two requests
    int64_t first_us          # when the oldest waiting record came
    int64_t retry_us          # not before: librdkafka's queue was full
    # the batch as Java would build it: decides when the lane is ready and when to switch
    bint batch_open
    int32_t batch_records
    int64_t batch_bytes
    int64_t batch_limit
    # handed over
    link_t out_link
    bint counted              # in the outlet's list `out`
    int64_t out_us            # since when
    int32_t chunks_out        # chunks that librdkafka has
    int64_t records_out       # records, likewise
    # in flight, under `spin`
    int spin
    chunk_t* fly_head
    chunk_t* fly_tail
    # for the load table
    int64_t opened_us
    int64_t first_pile        # records that had come when the first was acknowledged
    bint settled_in           # these are acknowledged: the queue is meaningful
    # Counters only grow, each with one lock of its own for writing, so that none needs an atomic add; the queue
    # is what came in less what is settled.
    int64_t in_records        # under the accumulator's lock
    int64_t in_bytes
    int64_t settled_records   # under `spin`, as the rest
    int64_t settled_bytes
    int64_t failed_records
    int64_t failed_bytes
    int64_t refused_records   # by a broker
    int64_t heard_us          # when a broker last took a record, 0 = never
    int64_t progress_us       # last acknowledgement, or when the lane stopped being idle
    # for stats(), under the accumulator's lock
    histogram_t* latency      # owned: from the first record of a chunk to the last one's acknowledgement; NULL = none yet
    int64_t settled_then      # settled_records when librdkafka's last statistics came
    int64_t retries           # most records that librdkafka was seen to have sent again

ctypedef struct lanes_t:      # published atomically, because acknowledgements read it without the lock
    int32_t size
    lane_t** lanes            # NULL = not opened
    lanes_t* previous         # older, smaller arrays live until the end

ctypedef struct topic_t:
    char* name                # owned
    size_t name_size
    uint32_t hash             # of the name
    topic_t* same_hash        # next in the table of names
    int32_t level             # its lanes go before those of lower levels
    void* handle              # rd_kafka_topic_t*
    void* label               # borrowed: the name as Python str, held by the Runtime
    topic_t* next
    lanes_t* lanes
    lane_t* undecided         # waits for metadata
    int32_t partitions        # 0 = not known yet
    int32_t available_count
    int32_t* available        # owned: partitions with a leader
    int32_t* leaders          # owned: broker id per partition, -1 = none
    int64_t version           # grows with every change of partitions or leaders
    int32_t metadata_error
    bint asked                # the scout is asking for its metadata
    int64_t doubtful          # atomic: records were refused for want of the topic or partition: ask for metadata
    int64_t metadata_us       # last answer, 0 = never
    int64_t unknown_since_us  # first «unknown topic» answer in a row
    bint routing              # a Python partitioner is being asked about records of the undecided lane
    sticky_t sticky
    uint64_t turn             # round robin
    partial_t partial         # partial round robin
    load_table_t table
    int32_t brokers           # how many lead partitions of the topic
    int32_t* broker           # owned: number of the leading broker per partition, 0..brokers-1
    int64_t* broker_queue     # owned scratch: mean queue of a broker's lanes
    int32_t* broker_lanes     # owned scratch: how many of them count
    int64_t* queues           # owned scratch for the table
    int64_t* smooth           # owned: queue per partition, averaged, in 1/256 of the sticky bound; -1 = unknown
    int64_t* held             # owned: the queue itself when the table was last built, same unit
    int64_t full_us           # when the pool ran full, 0 = the table was built since
    int64_t mean_queue        # of the brokers
    int64_t table_us          # when it was built
    int32_t strikes           # rebuilds in a row that found queues uneven
    bint uneven               # queues differ so much that the table decides
    bint recurring            # and did so shortly before
    int64_t even_us           # when they last stopped to, 0 = never
    # While they do not, the partition that has had the fewest bytes is next: a heap over `available`
    int32_t* heap             # owned
    int64_t* share            # owned: bytes per partition since the heap was made

ctypedef struct waiter_t:     # one thread waiting for memory, first come first served
    pthread_cond_t wake
    waiter_t* next
    int64_t need              # bytes that it would have
    int64_t granted           # bytes set aside for it: it is out of the queue then
    int32_t level             # of the record that waits
    int32_t overtaken         # by how many of a higher level
    bint queued

ctypedef struct flusher_t:    # one thread in flush: waits for the chunks that existed when it came
    flusher_t* next
    uint32_t epoch
    int64_t remaining

ctypedef struct record_t:     # a record on its way in
    const char* value
    const char* key
    int64_t size              # -1 = null
    int64_t key_size          # -1 = null
    const char* headers       # a headers_t, or NULL
    int64_t headers_size      # its bytes
    int64_t timestamp         # ms, 0 = now
    int64_t clock_us          # when produced, 0 = now
    int32_t partition         # -1 = to be decided
    uint32_t index
    void* callback            # a reference the accumulator takes over, or NULL
    block_t* block            # the bulk call's, or NULL
    bint by_reference

# librdkafka's partitioners have this form: topic, key, its size, number of partitions, two opaque pointers
ctypedef int32_t (*hash_f)(const void*, const void*, size_t, int32_t, void*, void*) noexcept nogil

ctypedef struct accumulator_t:
    pthread_mutex_t lock
    pthread_cond_t work       # to the sender: something is ready
    pthread_cond_t done       # to flush, poll and receipts: outcomes or events have arrived
    int gate                  # GATE_*: looked at by every append
    bint sender_waiting
    int done_waiting
    # settings
    int policy
    bint adaptive
    bint ignore_keys
    hash_f hash               # of keys to partitions; NULL = murmur2, as Java
    bint hash_null            # also of records without a key
    bint spread_empty         # an empty key is no key
    int32_t levels            # of priority; topics are named after theirs, as in orders-2
    int64_t linger_us
    int64_t sticky_bytes
    int64_t availability_us
    int32_t partial_limit     # partitions that partial round robin uses
    uint64_t partial_seed
    int64_t timeout_us        # delivery timeout
    int64_t span_us           # between the first and last record of a chunk: they share age and timestamp
    int64_t record_overhead   # what librdkafka allocates per record that it has
    # pool
    int64_t limit
    int64_t used              # by chunks, and by what they point to
    int64_t bookkeeping       # by librdkafka, for the records that it has
    bint starved              # the sender has found no memory for that
    int64_t cached            # bytes in the free lists
    chunk_t* free_lists[SIZE_CLASSES]
    waiter_t* waiters
    waiter_t* last_waiter
    bint overdraft            # records already admitted are being moved
    bint favoured             # whoever has the lock has waited for its turn
    int64_t spare             # bytes to be set aside in the chunk of the next record
    int64_t flying            # bytes of chunks that librdkafka has
    int64_t split             # chunks of which it has a part
    bint short                # a key-less record found no room, and none has come back since
    int64_t room_us           # when some last came back after that
    # lists
    topic_t* topics
    topic_t** topic_table     # owned: topics by name, chained; topic_mask + 1 places
    uint32_t topic_mask       # 0 = no table yet
    uint32_t topic_count
    outlet_t* outlets         # owned
    int32_t outlet_count
    int64_t lanes_waiting     # in one of their lists
    outlet_t* turn            # whose lanes are looked at next
    int32_t credit            # lanes of a broker that librdkafka may have at a time
    bint strict               # a record that fails ends its partition
    int64_t request_bytes     # what librdkafka puts into one request of a partition; 0 = as many requests as it likes
    int64_t request_records
    int64_t known_us          # so long after a record of it a broker surely remembers the producer
    chunk_t* deliveries       # chunks with callbacks to run
    chunk_t* last_delivery
    int64_t callbacks_due     # atomic: callbacks run without the lock
    int64_t deliveries_open   # chunks with callbacks that have not all run
    # flush
    uint32_t epoch
    uint32_t place_epoch      # of the chunks being made: older than `epoch` while records are moved
    int64_t place_us          # likewise their age, 0 = now
    int64_t place_ms
    int64_t live_chunks       # whose outcomes are not known yet
    flusher_t* flushers
    # counters
    uint64_t drops            # grows when everything that waits is given up
    int64_t placeable         # atomic: some that wait could be placed, if a Python partitioner were asked
    int64_t news              # grows whenever somebody who waits on `done` should look again
    int64_t failed            # records that failed since it was last set to 0: transactions ask
    int32_t first_error       # why the first of them did
    int64_t records           # accepted, outcome open
    int64_t lanes_opened
    bint leaders_moved        # some partition has lost the leader that it had
    int64_t failing_opens     # tests: so many lanes cannot be opened
    random_t random

cdef inline int32_t error_of(const slot_t* slot) noexcept nogil:
    """The error code of a record whose outcome is known, 0 = acknowledged."""
    return ERR_TIMED_OUT if slot.state == EXPIRED else slot.state

cdef inline int64_t headers_wire(const record_t* record) noexcept nogil:
    return 1 if record.headers == NULL else headers_head(record.headers).wire

cdef inline int64_t queued_records(lane_t* lane) noexcept nogil:
    return fp_load64(&lane.in_records) - fp_load64(&lane.settled_records)

cdef inline int64_t queued_bytes(lane_t* lane) noexcept nogil:
    """Bytes accumulated or handed over and not yet acknowledged."""
    return fp_load64(&lane.in_bytes) - fp_load64(&lane.settled_bytes)

cdef inline void count_settled(lane_t* lane, slot_t* slot, bint failed) noexcept nogil:
    """A record has its outcome; `lane.spin` is held."""
    cdef int64_t size = <int64_t>slot.size + slot.key_size
    fp_grow64(&lane.settled_records, 1)
    fp_grow64(&lane.settled_bytes, size)
    if failed:
        fp_grow64(&lane.failed_records, 1)
        fp_grow64(&lane.failed_bytes, size)

cdef inline bint is_known(accumulator_t* acc, lane_t* lane, int64_t now) noexcept nogil:
    """Whether brokers know the producer in this partition: one took a record not long ago."""
    cdef int64_t heard = fp_load64(&lane.heard_us)
    return heard and now - heard < acc.known_us

cdef inline bint is_broken(lane_t* lane) noexcept nogil:
    # Which partition those would have gone to that failed undecided is not known.
    return fp_load64(&lane.broken) or fp_load64(&lane.topic.undecided.broken)

cdef inline void break_off(lane_t* lane, bint strict) noexcept nogil:
    if strict:
        fp_store64(&lane.broken, 1)

cdef inline slot_t* slot_at(chunk_t* chunk, uint32_t i) noexcept nogil:
    return <slot_t*>(<char*>chunk + sizeof(chunk_t) + chunk.capacity - (i + 1) * chunk.stride)

cdef inline rich_t* rich_at(chunk_t* chunk, uint32_t i) noexcept nogil:
    return <rich_t*>(<char*>slot_at(chunk, i) + sizeof(slot_t))

cdef inline char* data_of(chunk_t* chunk) noexcept nogil:
    return <char*>chunk + sizeof(chunk_t)

# What librdkafka carries along with a record and gives back with its outcome: the chunk's address (a multiple of 16,
# below 2**48) and the slot's number.
cdef inline void* token_of(chunk_t* chunk, uint32_t i) noexcept nogil:
    return <void*>((<uint64_t>chunk >> 4) * CHUNK_SLOTS + i)

cdef inline chunk_t* chunk_of(void* token) noexcept nogil:
    return <chunk_t*>((<uint64_t>token // CHUNK_SLOTS) << 4)

cdef inline uint32_t index_of(void* token) noexcept nogil:
    return <uint32_t>(<uint64_t>token % CHUNK_SLOTS)

cdef int accumulator_init(accumulator_t*) noexcept nogil
cdef void accumulator_free(accumulator_t*) noexcept nogil
cdef topic_t* topic_new(accumulator_t*, const char* name) noexcept nogil
cdef topic_t* topic_find(accumulator_t*, const char* name, size_t size) noexcept nogil
cdef int topic_update(accumulator_t*, topic_t*, int32_t partitions, const int32_t* leaders) noexcept nogil
cdef lane_t* lane_of(accumulator_t*, topic_t*, int32_t partition) noexcept nogil
cdef void count_latency(lane_t*, int64_t us, int64_t records) noexcept nogil
cdef int32_t choose(accumulator_t*, topic_t*, int64_t produced) noexcept nogil
cdef void rebuild_table(accumulator_t*, topic_t*, int64_t now) noexcept nogil
cdef void weights_of(topic_t*, double* weights, int32_t size) noexcept nogil
cdef void drop_cache(accumulator_t*) noexcept nogil
cdef int append(accumulator_t*, topic_t*, record_t*, int32_t* partition) noexcept nogil
cdef int64_t append_run(
    accumulator_t*, topic_t*, block_t*, const column_t* values, int64_t start, int64_t stop, int64_t first, int64_t below
) noexcept nogil
cdef int route_undecided(accumulator_t*, topic_t*, int32_t* wanted) noexcept nogil
cdef chunk_t* detach(accumulator_t*, lane_t*) noexcept nogil
cdef void reattach(accumulator_t*, lane_t*, chunk_t*) noexcept nogil
cdef void release_split(accumulator_t*) noexcept nogil
cdef lane_t* next_ready(accumulator_t*, int64_t now) noexcept nogil
cdef int64_t next_deadline(accumulator_t*, int64_t now) noexcept nogil
cdef void seal_all(accumulator_t*) noexcept nogil
cdef void fail_unsent(accumulator_t*, chunk_t*, int32_t error) noexcept nogil
cdef int64_t fail_head(accumulator_t*, lane_t*, int32_t error) noexcept nogil
cdef int64_t fail_lane(accumulator_t*, lane_t*, int32_t error, int64_t before_us) noexcept nogil
cdef int64_t fail_waiting(accumulator_t*, int32_t error, int64_t before_us) noexcept nogil
cdef void enter_flight(lane_t*, chunk_t*, uint32_t sent) noexcept nogil
cdef void fail_flying(accumulator_t*, int32_t error) noexcept nogil
cdef bint is_flying(accumulator_t*) noexcept nogil
cdef void expire_flying(accumulator_t*, int64_t before_us) noexcept nogil
cdef void resolve(lane_t*, chunk_t*, uint32_t i, int32_t state, int64_t offset, int64_t now) noexcept nogil
cdef void unlink_flying(lane_t*, chunk_t*) noexcept nogil
cdef void publish(accumulator_t*, chunk_t*) noexcept nogil
cdef void tell_news(accumulator_t*) noexcept nogil
cdef void chunk_release(accumulator_t*, chunk_t*) noexcept nogil
cdef void chunk_done(accumulator_t*, chunk_t*) noexcept nogil
cdef void block_release(block_t*) noexcept nogil
cdef void receipt_release(receipt_t*) noexcept nogil
cdef void wake_waiters(accumulator_t*) noexcept nogil
cdef void enter_queue(accumulator_t*, waiter_t*, int64_t least) noexcept nogil
cdef void leave_queue(accumulator_t*, waiter_t*) noexcept nogil
cdef void use_grant(accumulator_t*, waiter_t*) noexcept nogil
cdef int64_t footprint(const record_t*) noexcept nogil
