/* Hoop's native core: barriers and all-reduces between ranks that map each other's memory.

   Python (library.py) fills the structures below and calls the functions at the end of this file through ctypes, which
   releases the interpreter lock. A structure belongs to one endpoint or to one prepared operation; one thread at a time
   uses it. Only `failed` is written by other threads.

   No function waits without a limit: a call that is not finished returns HOOP_AGAIN, and the caller calls it again. So
   deadlines, signals and errors are handled in Python.

   The protocol is the one of transport/shm_endpoint.py: in round k of a barrier rank r posts a semaphore of rank
   r + 2^k and acquires its own. A post releases the memory written before it and an acquired post acquires it, on every
   processor; nothing here reads a peer's memory without an acquired post in between. */

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HOOP_DONE 0
#define HOOP_AGAIN 1    /* not finished: call again */
#define HOOP_FAILED 2   /* a peer is lost or the endpoint was aborted */
#define HOOP_MISMATCH 3 /* ranks have called different collectives */

#define BLOCK_BYTES 4096 /* of the intermediate result of a fold: it stays in the first cache */
#define LINE_BYTES 64
#define FIRST_POLLS 100  /* before the first yield, where every rank has a core */

struct hoop_endpoint {
    uint32_t rank, size, rounds;
    uint32_t polls;  /* before every yield; 0: ranks share cores */
    uint32_t yields; /* before the call returns HOOP_AGAIN */
    uint32_t posted_rounds; /* rounds in which this rank has posted, of a barrier that is not finished; else 0 */
    uint64_t barriers;      /* entered by this rank */
    uint64_t publications;  /* vectors published by this rank; windows alternate */
    sem_t **own_rounds;     /* [2][rounds]: posted by peers, acquired here */
    sem_t **peer_rounds;    /* [2][rounds]: posted here */
    _Atomic uint64_t **entered;         /* [size]: how many barriers each rank has entered, in its segment */
    _Atomic uint64_t *peer_left;        /* not 0 once a peer has closed its endpoint, in this rank's segment */
    _Atomic uint64_t *fingerprints[2];  /* [size] each: of the ranks' calls, in the segment of rank 0 */
    _Atomic uint32_t failed;            /* set by any thread of this process */
};

enum { FLAT, STAGED, DIRECT, ORDERED };

struct hoop_step { /* one addition of an ordered sum: operands and result are parts, or temporaries behind them */
    uint32_t left, right, result;
};

struct hoop_all_reduce {
    struct hoop_endpoint *endpoint;
    uint64_t fingerprint; /* of the call that all ranks compare at the first barrier */
    uint64_t count;       /* elements */
    uint64_t piece;       /* STAGED: elements that fit into a window */
    uint64_t low, high;   /* ORDERED: the elements that this rank sums */
    uint32_t compares;    /* whether the first barrier compares calls */
    uint32_t algorithm, dtype, operator, itemsize;
    uint32_t average;     /* divide by the number of ranks */
    uint32_t parts_count; /* ORDERED: vectors in parts */
    uint32_t steps_count;
    uint32_t result;      /* ORDERED: the part or temporary that holds the sum */
    char **windows[2];    /* FLAT, STAGED: [size] each, the ranks' windows for even and odd publications */
    char **parts;         /* DIRECT: [size] the ranks' sources; ORDERED: [parts_count] */
    char **targets;       /* DIRECT, ORDERED: [size] the ranks' destinations */
    const struct hoop_step *steps;
    char *temporaries; /* blocks of BLOCK_BYTES: two, or for ORDERED as many as its steps use */
    char *source, *destination; /* FLAT, STAGED: this rank's vectors */
    /* the state of a call that is not finished */
    uint32_t phase;
    uint32_t parity;
    uint64_t start;     /* STAGED: the first element of the current piece */
    int64_t started_ns;
    int64_t waited_ns;  /* out: how long the first barrier of the last call took */
};

/* ---- element types */

