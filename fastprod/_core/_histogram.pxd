# Durations counted in buckets that grow with them: 16 to every power of two, so a value is known to 3 per cent.
#
#   microseconds   0 .. 15     16 .. 31    32 .. 63     ...   2^29 .. 2^30-1 (18 minutes; longer ones count as that)
#   buckets        0 .. 15     16 .. 31    32 .. 47     ...   416 .. 431
#   each           1           1           2            ...   2^25 microseconds wide

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from * nogil:
    """
    static inline int fp_log2(uint64_t x) { return 63 - __builtin_clzll(x); }
    """
    int fp_log2(uint64_t)

cdef enum:
    BUCKETS = 432
    LONGEST_US = (1 << 30) - 1

ctypedef struct histogram_t:
    int64_t counts[BUCKETS]
    int64_t sum_us          # of all durations, for the mean


cdef inline int32_t bucket_of(int64_t us) noexcept nogil:
    cdef int power
    if us < 16:
        return <int32_t>us if us > 0 else 0
    if us > LONGEST_US:
        us = LONGEST_US
    power = fp_log2(<uint64_t>us)
    return ((power - 3) << 4) + <int32_t>((us >> (power - 4)) & 15)


cdef inline double bucket_middle_us(int32_t bucket) noexcept nogil:
    cdef int shift
    if bucket < 16:
        return bucket
    shift = (bucket >> 4) - 1
    return ((16 + (bucket & 15)) << shift) + ((<int64_t>1 << shift) - 1) / 2.0


cdef inline void histogram_add(histogram_t* histogram, int64_t us, int64_t times) noexcept nogil:
    histogram.counts[bucket_of(us)] += times
    histogram.sum_us += us * times
