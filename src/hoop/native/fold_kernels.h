/* Kernels that combine blocks of elements; no include guard: core.c includes this file once for each instruction set.

   Before each inclusion core.c defines
     KERNEL(name)   the name with the suffix of the instruction set
     TARGET         the attribute that selects the instruction set; empty for the baseline of the compiler
     HAS_F16C       whether the instruction set converts float16

   Every kernel gives the bits of the NumPy expression in collectives/reduction.py. `out` never overlaps an operand. A
   kernel works element by element, so the instruction set cannot change a result. */

#define LESS_OR_NAN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define MORE_OR_NAN(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define LESS(a, b) ((a) < (b) ? (a) : (b))
#define MORE(a, b) ((a) > (b) ? (a) : (b))
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))

/* Two operands, and four combined from left to right, which reads and writes the intermediate block less often. */
#define DEFINE_PLAIN(name, type, work, operation) \
    TARGET static void KERNEL(name##_2)(void *restrict out, const void *left, const void *right, size_t count) \
    { \
        type *o = out; \
        const type *a = left, *b = right; \
        for (size_t i = 0; i < count; i++) \
            o[i] = (type)operation((work)a[i], (work)b[i]); \
    } \
    TARGET static void KERNEL(name##_4)(void *restrict out, const void *const *parts, size_t count) \
    { \
        type *o = out; \
        const type *a = parts[0], *b = parts[1], *c = parts[2], *d = parts[3]; \
        for (size_t i = 0; i < count; i++) { \
            const type ab = (type)operation((work)a[i], (work)b[i]); \
            const type abc = (type)operation((work)ab, (work)c[i]); \
            o[i] = (type)operation((work)abc, (work)d[i]); \
        } \
    }

DEFINE_PLAIN(float32_sum, float, float, PLUS)
DEFINE_PLAIN(float32_prod, float, float, TIMES)
DEFINE_PLAIN(float32_min, float, float, LESS_OR_NAN)
DEFINE_PLAIN(float32_max, float, float, MORE_OR_NAN)
DEFINE_PLAIN(float64_sum, double, double, PLUS)
DEFINE_PLAIN(float64_prod, double, double, TIMES)
DEFINE_PLAIN(float64_min, double, double, LESS_OR_NAN)
DEFINE_PLAIN(float64_max, double, double, MORE_OR_NAN)
/* Sums and products of integers wrap: they are computed without a sign, where that is defined. */
DEFINE_PLAIN(int8_sum, uint8_t, uint32_t, PLUS)
DEFINE_PLAIN(int8_prod, uint8_t, uint32_t, TIMES)
DEFINE_PLAIN(int8_min, int8_t, int8_t, LESS)
DEFINE_PLAIN(int8_max, int8_t, int8_t, MORE)
DEFINE_PLAIN(uint8_min, uint8_t, uint8_t, LESS)
DEFINE_PLAIN(uint8_max, uint8_t, uint8_t, MORE)
DEFINE_PLAIN(int32_sum, uint32_t, uint32_t, PLUS)
DEFINE_PLAIN(int32_prod, uint32_t, uint32_t, TIMES)
DEFINE_PLAIN(int32_min, int32_t, int32_t, LESS)
DEFINE_PLAIN(int32_max, int32_t, int32_t, MORE)
DEFINE_PLAIN(int64_sum, uint64_t, uint64_t, PLUS)
DEFINE_PLAIN(int64_prod, uint64_t, uint64_t, TIMES)
DEFINE_PLAIN(int64_min, int64_t, int64_t, LESS)
DEFINE_PLAIN(int64_max, int64_t, int64_t, MORE)

/* bfloat16: combined as float32, rounded to nearest even after every combination; a NaN stays a quiet NaN. */
#define DEFINE_BFLOAT16(name, operation) \
    TARGET static void KERNEL(bfloat16_##name##_2)(void *restrict out, const void *left, const void *right, \
                                                   size_t count) \
    { \
        uint16_t *o = out; \
        const uint16_t *a = left, *b = right; \
        for (size_t i = 0; i < count; i++) { \
            const float wide_left = float_of((uint32_t)a[i] << 16), wide_right = float_of((uint32_t)b[i] << 16); \
            o[i] = rounded_bfloat16(operation(wide_left, wide_right)); \
        } \
    }

DEFINE_BFLOAT16(sum, PLUS)
DEFINE_BFLOAT16(prod, TIMES)
DEFINE_BFLOAT16(min, LESS_OR_NAN)
DEFINE_BFLOAT16(max, MORE_OR_NAN)

/* float16: combined as float32, rounded to nearest even after every combination. MIN and MAX return an operand. */
#if HAS_F16C
#define DEFINE_FLOAT16(name, eight, one) \
    TARGET static void KERNEL(float16_##name##_2)(void *restrict out, const void *left, const void *right, \
                                                  size_t count) \
    { \
        uint16_t *o = out; \
        const uint16_t *a = left, *b = right; \
        size_t i = 0; \
        for (; i + 8 <= count; i += 8) { \
            const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i))); \
            const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i))); \
            _mm_storeu_si128((__m128i *)(o + i), _mm256_cvtps_ph(eight(x, y), _MM_FROUND_TO_NEAREST_INT)); \
        } \
        for (; i < count; i++) \
            o[i] = rounded_float16(one(float_of_float16(a[i]), float_of_float16(b[i]))); \
    }