typedef void (*two_function)(void *restrict out, const void *left, const void *right, size_t count);
typedef void (*four_function)(void *restrict out, const void *const *parts, size_t count);
typedef void (*divide_function)(void *block, uint32_t divisor, size_t count);
struct kernel {
    two_function two;
    four_function four; /* 0: combine two at a time */
};

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t rounded_bfloat16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

static inline float float_of_float16(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) /* infinity or NaN */
        return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x400)
        return float_of(sign | ((magnitude + 0x1C000) << 13));
    /* A subnormal number is its digits times 2^-24, exactly. */
    const float value = (float)magnitude * 0x1p-24f;
    return sign ? -value : value;
}

static inline uint16_t rounded_float16(float value)
{
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    if (magnitude > 0x7F800000) /* NaN: quiet */
        return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x477FF000) /* rounds to infinity */
        return (uint16_t)(sign | 0x7C00);
    if (magnitude >= 0x38800000) { /* a normal float16 */
        const uint32_t rebiased = magnitude - 0x38000000;
        return (uint16_t)(sign | (rebiased + 0xFFF + (rebiased >> 13 & 1)) >> 13);
    }
    if (magnitude < 0x33000000) /* below half of the smallest subnormal number */
        return sign;
    const uint32_t digits = (magnitude & 0x7FFFFF) | 0x800000, shift = 126 - (magnitude >> 23);
    const uint32_t kept = digits >> shift, rest = digits & ((1u << shift) - 1), half = 1u << (shift - 1);
    return (uint16_t)(sign | (kept + (rest > half || (rest == half && (kept & 1)))));
}

#define KERNEL(name) name##_baseline
#define TARGET
#define HAS_F16C 0
#include "fold_kernels.h"
#if defined(__x86_64__)
#define KERNEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HAS_F16C 1
#include "fold_kernels.h"
#endif

static const struct kernel (*kernels)[4] = kernels_baseline;
static const divide_function *divides = divides_baseline;

__attribute__((constructor)) static void choose_kernels(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        kernels = kernels_avx2;
        divides = divides_avx2;
    }
#endif
}

/* ---- folding */

/* Combines block `at` of the parts in their order; returns where the result is: in one of two temporaries. */
static const char *fold_block(const struct hoop_all_reduce *all, char *const *parts, uint32_t parts_count, uint64_t at,
                              size_t elements)
{
    const struct kernel kernel = kernels[all->dtype][all->operator];
    const char *result = parts[0] + at;
    char *into = all->temporaries, *other = all->temporaries + BLOCK_BYTES;
    for (uint32_t next = 1; next < parts_count;) {
        if (kernel.four && parts_count - next >= 3) {
            const void *four[4] = {result, parts[next] + at, parts[next + 1] + at, parts[next + 2] + at};
            kernel.four(into, four, elements);
            next += 3;
        } else {
            kernel.two(into, result, parts[next] + at, elements);
            next += 1;
        }
        result = into;
        into = other;
        other = (char *)result;
    }
    if (all->average)
        divides[all->dtype]((char *)result, parts_count, elements);
    return result;
}

/* Adds along the steps of an ordered sum. */
static const char *sum_block(const struct hoop_all_reduce *all, uint64_t at, size_t elements)
{
    const struct kernel kernel = kernels[all->dtype][all->operator];
#define OPERAND(index)                                                                                                 \
    ((index) < all->parts_count ? all->parts[index] + at                                                               \
                                : all->temporaries + (size_t)((index)-all->parts_count) * BLOCK_BYTES)
    for (uint32_t i = 0; i < all->steps_count; i++) {
        const struct hoop_step step = all->steps[i];
        kernel.two(OPERAND(step.result), OPERAND(step.left), OPERAND(step.right), elements);
    }
    return OPERAND(all->result);
#undef OPERAND
}

/* Folds bytes [low, high) of the parts and copies the result to the same bytes of every target. A target may be one of
   the parts: a block is written only after it was read. */
