# Which partition is next for key-less records: the load table, and the fewest bytes where it has nothing to say.

cdef void _restart_shares(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """Everybody starts even, in an order that differs from producer to producer."""
    cdef int32_t i, n = topic.available_count, at = 0 if n == 0 else <int32_t>(acc.random.state % <uint64_t>n)
    for i in range(n):
        topic.heap[i] = topic.available[(at + i) % n]
        topic.share[topic.heap[i]] = 0


cdef void _sink(topic_t* topic, int32_t i) noexcept nogil:
    """Moves entry `i` of the heap down to its place."""
    cdef int32_t child, partition = topic.heap[i], n = topic.available_count
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and topic.share[topic.heap[child + 1]] < topic.share[topic.heap[child]]:
            child += 1
        if topic.share[topic.heap[child]] >= topic.share[partition]:
            break
        topic.heap[i] = topic.heap[child]
        i = child
    topic.heap[i] = partition


cdef void _resume_shares(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """Queues are even again. Who had less catches up a little, so that a false alarm leaves no trace."""
    cdef int32_t i
    cdef int64_t most = 0
    for i in range(topic.available_count):
        most = max(most, topic.share[topic.available[i]])
    for i in range(topic.available_count):
        topic.share[topic.available[i]] = max(topic.share[topic.available[i]], most - CATCH_UP * acc.sticky_bytes)
    for i in range(topic.available_count // 2 - 1, -1, -1):
        _sink(topic, i)


cdef void _find_moving(accumulator_t* acc, topic_t* topic, int64_t now) noexcept nogil:
    """Notes in `broker_lanes` which brokers have acknowledged something lately: partitioner.availability.timeout.ms."""
    cdef int32_t i
    cdef lane_t* lane
    for i in range(topic.brokers):
        topic.broker_lanes[i] = 0
    for i in range(topic.available_count):
        lane = topic.lanes.lanes[topic.available[i]]
        if lane != NULL and fp_load64(&lane.progress_us) + acc.availability_us >= now:
            topic.broker_lanes[topic.broker[topic.available[i]]] = 1


cdef inline bint _is_stuck(topic_t* topic, lane_t* lane) noexcept nogil:
    """Whether records are queued and no partition of the same broker moves; after _find_moving."""
    return queued_records(lane) != 0 and not topic.broker_lanes[topic.broker[lane.partition]]


cdef bint _has_settled_in(lane_t* lane, int64_t now) noexcept nogil:
    """Whether the lane's queue tells how fast its broker is.

    While brokers are being connected, records pile up, and whoever is connected last looks slow until that first
    pile is gone.
    """
    if not lane.settled_in:
        if lane.first_pile == 0 and fp_load64(&lane.settled_records):
            lane.first_pile = lane.in_records
        lane.settled_in = (
            lane.first_pile and fp_load64(&lane.settled_records) >= lane.first_pile
        ) or now - lane.opened_us > START_US
    return lane.settled_in


cdef inline void _average(topic_t* topic, int32_t partition, int64_t queue, int64_t elapsed) noexcept nogil:
    """A partition's queue has been `queue` for some time.

    Where queues are uneven again and again, what sets them apart counts at once and what evens them later.
    """
    cdef int64_t change = queue - topic.smooth[partition]
    cdef int64_t span = AVERAGE_US
    cdef int64_t step
    if topic.recurring and (change < 0) == (topic.smooth[partition] > topic.mean_queue):
        span = FADE_US
    step = change * min(elapsed, span) // span
    if step == 0 and change:  # or rounding would stop it half-way
        step = 1 if change > 0 else -1
    topic.smooth[partition] += step


cdef void rebuild_table(accumulator_t* acc, topic_t* topic, int64_t now) noexcept nogil:
    """Weights from queue sizes, when the queues tell something.

    A snapshot of one queue is mostly noise: it shrinks by a whole wire batch at a time. So queues are averaged, over
    time and over the lanes of a broker, and the table decides only while one broker's are several times another's.
    Equal brokers then share evenly, and a slow one is noticed within a tenth of a second. A
    second time it is forgotten more slowly: a broker that stops and goes (long collections, a CPU quota) empties its
    queue between two stalls, while those of the others fill, and would be given its full share just before the next.
    And while the pool is full nobody looks; by the time there is room again a stalled broker may have answered
    everything, so the queues count as they were when it ran full.
    """
    cdef int32_t i, broker, partition, used = 0
    cdef int64_t queue, mean = 0, least = INT64_MAX, most = 0
    cdef int64_t elapsed = now - topic.table_us
    cdef int64_t blocked = 0
    cdef bint everyone = topic.available_count == topic.partitions
    cdef bint barred = False
    cdef lane_t* lane
    if topic.full_us:
        blocked = (acc.room_us if acc.room_us > topic.full_us else now) - topic.full_us
        topic.full_us = 0
        if blocked > STALL_US:
            elapsed = min(elapsed, max(TABLE_US, now - acc.room_us))
        else:
            blocked = 0
    topic.table_us = now
    topic.table.count = 0
    if acc.availability_us:
        _find_moving(acc, topic, now)
    for i in range(topic.available_count):
        partition = topic.available[i]
        lane = topic.lanes.lanes[partition]
        if lane != NULL and acc.availability_us and _is_stuck(topic, lane):
            barred = True
            continue
        topic.table.partitions[used] = partition
        used += 1
    for broker in range(topic.brokers):
        topic.broker_queue[broker] = 0
        topic.broker_lanes[broker] = 0
    for i in range(used):
        partition = topic.table.partitions[i]
        broker = topic.broker[partition]
        lane = topic.lanes.lanes[partition]
        topic.queues[i] = -1
        if lane != NULL and _has_settled_in(lane, now):
            queue = queued_bytes(lane) * 256 // acc.sticky_bytes
            if topic.smooth[partition] < 0:  # starts neutral
                topic.smooth[partition] = topic.mean_queue
            elif blocked:
                _average(topic, partition, topic.held[partition], blocked)
            _average(topic, partition, queue, elapsed)
            topic.held[partition] = queue
            topic.queues[i] = topic.smooth[partition]
            topic.broker_queue[broker] += topic.smooth[partition]
            topic.broker_lanes[broker] += 1
    broker = 0
    for i in range(topic.brokers):
        if topic.broker_lanes[i]:
            topic.broker_queue[i] //= topic.broker_lanes[i]
            least = min(least, topic.broker_queue[i])
            most = max(most, topic.broker_queue[i])
            mean += topic.broker_queue[i]
            broker += 1
    topic.mean_queue = mean // max(broker, 1)
    for i in range(used):
        # A lane counts as its broker does, unless it alone is far behind (a hot key fills it).
        broker = topic.broker[topic.table.partitions[i]]
        queue = topic.queues[i]
        if queue < 0:
            queue = topic.mean_queue
        elif queue > 4 * topic.broker_queue[broker] + 4 * 256:
            most = max(most, queue)
        else:
            queue = topic.broker_queue[broker]
        topic.queues[i] = queue // 256
    if least < INT64_MAX and most > (least * 2 + 256 if topic.uneven else least * 4 + 512):
        topic.strikes = min(STRIKES, topic.strikes + 1 + <int32_t>min(blocked // TABLE_US, STRIKES))
    else:
        topic.strikes = 0
    if barred and used or topic.strikes >= STRIKES:
        if not topic.uneven:
            topic.recurring = topic.even_us and now - topic.even_us < FADE_US
        topic.uneven = load_table_build(&topic.table, topic.queues, used, everyone and not barred)
    elif topic.uneven:
        topic.uneven = topic.recurring = False
        topic.even_us = now
        _resume_shares(acc, topic)


cdef int32_t choose(accumulator_t* acc, topic_t* topic, int64_t produced) noexcept nogil:
    """The next partition for key-less records, after the current one has had `produced` bytes.

    By weight while queues are uneven, else whoever has had least. Java draws at random in both cases, which leaves
    partitions several per cent apart; replay mode does as Java does.
    """
    cdef int64_t now
    if topic.available_count == 0:
        return <int32_t>pick_below(&acc.random, topic.partitions)
    if produced:
        topic.share[topic.sticky.partition] += produced
        if topic.heap[0] == topic.sticky.partition:
            _sink(topic, 0)
    if acc.adaptive:
        now = fp_now_us()
        if now - topic.table_us >= TABLE_US:
            rebuild_table(acc, topic, now)
        if topic.table.count:
            return topic.table.partitions[
                load_table_find(
                    &topic.table, pick_below(&acc.random, topic.table.cumulative[topic.table.count - 1])
                )
            ]
    if acc.random.counting:
        return topic.available[pick_below(&acc.random, topic.available_count)]
    return topic.heap[0]


cdef int32_t _choose_other(accumulator_t* acc, topic_t* topic, int32_t old) noexcept nogil:
    """KIP-480: any available partition but the old one."""
    cdef int32_t i, n = topic.available_count
    if n == 0:
        return <int32_t>pick_below(&acc.random, topic.partitions)
    i = <int32_t>pick_below(&acc.random, n)
    if topic.available[i] == old and n > 1:
        i = (i + 1 + <int32_t>pick_below(&acc.random, n - 1)) % n
    return topic.available[i]


cdef void weights_of(topic_t* topic, double* weights, int32_t size) noexcept nogil:
    """The share of key-less records that the load table gives each of the first `size` partitions at this moment."""
    cdef int32_t i
    cdef load_table_t* table = &topic.table
    for i in range(size):
        weights[i] = 0
        if table.count == 0 and i < topic.partitions and topic.leaders[i] >= 0:
            weights[i] = 1.0 / topic.available_count
    for i in range(table.count):
        if table.partitions[i] < size:
            weights[table.partitions[i]] = (
                table.cumulative[i] - (table.cumulative[i - 1] if i else 0)
            ) / <double>table.cumulative[table.count - 1]