DEFINE_FLOAT16(sum, _mm256_add_ps, PLUS)
DEFINE_FLOAT16(prod, _mm256_mul_ps, TIMES)
#undef DEFINE_FLOAT16
#else
#define DEFINE_FLOAT16(name, operation) \
    TARGET static void KERNEL(float16_##name##_2)(void *restrict out, const void *left, const void *right, \
                                                  size_t count) \
    { \
        uint16_t *o = out; \
        const uint16_t *a = left, *b = right; \
        for (size_t i = 0; i < count; i++) \
            o[i] = rounded_float16(operation(float_of_float16(a[i]), float_of_float16(b[i]))); \
    }
DEFINE_FLOAT16(sum, PLUS)
DEFINE_FLOAT16(prod, TIMES)
#undef DEFINE_FLOAT16
#endif

#define DEFINE_FLOAT16_CHOICE(name, compare) \
    TARGET static void KERNEL(float16_##name##_2)(void *restrict out, const void *left, const void *right, \
                                                  size_t count) \
    { \
        uint16_t *o = out; \
        const uint16_t *a = left, *b = right; \
        for (size_t i = 0; i < count; i++) { \
            const float x = float_of_float16(a[i]), y = float_of_float16(b[i]); \
            o[i] = x compare y || x != x ? a[i] : b[i]; \
        } \
    }
DEFINE_FLOAT16_CHOICE(min, <=)
DEFINE_FLOAT16_CHOICE(max, >=)

/* The division of AVG, in place. */
TARGET static void KERNEL(float32_divide)(void *block, uint32_t divisor, size_t count)
{
    float *values = block;
    for (size_t i = 0; i < count; i++)
        values[i] /= (float)divisor;
}
TARGET static void KERNEL(float64_divide)(void *block, uint32_t divisor, size_t count)
{
    double *values = block;
    for (size_t i = 0; i < count; i++)
        values[i] /= (double)divisor;
}
TARGET static void KERNEL(float16_divide)(void *block, uint32_t divisor, size_t count)
{
    uint16_t *values = block;
    const float rounded = float_of_float16(rounded_float16((float)divisor));
    for (size_t i = 0; i < count; i++)
        values[i] = rounded_float16(float_of_float16(values[i]) / rounded);
}
TARGET static void KERNEL(bfloat16_divide)(void *block, uint32_t divisor, size_t count)
{
    uint16_t *values = block;
    for (size_t i = 0; i < count; i++)
        values[i] = rounded_bfloat16(float_of((uint32_t)values[i] << 16) / (float)divisor);
}
#define DEFINE_INTEGER_DIVIDE(name, type) \
    TARGET static void KERNEL(name##_divide)(void *block, uint32_t divisor, size_t count) \
    { \
        type *values = block; \
        for (size_t i = 0; i < count; i++) \
            values[i] = (type)((int64_t)values[i] / (int64_t)divisor); \
    }
DEFINE_INTEGER_DIVIDE(int8, int8_t)
DEFINE_INTEGER_DIVIDE(uint8, uint8_t)
DEFINE_INTEGER_DIVIDE(int32, int32_t)
DEFINE_INTEGER_DIVIDE(int64, int64_t)

/* By element type, in the order of DTYPES in library.py, and operator, in the order of OPERATORS there. */
static const struct kernel KERNEL(kernels)[8][4] = {
#define PLAIN(sums, limits) \
    { \
        {KERNEL(sums##_sum_2), KERNEL(sums##_sum_4)}, {KERNEL(sums##_prod_2), KERNEL(sums##_prod_4)}, \
            {KERNEL(limits##_min_2), KERNEL(limits##_min_4)}, {KERNEL(limits##_max_2), KERNEL(limits##_max_4)}, \
    }
#define CONVERTED(type) \
    { \
        {KERNEL(type##_sum_2), 0}, {KERNEL(type##_prod_2), 0}, {KERNEL(type##_min_2), 0}, {KERNEL(type##_max_2), 0}, \
    }
    CONVERTED(float16),   PLAIN(float32, float32), PLAIN(float64, float64), CONVERTED(bfloat16),
    PLAIN(int8, int8),    PLAIN(int32, int32),     PLAIN(int64, int64),     PLAIN(int8, uint8),
#undef PLAIN
#undef CONVERTED
};
static const divide_function KERNEL(divides)[8] = {
    KERNEL(float16_divide), KERNEL(float32_divide), KERNEL(float64_divide), KERNEL(bfloat16_divide),
    KERNEL(int8_divide),    KERNEL(int32_divide),   KERNEL(int64_divide),   KERNEL(uint8_divide),
};

#undef LESS_OR_NAN
#undef MORE_OR_NAN
#undef LESS
#undef MORE
#undef PLUS
#undef TIMES
#undef DEFINE_PLAIN
#undef DEFINE_BFLOAT16
#undef DEFINE_FLOAT16_CHOICE
#undef DEFINE_INTEGER_DIVIDE