static void fold(const struct hoop_all_reduce *all, char *const *parts, uint64_t low, uint64_t high,
                 char *const *targets, uint32_t targets_count)
{
    const uint32_t size = all->endpoint->size;
    for (uint64_t at = low; at < high; at += BLOCK_BYTES) {
        const size_t bytes = high - at < BLOCK_BYTES ? high - at : BLOCK_BYTES, elements = bytes / all->itemsize;
        const char *result =
            all->algorithm == ORDERED ? sum_block(all, at, elements) : fold_block(all, parts, size, at, elements);
        for (uint32_t target = 0; target < targets_count; target++)
            if (targets[target] + at != result)
                memcpy(targets[target] + at, result, bytes);
    }
}

/* ---- waiting */

static inline void relax(void)
{
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Sleeps until there is a post, at most `sleep_ns`, or until a signal comes. */
static int sleep_for_post(sem_t *semaphore, int64_t sleep_ns)
{
    struct timespec until;
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
    const clockid_t clock = CLOCK_MONOTONIC;
#else
    const clockid_t clock = CLOCK_REALTIME;
#endif
    clock_gettime(clock, &until);
    const int64_t ns = until.tv_nsec + sleep_ns;
    until.tv_sec += ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 30)
    return sem_clockwait(semaphore, clock, &until) == 0 ? HOOP_DONE : HOOP_AGAIN;
#else
    return sem_timedwait(semaphore, &until) == 0 ? HOOP_DONE : HOOP_AGAIN;
#endif
}

/* Acquires a post. Without `sleep_ns` it polls, for peers that run on other cores, and yields its core now and then,
   for peers that need it. */
static int acquire(const struct hoop_endpoint *endpoint, sem_t *semaphore, int64_t sleep_ns)
{
    if (sem_trywait(semaphore) == 0)
        return HOOP_DONE;
    if (sleep_ns > 0)
        return sleep_for_post(semaphore, sleep_ns);
    uint32_t polls = endpoint->polls ? FIRST_POLLS : 0;
    for (uint32_t yields = 0; yields < endpoint->yields; yields++) {
        for (uint32_t poll = 0; poll < polls; poll++) {
            relax();
            if (sem_trywait(semaphore) == 0)
                return HOOP_DONE;
        }
        polls = endpoint->polls;
        sched_yield();
        if (sem_trywait(semaphore) == 0)
            return HOOP_DONE;
    }
    return HOOP_AGAIN;
}

static int all_entered(const struct hoop_endpoint *endpoint)
{
    for (uint32_t rank = 0; rank < endpoint->size; rank++)
        if (atomic_load_explicit(endpoint->entered[rank], memory_order_acquire) < endpoint->barriers)
            return 0;
    return 1;
}

/* Whether a rank has closed its endpoint. It may have changed its memory since: what this rank has read there before
   it calls this counts only if it returns 0. */
static int any_left(const struct hoop_endpoint *endpoint)
{
    atomic_thread_fence(memory_order_acquire); /* what was read before is read before the word */
    return atomic_load_explicit(endpoint->peer_left, memory_order_relaxed) != 0;
}

static int barrier(struct hoop_endpoint *endpoint, uint32_t compares, uint64_t fingerprint, int64_t sleep_ns)
{
    const uint32_t resumed = endpoint->posted_rounds;
    /* A barrier that is not finished goes on if every rank has entered it: a peer may have left since. */
    if (atomic_load_explicit(&endpoint->failed, memory_order_acquire) && !(resumed && all_entered(endpoint))) {
        endpoint->posted_rounds = 0;
        return HOOP_FAILED;
    }
    if (!resumed && any_left(endpoint))
        return HOOP_FAILED;
    uint32_t round = resumed ? resumed - 1 : 0;
    if (!resumed)
        endpoint->barriers++;
    const uint32_t turn = endpoint->barriers & 1;
    _Atomic uint64_t *row = endpoint->fingerprints[turn];
    /* An operation that runs repeatedly finds its fingerprint written: no cache line moves between cores. */
    if (compares && !resumed && atomic_load_explicit(&row[endpoint->rank], memory_order_relaxed) != fingerprint)
        atomic_store_explicit(&row[endpoint->rank], fingerprint, memory_order_relaxed);
    /* A rank whose peer was lost may have acquired a post that only woke it; then it goes by these counts. */
    if (!resumed)
        atomic_store_explicit(endpoint->entered[endpoint->rank], endpoint->barriers, memory_order_release);
    for (; round < endpoint->rounds; round++) {
        const uint32_t index = turn * endpoint->rounds + round;
        if (!resumed || round >= resumed)
            sem_post(endpoint->peer_rounds[index]);
        if (acquire(endpoint, endpoint->own_rounds[index], sleep_ns) != HOOP_DONE) {
            endpoint->posted_rounds = round + 1;
            return HOOP_AGAIN;
        }
        /* A peer may be lost after it entered. */
        if (atomic_load_explicit(&endpoint->failed, memory_order_acquire) && !all_entered(endpoint)) {
            endpoint->posted_rounds = 0;
            return HOOP_FAILED;
        }
    }
    endpoint->posted_rounds = 0;
    if (compares)
        for (uint32_t rank = 0; rank < endpoint->size; rank++)
            if (atomic_load_explicit(&row[rank], memory_order_relaxed) != fingerprint)
                return HOOP_MISMATCH;
    return HOOP_DONE;
}

