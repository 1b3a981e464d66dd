# Topics and their lanes: made, widened, told of metadata, freed.

cdef int accumulator_init(accumulator_t* acc) noexcept nogil:
    """Expects zeroed memory with the settings filled in."""
    fp_mutex_init(&acc.lock)
    fp_cond_init(&acc.work)
    fp_cond_init(&acc.done)
    acc.levels = max(acc.levels, 1)
    acc.span_us = HELD_SPAN_US if acc.timeout_us == 0 else min(HELD_SPAN_US, acc.timeout_us >> 3)
    return 0


cdef void accumulator_free(accumulator_t* acc) noexcept nogil:
    """Frees everything. No thread may use it any more, and callbacks must have been released."""
    cdef topic_t* topic
    cdef lanes_t* lanes
    cdef lanes_t* older
    cdef outlet_t* outlet
    cdef chunk_t* chunk
    cdef int32_t i
    while acc.topics != NULL:
        topic = acc.topics
        acc.topics = topic.next
        lanes = topic.lanes
        if lanes != NULL:
            for i in range(lanes.size):
                _lane_free(lanes.lanes[i])
        while lanes != NULL:
            older = lanes.previous
            free(lanes.lanes)
            free(lanes)
            lanes = older
        _lane_free(topic.undecided)
        load_table_free(&topic.table)
        partial_free(&topic.partial)
        free(topic.queues)
        free(topic.smooth)
        free(topic.held)
        free(topic.broker)
        free(topic.broker_queue)
        free(topic.broker_lanes)
        free(topic.heap)
        free(topic.share)
        free(topic.available)
        free(topic.leaders)
        free(topic.name)
        free(topic)
    free(acc.topic_table)
    while acc.outlets != NULL:
        outlet = acc.outlets
        acc.outlets = outlet.next
        free(outlet.ready)
        free(outlet)
    while acc.deliveries != NULL:
        chunk = acc.deliveries
        acc.deliveries = chunk.next
        _chunk_free(chunk)
    drop_cache(acc)
    pthread_cond_destroy(&acc.work)
    pthread_cond_destroy(&acc.done)
    pthread_mutex_destroy(&acc.lock)


cdef void _chunk_free(chunk_t* chunk) noexcept nogil:
    _release_blocks(chunk)
    free(chunk)


cdef void _lane_free(lane_t* lane) noexcept nogil:
    cdef chunk_t* chunk
    if lane == NULL:
        return
    while lane.head != NULL:
        chunk = lane.head
        lane.head = chunk.next
        if not chunk.flying:
            _chunk_free(chunk)
    while lane.fly_head != NULL:
        chunk = lane.fly_head
        lane.fly_head = chunk.fly_next
        if chunk.refs < 2:  # otherwise the delivery list frees it
            _chunk_free(chunk)
    free(lane.latency)
    free(lane)


cdef lane_t* _lane_new(topic_t* topic, int32_t partition) noexcept nogil:
    cdef lane_t* lane = <lane_t*>calloc(1, sizeof(lane_t))
    if lane != NULL:
        lane.topic = topic
        lane.partition = partition
        lane.opened_us = fp_now_us()
    return lane


cdef topic_t* topic_find(accumulator_t* acc, const char* name, size_t size) noexcept nogil:
    """The topic of that name, or NULL."""
    cdef topic_t* topic
    cdef uint32_t hash = murmur2_bytes(<const unsigned char*>name, size)
    if acc.topic_mask == 0:
        return NULL
    topic = acc.topic_table[hash & acc.topic_mask]
    while topic != NULL and not (topic.hash == hash and topic.name_size == size and memcmp(topic.name, name, size) == 0):
        topic = topic.same_hash
    return topic


