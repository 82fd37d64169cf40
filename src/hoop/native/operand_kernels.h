/* Kernels that prepare the operands of a step; no include guard: core.c includes this file once for each instruction
   set, with the macros of fold_kernels.h. HAS_AVX2 says whether the instruction set has vectors of 8 floats.

   Every kernel gives the bits of the Python expression that it replaces. */

#define LINES_AHEAD 2 /* rows whose bytes are fetched into the cache before they are used */
#define TILE 8

/* Rows of bytes as floats: (byte - mean) * factor, two roundings, as data/images.py does it with NumPy. Row i of `out`
   is row rows[i] of `images`, or row i if `rows` is 0. Each of `channels` equal parts of a row has its own constants. */
TARGET static void KERNEL(normalise)(const uint8_t *images, const int64_t *rows, uint64_t count, uint64_t row_bytes,
                                     uint64_t channels, const float *means, const float *factors, float *out)
{
    const uint64_t plane = row_bytes / channels;
    for (uint64_t i = 0; i < count; i++) {
        if (rows && i + LINES_AHEAD < count) {
            const uint8_t *ahead = images + (uint64_t)rows[i + LINES_AHEAD] * row_bytes;
            for (uint64_t at = 0; at < row_bytes; at += LINE_BYTES)
                __builtin_prefetch(ahead + at);
        }
        const uint8_t *restrict from = images + (rows ? (uint64_t)rows[i] : i) * row_bytes;
        float *restrict into = out + i * row_bytes;
        for (uint64_t channel = 0; channel < channels; channel++) {
            const float mean = means[channel], factor = factors[channel];
            for (uint64_t at = 0; at < plane; at++)
                into[at] = ((float)from[at] - mean) * factor;
            from += plane;
            into += plane;
        }
    }
}

/* The elements [low, high) x [left, right) of a matrix with `columns` columns, into its transpose with `rows` columns. */
TARGET static void KERNEL(transpose_one_by_one)(const float *from, uint64_t rows, uint64_t columns, uint64_t low,
                                                uint64_t high, uint64_t left, uint64_t right, float *into)
{
    for (uint64_t column = left; column < right; column++)
        for (uint64_t row = low; row < high; row++)
            into[column * rows + row] = from[row * columns + column];
}

#if HAS_AVX2
TARGET static void KERNEL(transpose_tile)(const float *from, uint64_t rows, uint64_t columns, float *into)
{
    __m256 r[TILE], pairs[TILE], fours[TILE];
    for (int i = 0; i < TILE; i++)
        r[i] = _mm256_loadu_ps(from + (uint64_t)i * columns);
    for (int i = 0; i < TILE; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xEE);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(into + (uint64_t)i * rows, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(into + (uint64_t)(i + 4) * rows, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}
#else
TARGET static void KERNEL(transpose_tile)(const float *from, uint64_t rows, uint64_t columns, float *into)
{
    KERNEL(transpose_one_by_one)(from, rows, columns, 0, TILE, 0, TILE, into);
}
#endif

/* The transpose of a matrix of `rows` x `columns`, tile by tile. */
TARGET static void KERNEL(transpose)(const float *from, uint64_t rows, uint64_t columns, float *into)
{
    const uint64_t whole_rows = rows - rows % TILE, whole_columns = columns - columns % TILE;
    for (uint64_t column = 0; column < whole_columns; column += TILE)
        for (uint64_t row = 0; row < whole_rows; row += TILE)
            KERNEL(transpose_tile)(from + row * columns + column, rows, columns, into + column * rows + row);
    KERNEL(transpose_one_by_one)(from, rows, columns, whole_rows, rows, 0, whole_columns, into);
    KERNEL(transpose_one_by_one)(from, rows, columns, 0, rows, whole_columns, columns, into);
}

#undef LINES_AHEAD
#undef TILE