/* ---- all-reduce */

/* The elements [low, high) of `count` that a rank folds: whole cache lines, so that no two ranks write to one. */
static void own_slice(const struct hoop_all_reduce *all, uint32_t rank, uint64_t count, uint64_t *low, uint64_t *high)
{
    const uint64_t line = LINE_BYTES / all->itemsize, lines = (count + line - 1) / line, size = all->endpoint->size;
    const uint64_t first = lines * rank / size * line, last = lines * (rank + 1) / size * line;
    *low = first < count ? first : count;
    *high = last < count ? last : count;
}

static void copy(char *into, const char *from, uint64_t low, uint64_t high)
{
    if (high > low && into != from)
        memcpy(into + low, from + low, high - low);
}

static uint64_t piece_length(const struct hoop_all_reduce *all)
{
    const uint64_t left = all->count - all->start;
    return all->algorithm == STAGED && left > all->piece ? all->piece : left;
}

/* Phase 0: writes what other ranks read of this rank's vector to its window. */
static void publish(struct hoop_all_reduce *all)
{
    if (all->algorithm > STAGED || !all->count)
        return;
    struct hoop_endpoint *endpoint = all->endpoint;
    all->parity = ++endpoint->publications & 1;
    char *window = all->windows[all->parity][endpoint->rank];
    const char *source = all->source + all->start * all->itemsize;
    const uint64_t length = piece_length(all);
    uint64_t low = 0, high = 0;
    if (all->algorithm == STAGED) /* nobody reads its own slice before it is folded */
        own_slice(all, endpoint->rank, length, &low, &high);
    copy(window, source, 0, low * all->itemsize);
    copy(window, source, high * all->itemsize, length * all->itemsize);
}

/* Phase 1, after the first barrier: every rank has published. */
static void fold_published(struct hoop_all_reduce *all)
{
    const struct hoop_endpoint *endpoint = all->endpoint;
    const uint64_t item = all->itemsize;
    uint64_t low, high;
    if (all->algorithm == ORDERED) {
        fold(all, 0, all->low * item, all->high * item, all->targets, endpoint->size);
        return;
    }
    if (all->algorithm == DIRECT) {
        own_slice(all, endpoint->rank, all->count, &low, &high);
        fold(all, all->parts, low * item, high * item, all->targets, endpoint->size);
        return;
    }
    char **windows = all->windows[all->parity];
    char *parts[endpoint->size];
    memcpy(parts, windows, sizeof parts);
    parts[endpoint->rank] = all->source + all->start * item;
    char *targets[2] = {all->destination + all->start * item, windows[endpoint->rank]};
    const uint64_t length = piece_length(all);
    if (all->algorithm == FLAT) {
        fold(all, parts, 0, length * item, targets, 1);
    } else {
        own_slice(all, endpoint->rank, length, &low, &high);
        fold(all, parts, low * item, high * item, targets, 2);
    }
}

