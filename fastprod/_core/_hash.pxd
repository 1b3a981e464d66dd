from libc.stdint cimport int32_t, int64_t

# Kafka's murmur2 of `size` bytes, signed as in Java; `data` may have any alignment.
cdef int32_t murmur2_bytes(const unsigned char* data, int64_t size) noexcept nogil

# The partition Java's producer gives a key with that hash; `partitions` must be at least 1.
cdef inline int32_t partition_of_hash(int32_t hashed, int32_t partitions) noexcept nogil:
    return (hashed & 0x7fffffff) % partitions
