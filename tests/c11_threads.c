/* C11's threads by POSIX threads, for ThreadSanitizer: see CONTRIBUTING.md.

   librdkafka uses the former. gcc's ThreadSanitizer only knows the latter: it crashes in threads that it has not seen
   start, and takes what is handed over under a mutex that it has not seen for a race. glibc's types are the same. */

#include <errno.h>
#include <pthread.h>
#include <threads.h>

#define MUTEX(m) ((pthread_mutex_t *)(m))
#define COND(c) ((pthread_cond_t *)(c))

static int done(int error) {
    return error == 0 ? thrd_success : error == ETIMEDOUT ? thrd_timedout : error == EBUSY ? thrd_busy : thrd_error;
}

int thrd_create(thrd_t *thread, thrd_start_t run, void *arg) {
    return done(pthread_create(thread, NULL, (void *(*)(void *))run, arg));
}

int thrd_join(thrd_t thread, int *result) {
    void *value;
    int error = pthread_join(thread, &value);
    if (!error && result) *result = (int)(long)value;
    return done(error);
}

int mtx_init(mtx_t *mutex, int type) {
    pthread_mutexattr_t kind;
    int error;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, type & mtx_recursive ? PTHREAD_MUTEX_RECURSIVE : PTHREAD_MUTEX_NORMAL);
    error = pthread_mutex_init(MUTEX(mutex), &kind);
    pthread_mutexattr_destroy(&kind);
    return done(error);
}

int mtx_lock(mtx_t *mutex) { return done(pthread_mutex_lock(MUTEX(mutex))); }
int mtx_trylock(mtx_t *mutex) { return done(pthread_mutex_trylock(MUTEX(mutex))); }
int mtx_unlock(mtx_t *mutex) { return done(pthread_mutex_unlock(MUTEX(mutex))); }
void mtx_destroy(mtx_t *mutex) { pthread_mutex_destroy(MUTEX(mutex)); }

int cnd_init(cnd_t *cond) { return done(pthread_cond_init(COND(cond), NULL)); }
int cnd_wait(cnd_t *cond, mtx_t *mutex) { return done(pthread_cond_wait(COND(cond), MUTEX(mutex))); }
int cnd_timedwait(cnd_t *cond, mtx_t *mutex, const struct timespec *until) {
    return done(pthread_cond_timedwait(COND(cond), MUTEX(mutex), until));
}
int cnd_signal(cnd_t *cond) { return done(pthread_cond_signal(COND(cond))); }
int cnd_broadcast(cnd_t *cond) { return done(pthread_cond_broadcast(COND(cond))); }
void cnd_destroy(cnd_t *cond) { pthread_cond_destroy(COND(cond)); }
