/* Hoop's native core: barriers and all-reduces between ranks that map each other's memory, and kernels that prepare
   the operands of a step (operand_kernels.h).

   Python (library.py) fills the structures below and calls the functions at the end of this file through ctypes, which
   releases the interpreter lock. A structure belongs to one endpoint or to one prepared operation; one thread at a time
   uses it. Only `failed` is written by other threads.

   No function waits without a limit: a call that is not finished returns HOOP_AGAIN, and the caller calls it again. So
   deadlines, signals and errors are handled in Python.

   A barrier: every rank counts the barriers that it has entered in its own segment, and waits until the counts of all
   ranks have reached its own. A count is stored with release order and loaded with acquire order, so what a rank wrote
   before it entered is visible to every rank that has seen its count, on every processor; nothing here reads a peer's
   memory otherwise. A rank that waits polls the counts, then sleeps in a futex that all ranks share. The rank that
   finds all counts complete when it enters is the last one, and wakes all sleepers with one call of the kernel. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define HOOP_DONE 0
#define HOOP_AGAIN 1    /* not finished: call again */
#define HOOP_FAILED 2   /* a peer is lost or the endpoint was aborted */
#define HOOP_MISMATCH 3 /* ranks have called different collectives */

#define BLOCK_BYTES 4096 /* of the intermediate result of a fold: it stays in the first cache */
#define LINE_BYTES 64
#define PIECE_BYTES 65536 /* STAGED: at least this much, so that windows and vectors of a piece stay in the caches */
#define SLICE_BYTES 8192  /* STAGED: at least this much of a piece for each rank */
#define FIRST_POLLS 100  /* before the first yield, where every rank has a core */

struct hoop_sleepers { /* in the segment of rank 0, on a cache line of its own */
    _Atomic uint32_t wakes;    /* the futex: changed before sleepers are woken */
    _Atomic uint32_t sleepers; /* ranks that sleep, or are about to */
};

struct hoop_endpoint {
    uint32_t rank, size;
    uint32_t polls;   /* before every yield; 0: ranks share cores */
    uint32_t yields;  /* before the call returns HOOP_AGAIN */
    uint32_t waiting; /* whether this rank has entered a barrier that is not finished */
    _Atomic uint32_t failed; /* set by any thread of this process */
    uint64_t barriers;       /* entered by this rank */
    uint64_t publications;   /* vectors published by this rank; windows alternate */
    _Atomic uint64_t **entered;        /* [size]: how many barriers each rank has entered, in its segment */
    struct hoop_sleepers *sleepers;    /* of all ranks */
    _Atomic uint64_t *peer_left;       /* not 0 once a peer has closed its endpoint, in this rank's segment */
    _Atomic uint64_t *fingerprints[2]; /* [size] each: of the ranks' calls, in the segment of rank 0 */
};

enum { FLAT, STAGED, DIRECT, ORDERED };

struct hoop_step { /* one addition of an ordered sum: operands and result are parts, or temporaries behind them */
    uint32_t left, right, result;
};

struct hoop_all_reduce {
    struct hoop_endpoint *endpoint;
    uint64_t fingerprint; /* of the call that all ranks compare at the first barrier */
    uint64_t count;       /* elements */
    uint64_t capacity;    /* STAGED: elements that fit into a window */
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
    uint32_t phase;       /* 0: not begun; else the number of the barrier that it waits in, from 1 on */
    uint64_t publication; /* FLAT, STAGED: the number of its first publication */
    int64_t started_ns;
    int64_t waited_ns;  /* out: how long the first barrier of the last call took */
};

/* ---- element types */

typedef void (*two_function)(void *restrict out, const void *left, const void *right, size_t count);
typedef void (*four_function)(void *restrict out, const void *const *parts, size_t count);
typedef void (*divide_function)(void *block, uint32_t divisor, size_t count);
typedef void (*normalise_function)(const uint8_t *images, const int64_t *rows, uint64_t count, uint64_t row_bytes,
                                   uint64_t channels, const float *means, const float *factors, float *out);
