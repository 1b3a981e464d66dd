# The figures behind Producer.stats().

cdef tuple snapshot(Runtime self):
    """Runtime.snapshot"""
    cdef client_t* client = self.client
    cdef broker_t* broker
    cdef broker_t copy
    cdef topic_t* topic
    cdef char* text = NULL
    self.check_fork()
    if not self.counting:  # by another thread
        self.counting = True
        try:
            with nogil:
                count_repeated(client, not self.closed)
        finally:
            self.counting = False
    brokers = {}
    broker = <broker_t*>fp_load_ptr(<void**>&client.brokers)
    while broker != NULL:  # brokers are only ever added, in front
        fp_spin_lock(&client.brokers_lock)
        memcpy(&copy, broker, sizeof(broker_t))
        fp_spin_unlock(&client.brokers_lock)
        broker = broker.next
        if not copy.known or copy.id < 0:  # librdkafka has heard of it, no more, or it is known by its number as well
            continue
        brokers[copy.id] = (
            bool(copy.up) and not self.closed, copy.sent, copy.sent - copy.answered, copy.failed,
            copy.repeated, _durations(&copy.round_trip), copy.round_trip.sum_us,
        )
    topics = {}
    for name in list(self.topics):
        topic = <topic_t*><size_t>self.topics[name]
        topics[name] = (
            queued_records(topic.undecided), fp_load64(&topic.undecided.failed_records), lanes_of(self, topic)
        )
    pthread_mutex_lock(&client.acc.lock)
    if client.statistics != NULL:
        text = strdup(client.statistics)
    moved = bool(client.acc.leaders_moved)
    pthread_mutex_unlock(&client.acc.lock)
    try:
        told = None if text == NULL else text.decode(errors="replace")
    finally:
        free(text)
    return topics, brokers, told, moved


cdef dict lanes_of(Runtime self, topic_t* topic):
    """Figures of the opened lanes by partition."""
    cdef client_t* client = self.client
    cdef lane_t lane
    cdef lane_t* found
    cdef histogram_t latency
    cdef double* weights
    cdef int32_t i, leader = -1
    cdef lanes_t* lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
    figures = {}
    weights = <double*>malloc(max(lanes.size, 1) * sizeof(double))
    if weights == NULL:
        raise MemoryError()
    pthread_mutex_lock(&client.acc.lock)
    weights_of(topic, weights, lanes.size)
    pthread_mutex_unlock(&client.acc.lock)
    for i in range(lanes.size):  # lanes are never freed while the producer lives
        found = <lane_t*>fp_load_ptr(<void**>&lanes.lanes[i])
        if found == NULL:
            continue
        pthread_mutex_lock(&client.acc.lock)
        leader = topic.leaders[i] if i < topic.partitions else -1
        fp_spin_lock(&found.spin)
        memcpy(&lane, found, sizeof(lane_t))
        if found.latency != NULL:
            memcpy(&latency, found.latency, sizeof(histogram_t))
        else:
            memset(&latency, 0, sizeof(histogram_t))
        fp_spin_unlock(&found.spin)
        pthread_mutex_unlock(&client.acc.lock)
        figures[i] = (
            lane.settled_records - lane.failed_records, lane.settled_bytes - lane.failed_bytes, lane.failed_records,
            queued_records(&lane), queued_bytes(&lane), weights[i], (fp_now_us() - lane.opened_us) / 1e6, leader,
            lane.settled_then, lane.retries, _durations(&latency), latency.sum_us,
        )
    free(weights)
    return figures


cdef list MIDDLES = [bucket_middle_us(_i) / 1e6 for _i in range(BUCKETS)]


cdef dict _durations(histogram_t* histogram):
    """How often by seconds. Hundreds of partitions have tens of these each, so they are made where they end up."""
    cdef int32_t i
    return {MIDDLES[i]: histogram.counts[i] for i in range(BUCKETS) if histogram.counts[i]}