/* Phase 2 of STAGED, after the second barrier: copies the slices that other ranks have folded. */
static void take_slices(struct hoop_all_reduce *all)
{
    const struct hoop_endpoint *endpoint = all->endpoint;
    const uint64_t length = piece_length(all), item = all->itemsize;
    char *destination = all->destination + all->start * item;
    for (uint32_t step = 1; step < endpoint->size; step++) { /* not all ranks read the same window first */
        const uint32_t peer = (endpoint->rank + step) % endpoint->size;
        uint64_t low, high;
        own_slice(all, peer, length, &low, &high);
        copy(destination, all->windows[all->parity][peer], low * item, high * item);
    }
}

static int run(struct hoop_all_reduce *all, int64_t sleep_ns)
{
    struct hoop_endpoint *endpoint = all->endpoint;
    for (;;) {
        if (all->phase == 0) {
            publish(all);
            all->phase = 1;
            if (all->algorithm == ORDERED)
                all->started_ns = now_ns();
        }
        const uint32_t compares = all->phase == 1 && all->start == 0 && all->compares;
        const int code = barrier(endpoint, compares, all->fingerprint, sleep_ns);
        if (code != HOOP_DONE) {
            if (code != HOOP_AGAIN)
                all->phase = 0, all->start = 0;
            return code;
        }
        if (all->phase == 1) {
            if (all->algorithm == ORDERED)
                all->waited_ns = now_ns() - all->started_ns;
            if (all->count)
                fold_published(all);
            if (all->algorithm == FLAT || !all->count)
                break;
            all->phase = 2;
            continue;
        }
        if (all->algorithm == STAGED) {
            take_slices(all);
            all->start += piece_length(all);
            if (all->start < all->count) {
                all->phase = 0;
                continue;
            }
        }
        break;
    }
    all->phase = 0;
    all->start = 0;
    return HOOP_DONE;
}

/* ---- what Python calls */

#define EXPORT __attribute__((visibility("default")))
#ifndef HOOP_SOURCE_HASH
#define HOOP_SOURCE_HASH 0
#endif

/* The hash of the sources that this library was built from. */
EXPORT uint64_t hoop_source_hash(void)
{
    return HOOP_SOURCE_HASH;
}

/* The sizes of the structures, which library.py describes again. */
EXPORT uint32_t hoop_endpoint_bytes(void)
{
    return sizeof(struct hoop_endpoint);
}

EXPORT uint32_t hoop_all_reduce_bytes(void)
{
    return sizeof(struct hoop_all_reduce);
}

EXPORT const char *hoop_instruction_set(void)
{
    return kernels == kernels_baseline ? "baseline" : "avx2";
}

EXPORT int hoop_barrier(struct hoop_endpoint *endpoint, uint32_t compares, uint64_t fingerprint, int64_t sleep_ns)
{
    return barrier(endpoint, compares, fingerprint, sleep_ns);
}

/* The same without sleeping, with as few arguments as possible: each costs a tenth of a microsecond in ctypes. */
EXPORT int hoop_meet(struct hoop_endpoint *endpoint)
{
    return barrier(endpoint, 0, 0, 0);
}

EXPORT int hoop_meet_comparing(struct hoop_endpoint *endpoint, uint64_t fingerprint)
{
    return barrier(endpoint, 1, fingerprint, 0);
}

/* Runs the all-reduce on the vectors set before, or goes on with it. It polls for the others and does not sleep. */
EXPORT int hoop_all_reduce(struct hoop_all_reduce *all)
{
    return run(all, 0);
}

/* Goes on with an all-reduce that is not finished; sleeps at most `sleep_ns` at a time. */
EXPORT int hoop_all_reduce_resume(struct hoop_all_reduce *all, int64_t sleep_ns)
{
    return run(all, sleep_ns);
}

/* `size` vectors folded in their order into `destination`, for tests: no other rank takes part. */
EXPORT void hoop_fold(struct hoop_all_reduce *all, char **parts, char *destination)
{
    fold(all, parts, 0, all->count * all->itemsize, &destination, 1);
}
