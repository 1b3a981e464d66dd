# Threads, clocks and atomics that nogil code uses: thin names over POSIX and compiler builtins.

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from * nogil:
    """
    #include <assert.h>
    #include <pthread.h>
    #include <sched.h>
    #include <stdint.h>
    #include <time.h>

    static inline int64_t fp_clock_us(clockid_t id) {
        struct timespec t;
        clock_gettime(id, &t);
        return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
    }
    /* monotonic microseconds: for linger, timeouts, latency */
    static inline int64_t fp_now_us(void) { return fp_clock_us(CLOCK_MONOTONIC); }
    /* the same to a few milliseconds, for a fraction of the cost where the kernel has such a clock */
    #ifdef CLOCK_MONOTONIC_COARSE
    static inline int64_t fp_about_now_us(void) { return fp_clock_us(CLOCK_MONOTONIC_COARSE); }
    #else
    static inline int64_t fp_about_now_us(void) { return fp_now_us(); }
    #endif
    /* wall-clock milliseconds: for record timestamps */
    static inline int64_t fp_wall_ms(void) { return fp_clock_us(CLOCK_REALTIME) / 1000; }

    /* held for microseconds: whoever finds it taken spins a little before it sleeps, which costs more than the wait */
    static inline void fp_mutex_init(pthread_mutex_t *m) {
        pthread_mutexattr_t a;
        pthread_mutexattr_init(&a);
    #ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
        pthread_mutexattr_settype(&a, PTHREAD_MUTEX_ADAPTIVE_NP);
    #endif
        pthread_mutex_init(m, &a);
        pthread_mutexattr_destroy(&a);
    }

    static inline void fp_cond_init(pthread_cond_t *c) {
        pthread_condattr_t a;
        pthread_condattr_init(&a);
    #ifndef __APPLE__
        pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    #endif
        pthread_cond_init(c, &a);
        pthread_condattr_destroy(&a);
    }
    /* waits until signalled or until `until_us` on the monotonic clock */
    static inline void fp_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t until_us) {
        struct timespec t;
    #ifdef __APPLE__
        int64_t left = until_us - fp_now_us();
        if (left <= 0) return;
        t.tv_sec = left / 1000000; t.tv_nsec = (left % 1000000) * 1000;
        pthread_cond_timedwait_relative_np(c, m, &t);
    #else
        t.tv_sec = until_us / 1000000; t.tv_nsec = (until_us % 1000000) * 1000;
        pthread_cond_timedwait(c, m, &t);
    #endif
    }

    /* A leaf lock for a few instructions at a time. Nothing is called and no other lock is taken under it,
       so holding it inside librdkafka's callbacks cannot deadlock. */
    static inline void fp_spin_lock(int *lock) {
        int tries = 0;
        while (__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE))
            if (++tries > 100) { sched_yield(); tries = 0; }
    }
    static inline void fp_spin_unlock(int *lock) { __atomic_store_n(lock, 0, __ATOMIC_RELEASE); }

    static inline int64_t fp_load64(int64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void fp_store64(int64_t *p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    /* for what one lock guards for writing and anybody reads */
    static inline void fp_grow64(int64_t *p, int64_t v) { fp_store64(p, fp_load64(p) + v); }
    static inline int64_t fp_add64(int64_t *p, int64_t v) { return __atomic_add_fetch(p, v, __ATOMIC_RELAXED); }
    static inline void *fp_load_ptr(void **p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void fp_store_ptr(void **p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void *fp_swap_ptr(void **p, void *v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
    static inline int fp_cas_ptr(void **p, void **expected, void *v) {
        return __atomic_compare_exchange_n(p, expected, v, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
    }
    /* floor(n * state / 2^64): maps a 64-bit fraction onto 0..n-1 without modulo bias */
    static inline uint64_t fp_scale(uint64_t fraction, uint64_t n) {
        return (uint64_t)(((unsigned __int128)fraction * n) >> 64);
    }
    #ifdef FASTPROD_DEBUG
    #define fp_assert(x) assert(x)
    #else
    #define fp_assert(x) ((void)0)
    #endif
    """
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_create(pthread_t*, void*, void* (*)(void*) noexcept nogil, void*)
    int pthread_join(pthread_t, void**)
    pthread_t pthread_self()
    int pthread_equal(pthread_t, pthread_t)
    void fp_mutex_init(pthread_mutex_t*)
    int pthread_mutex_lock(pthread_mutex_t*)
    int pthread_mutex_unlock(pthread_mutex_t*)
    int pthread_mutex_destroy(pthread_mutex_t*)
    int pthread_cond_signal(pthread_cond_t*)
    int pthread_cond_broadcast(pthread_cond_t*)
    int pthread_cond_wait(pthread_cond_t*, pthread_mutex_t*)
    int pthread_cond_destroy(pthread_cond_t*)
    int sched_yield()
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil)
    int64_t fp_now_us()
    int64_t fp_about_now_us()
    int64_t fp_wall_ms()
    void fp_cond_init(pthread_cond_t*)
    void fp_cond_wait_until(pthread_cond_t*, pthread_mutex_t*, int64_t)
    void fp_spin_lock(int*)
    void fp_spin_unlock(int*)
    int64_t fp_load64(int64_t*)
    void fp_store64(int64_t*, int64_t)
    void fp_grow64(int64_t*, int64_t)
    int64_t fp_add64(int64_t*, int64_t)
    void* fp_load_ptr(void**)
    void fp_store_ptr(void**, void*)
    void* fp_swap_ptr(void**, void*)
    int fp_cas_ptr(void**, void**, void*)
    uint64_t fp_scale(uint64_t, uint64_t)
    void fp_assert(bint)