cdef int _add_to_table(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """-1 when memory is short."""
    cdef topic_t** wider
    cdef topic_t* other
    cdef uint32_t size
    if acc.topic_count >= acc.topic_mask:
        size = max(16, (acc.topic_mask + 1) * 2)
        wider = <topic_t**>calloc(size, sizeof(topic_t*))
        if wider == NULL:
            return -1
        other = acc.topics
        while other != NULL:
            other.same_hash = wider[other.hash & (size - 1)]
            wider[other.hash & (size - 1)] = other
            other = other.next
        free(acc.topic_table)
        acc.topic_table = wider
        acc.topic_mask = size - 1
    topic.same_hash = acc.topic_table[topic.hash & acc.topic_mask]
    acc.topic_table[topic.hash & acc.topic_mask] = topic
    acc.topic_count += 1
    return 0


cdef int32_t _level_of(accumulator_t* acc, const char* name, size_t size) noexcept nogil:
    """The level at the end of a topic's name, as in orders-2."""
    cdef int64_t level = 0, place = 1
    if acc.levels == 1:
        return 0
    while size > 0 and c'0' <= name[size - 1] <= c'9' and place < 1000000000:
        size -= 1
        level += (name[size] - c'0') * place
        place *= 10
    return <int32_t>min(level, acc.levels - 1)


cdef topic_t* topic_new(accumulator_t* acc, const char* name) noexcept nogil:
    """A topic whose partitions are not known yet; NULL when memory is short."""
    cdef topic_t* topic = <topic_t*>calloc(1, sizeof(topic_t))
    if topic == NULL:
        return NULL
    topic.name_size = strlen(name)
    topic.hash = murmur2_bytes(<const unsigned char*>name, topic.name_size)
    topic.name = strdup(name)
    topic.undecided = _lane_new(topic, -1)
    topic.lanes = <lanes_t*>calloc(1, sizeof(lanes_t))
    if topic.name == NULL or topic.undecided == NULL or topic.lanes == NULL or _add_to_table(acc, topic) < 0:
        free(topic.name)
        free(topic.undecided)
        free(topic.lanes)
        free(topic)
        return NULL
    topic.level = _level_of(acc, name, topic.name_size)
    topic.sticky.partition = -1
    topic.sticky.bound = acc.sticky_bytes
    topic.partial.random = partial_seed(acc.partial_seed, name, topic.name_size)
    topic.next = acc.topics
    acc.topics = topic
    return topic


cdef int _widen(topic_t* topic, int32_t partitions) noexcept nogil:
    """Room for so many lanes and what is kept per partition; -1 when memory is short."""
    cdef lanes_t* wider
    cdef lanes_t* lanes = topic.lanes
    cdef int32_t i
    if partitions <= lanes.size:
        return 0
    wider = <lanes_t*>calloc(1, sizeof(lanes_t))
    if wider == NULL:
        return -1
    wider.lanes = <lane_t**>calloc(partitions, sizeof(lane_t*))
    if (
        wider.lanes == NULL
        or _grow(<void**>&topic.available, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.leaders, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.heap, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.broker, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.broker_queue, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.broker_lanes, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.queues, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.smooth, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.held, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.share, partitions, sizeof(int64_t)) < 0
        or load_table_reserve(&topic.table, partitions) < 0
    ):
        free(wider.lanes)
        free(wider)
        return -1
    wider.size = partitions
    wider.previous = lanes
    for i in range(lanes.size):
        wider.lanes[i] = lanes.lanes[i]
    for i in range(lanes.size, partitions):
        topic.smooth[i] = -1
    fp_store_ptr(<void**>&topic.lanes, wider)
    return 0


cdef int topic_update(accumulator_t* acc, topic_t* topic, int32_t partitions, const int32_t* leaders) noexcept nogil:
    """Takes over a metadata answer; -1 when memory is short (nothing has changed then).

    Partitions that are new become electable, those without a leader stop being chosen for key-less records.
    """
    cdef int32_t i, j, n = 0
    if partitions == topic.partitions and memcmp(leaders, topic.leaders, partitions * sizeof(int32_t)) == 0:
        return 0  # nothing new
    if _widen(topic, partitions) < 0:
        return -1
    if acc.policy == POLICY_PARTIAL:
        if partitions < topic.partial.known:  # deleted and made anew: the draw is, too
            partial_free(&topic.partial)
        if partial_grow(&topic.partial, acc.partial_limit, partitions) < 0:
            topic.partitions = 0  # records wait until an answer finds memory
            return -1
    topic.brokers = 0
    for i in range(partitions):
        if i < topic.partitions and 0 <= topic.leaders[i] != leaders[i]:
            acc.leaders_moved = True
        topic.leaders[i] = leaders[i]
        if topic.lanes.lanes[i] != NULL and leaders[i] >= 0:
            _lead(acc, topic.lanes.lanes[i], leaders[i])
        if leaders[i] >= 0:
            topic.available[n] = i
            n += 1
            for j in range(i):  # usually found among the first few
                if leaders[j] == leaders[i]:
                    topic.broker[i] = topic.broker[j]
                    break
            else:
                topic.broker[i] = topic.brokers
                topic.brokers += 1
    topic.available_count = n
    topic.partitions = partitions
    topic.version += 1
    topic.table_us = 0
    topic.table.count = 0
    topic.uneven = topic.recurring = False
    topic.strikes = 0
    _restart_shares(acc, topic)
    i = topic.sticky.partition
    if i >= 0 and n and (i >= partitions or leaders[i] < 0):
        topic.sticky.partition = -1  # the next key-less record goes elsewhere
        topic.sticky.produced = 0
    return 0


cdef int _grow(void** array, int32_t count, size_t each) noexcept nogil:
    cdef void* grown = realloc(array[0], count * each)
    if grown == NULL:
        return -1
    array[0] = grown
    return 0


cdef lane_t* lane_of(accumulator_t* acc, topic_t* topic, int32_t partition) noexcept nogil:
    """The lane of a partition that metadata knows, opened on first use; NULL when memory is short."""
    cdef lane_t* lane = topic.lanes.lanes[partition]
    if lane == NULL:
        if acc.failing_opens:
            acc.failing_opens -= 1
            return NULL
        lane = _lane_new(topic, partition)
        if lane != NULL and _lead(acc, lane, topic.leaders[partition]) < 0:
            free(lane)
            lane = NULL
        if lane != NULL:
            acc.lanes_opened += 1
            fp_store_ptr(<void**>&topic.lanes.lanes[partition], lane)
    return lane


cdef void count_latency(lane_t* lane, int64_t us, int64_t records) noexcept nogil:
    """For statistics; without memory for the histogram they are not counted."""
    if lane.latency == NULL:
        lane.latency = <histogram_t*>calloc(1, sizeof(histogram_t))
    if lane.latency != NULL:
        histogram_add(lane.latency, us, records)