typedef void (*transpose_function)(const float *from, uint64_t rows, uint64_t columns, float *into);
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
#define HAS_AVX2 0
#include "fold_kernels.h"
#include "operand_kernels.h"
#undef KERNEL
#undef TARGET
#undef HAS_F16C
#undef HAS_AVX2
#if defined(__x86_64__)
#define KERNEL(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define HAS_F16C 1
#define HAS_AVX2 1
#include "fold_kernels.h"
#include "operand_kernels.h"
#endif

static const struct kernel (*kernels)[4] = kernels_baseline;
static const divide_function *divides = divides_baseline;
static normalise_function normalise = normalise_baseline;
static transpose_function transpose = transpose_baseline;

#if defined(__x86_64__)
/* Whether the processor and the kernel support AVX2 and F16C. __builtin_cpu_supports does not link with ziglang. */
static int has_avx2(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C))
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2))
        return 0;
    __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & 6) == 6; /* the kernel saves the wide registers */
}
#endif

__attribute__((constructor)) static void choose_kernels(void)
{
#if defined(__x86_64__)
    if (has_avx2()) {
        kernels = kernels_avx2;
        divides = divides_avx2;
        normalise = normalise_avx2;
        transpose = transpose_avx2;
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

static int all_entered(const struct hoop_endpoint *endpoint)
{
    for (uint32_t rank = 0; rank < endpoint->size; rank++)
        if (atomic_load_explicit(endpoint->entered[rank], memory_order_acquire) < endpoint->barriers)
            return 0;
    return 1;
}

/* Wakes all ranks that sleep; each looks again whether it has to wait. */
static void wake_sleepers(struct hoop_sleepers *shared)
{
    atomic_fetch_add(&shared->wakes, 1);
    syscall(SYS_futex, &shared->wakes, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

/* Sleeps until the last rank enters, this process fails, a signal comes or `sleep_ns` have passed. The last rank stores
   its count and then looks for sleepers; this one counts itself a sleeper and then looks at the counts. Each has a
   sequentially consistent fence in between, so one of the two sees the other; if this one is not yet asleep when it is
   woken, `wakes` has changed. */
static void sleep_until_woken(const struct hoop_endpoint *endpoint, int64_t sleep_ns)
{
    struct hoop_sleepers *shared = endpoint->sleepers;
    const struct timespec limit = {sleep_ns / 1000000000, sleep_ns % 1000000000};
    const uint32_t wakes = atomic_load(&shared->wakes);
    atomic_fetch_add(&shared->sleepers, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (!all_entered(endpoint) && !atomic_load(&endpoint->failed))
        syscall(SYS_futex, &shared->wakes, FUTEX_WAIT, wakes, &limit, 0, 0);
    atomic_fetch_sub(&shared->sleepers, 1);
}

/* Waits for the ranks that have not entered; returns whether all have. It polls, for peers that run on other cores, and
   yields its core now and then, for peers that need it. With `sleep_ns` it sleeps first. */
static int await_all(const struct hoop_endpoint *endpoint, int64_t sleep_ns)
{
    if (all_entered(endpoint))
        return 1;
    if (sleep_ns > 0) {
        sleep_until_woken(endpoint, sleep_ns);
        return all_entered(endpoint);
    }
    uint32_t polls = endpoint->polls ? FIRST_POLLS : 0;
    for (uint32_t yields = 0; yields < endpoint->yields; yields++) {
        for (uint32_t poll = 0; poll < polls; poll++) {
            relax();
            if (all_entered(endpoint))
                return 1;
        }
        polls = endpoint->polls;
        sched_yield();
        if (all_entered(endpoint))
            return 1;
    }
    return 0;
}

/* Whether a rank has closed its endpoint. It may have changed its memory since: what this rank has read there before
   it calls this counts only if it returns 0. */
static int any_left(const struct hoop_endpoint *endpoint)
{
    atomic_thread_fence(memory_order_acquire); /* what was read before is read before the word */
    return atomic_load_explicit(endpoint->peer_left, memory_order_relaxed) != 0;
}

/* Enters a barrier, or goes on waiting in the one that it has entered. A rank that was lost after it entered does not
   fail the barrier: only the next one. */
static int barrier(struct hoop_endpoint *endpoint, uint32_t compares, uint64_t fingerprint, int64_t sleep_ns)
{
    if (!endpoint->waiting) {
        if (atomic_load_explicit(&endpoint->failed, memory_order_acquire) || any_left(endpoint))
            return HOOP_FAILED;
        _Atomic uint64_t *own = &endpoint->fingerprints[++endpoint->barriers & 1][endpoint->rank];
        /* An operation that runs repeatedly finds its fingerprint written: no cache line moves between cores. */
        if (compares && atomic_load_explicit(own, memory_order_relaxed) != fingerprint)
            atomic_store_explicit(own, fingerprint, memory_order_relaxed);
        atomic_store_explicit(endpoint->entered[endpoint->rank], endpoint->barriers, memory_order_release);
        atomic_thread_fence(memory_order_seq_cst); /* so at least one rank finds here that it is the last */
        if (all_entered(endpoint) && atomic_load(&endpoint->sleepers->sleepers))
            wake_sleepers(endpoint->sleepers);
        endpoint->waiting = 1;
    }
    if (!await_all(endpoint, sleep_ns)) {
        if (!atomic_load_explicit(&endpoint->failed, memory_order_acquire))
            return HOOP_AGAIN;
        if (!all_entered(endpoint)) { /* after `failed` was read: a peer may be lost after it entered */
            endpoint->waiting = 0;
            return HOOP_FAILED;
        }
    }
    endpoint->waiting = 0;
    const _Atomic uint64_t *row = endpoint->fingerprints[endpoint->barriers & 1];
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

/* STAGED: the elements of a piece. Pieces are of one length, except for the last one, which may be shorter. */
static uint64_t piece_elements(const struct hoop_all_reduce *all)
{
    if (all->algorithm != STAGED)
        return all->count;
    const uint64_t shares = (uint64_t)all->endpoint->size * SLICE_BYTES;
    const uint64_t wanted = (shares > PIECE_BYTES ? shares : PIECE_BYTES) / all->itemsize;
    const uint64_t fitting = (all->count + all->capacity - 1) / all->capacity, more = all->count / wanted;
    const uint64_t pieces = more > fitting ? more : fitting;
    const uint64_t line = LINE_BYTES / all->itemsize, lines = (all->count + line - 1) / line;
    return (lines + pieces - 1) / pieces * line;
}

/* A piece of the vector, and the windows that it goes through. */
struct piece {
    char *source, *destination; /* this rank's */
    char **windows;             /* [size] */
    uint64_t elements;
    uint64_t layout; /* the elements that slices are cut from: those of a whole piece */
};

static struct piece piece_at(const struct hoop_all_reduce *all, uint64_t index)
{
    const uint64_t length = piece_elements(all), start = index * length, left = all->count - start;
    return (struct piece){
        .source = all->source + start * all->itemsize,
        .destination = all->destination + start * all->itemsize,
        .windows = all->windows[(all->publication + index) & 1],
        .elements = left < length ? left : length,
        .layout = length,
    };
}

/* The bytes [low, high) of a piece that a rank folds. They are at the same place in every piece: so a rank may publish
   a piece in a window in which others still read the slice that it has folded of the piece before the last. */
static void piece_slice(const struct hoop_all_reduce *all, const struct piece *piece, uint32_t rank, uint64_t *low,
                        uint64_t *high)
{
    own_slice(all, rank, piece->layout, low, high);
    *low = (*low < piece->elements ? *low : piece->elements) * all->itemsize;
    *high = (*high < piece->elements ? *high : piece->elements) * all->itemsize;
}

/* FLAT, STAGED: writes what other ranks read of this rank's vector to its window. */
static void publish(const struct hoop_all_reduce *all, uint64_t index)
{
    const struct piece piece = piece_at(all, index);
    char *window = piece.windows[all->endpoint->rank];
    uint64_t low = 0, high = 0;
    if (all->algorithm == STAGED) /* nobody reads its own slice before it is folded */
        piece_slice(all, &piece, all->endpoint->rank, &low, &high);
    copy(window, piece.source, 0, low);
    copy(window, piece.source, high, piece.elements * all->itemsize);
}

/* FLAT, STAGED: folds what all ranks have published; STAGED: this rank's slice, also into its window. */
static void fold_published(const struct hoop_all_reduce *all, uint64_t index)
{
    const struct hoop_endpoint *endpoint = all->endpoint;
    const struct piece piece = piece_at(all, index);
    char *parts[endpoint->size];
    memcpy(parts, piece.windows, sizeof parts);
    parts[endpoint->rank] = piece.source;
    char *targets[2] = {piece.destination, piece.windows[endpoint->rank]};
    uint64_t low = 0, high = piece.elements * all->itemsize;
    if (all->algorithm == STAGED)
        piece_slice(all, &piece, endpoint->rank, &low, &high);
    fold(all, parts, low, high, targets, all->algorithm == STAGED ? 2 : 1);
}

/* STAGED: copies the slices that other ranks have folded. */
static void take_slices(const struct hoop_all_reduce *all, uint64_t index)
{
    const struct hoop_endpoint *endpoint = all->endpoint;
    const struct piece piece = piece_at(all, index);
    for (uint32_t step = 1; step < endpoint->size; step++) { /* not all ranks read the same window first */
        const uint32_t peer = (endpoint->rank + step) % endpoint->size;
        uint64_t low, high;
        piece_slice(all, &piece, peer, &low, &high);
        copy(piece.destination, piece.windows[peer], low, high);
    }
}

/* DIRECT, ORDERED: folds this rank's slice from all ranks' vectors into all ranks' vectors. */
static void fold_in_place(const struct hoop_all_reduce *all)
{
    uint64_t low = all->low, high = all->high;
    if (all->algorithm == DIRECT)
        own_slice(all, all->endpoint->rank, all->count, &low, &high);
    fold(all, all->parts, low * all->itemsize, high * all->itemsize, all->targets, all->endpoint->size);
}

static void begin(struct hoop_all_reduce *all)
{
    struct hoop_endpoint *endpoint = all->endpoint;
    if (all->algorithm == ORDERED)
        all->started_ns = now_ns();
    if (all->algorithm > STAGED || !all->count)
        return;
    const uint64_t length = piece_elements(all);
    all->publication = endpoint->publications + 1;
    endpoint->publications += (all->count + length - 1) / length;
    publish(all, 0);
}

/* What comes after the barrier with this index, from 0 on; returns whether another barrier follows.

   STAGED: between two barriers a rank takes the slices of one piece, folds its own of the next, and publishes the one
   after that: so a vector of k pieces takes k + 1 barriers. */
static int after_barrier(struct hoop_all_reduce *all, uint64_t index)
{
    if (!index && all->algorithm == ORDERED)
        all->waited_ns = now_ns() - all->started_ns;
    if (!all->count)
        return 0;
    if (all->algorithm == FLAT) {
        fold_published(all, 0);
        return 0;
    }
    if (all->algorithm != STAGED) {
        if (!index)
            fold_in_place(all);
        return !index;
    }
    const uint64_t length = piece_elements(all), pieces = (all->count + length - 1) / length;
    if (index)
        take_slices(all, index - 1);
    if (index < pieces)
        fold_published(all, index);
    if (index + 1 < pieces)
        publish(all, index + 1);
    return index < pieces;
}

static int run(struct hoop_all_reduce *all, int64_t sleep_ns)
{
    if (!all->phase) {
        begin(all);
        all->phase = 1;
    }
    for (;;) {
        const int code = barrier(all->endpoint, all->phase == 1 && all->compares, all->fingerprint, sleep_ns);
        if (code != HOOP_DONE) {
            if (code != HOOP_AGAIN)
                all->phase = 0;
            return code;
        }
        sleep_ns = 0; /* it slept because a rank was late; in the next barrier it polls first */
        if (!after_barrier(all, all->phase - 1))
            break;
        all->phase++;
    }
    all->phase = 0;
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

/* Wakes all ranks that sleep in a barrier, after `failed` was set. */
EXPORT void hoop_wake(struct hoop_endpoint *endpoint)
{
    wake_sleepers(endpoint->sleepers);
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

/* Images as floats: see operand_kernels.h. The caller has checked that every row is in `images`. */
EXPORT void hoop_normalise(const uint8_t *images, const int64_t *rows, uint64_t count, uint64_t row_bytes,
                           uint64_t channels, const float *means, const float *factors, float *out)
{
    normalise(images, rows, count, row_bytes, channels, means, factors, out);
}

/* The transpose of a contiguous matrix. */
EXPORT void hoop_transpose(const float *from, uint64_t rows, uint64_t columns, float *into)
{
    transpose(from, rows, columns, into);
}
