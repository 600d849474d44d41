/* Norms, gated activations and penalties of rows in float32, each in one pass: torch takes several,
   and its exponential a scalar at a time where rows are not contiguous. Products of few rows with FP8
   weights, which are widened in registers. Plain C: no Python, no torch; native_arithmetic.py checks
   all inputs. The instruction set is chosen at each call. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Rows that share a widened weight, at most. */
#define FP8_ROWS 4

#define SET(x) x##_plain
#define TARGET
#define WIDTH 4
#define EACH(mask) FOUR(mask, 0)
#include "arithmetic_block.h"

#if defined(__x86_64__)
#define SET(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4)
#include "arithmetic_block.h"

#define SET(x) x##_avx512
#define TARGET __attribute__((target("avx512f")))
#define WIDTH 16
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4), FOUR(mask, 8), FOUR(mask, 12)
#include "arithmetic_block.h"
#endif

/* Calls the widest version of at most `width` lanes that this machine has. */
#if defined(__x86_64__)
#define CALL(name, width, ...)                                                                     \
    do {                                                                                           \
        __builtin_cpu_init();                                                                      \
        if (width >= 16 && __builtin_cpu_supports("avx512f"))                                      \
            name##_avx512(__VA_ARGS__);                                                            \
        else if (width >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))    \
            name##_avx2(__VA_ARGS__);                                                              \
        else                                                                                       \
            name##_plain(__VA_ARGS__);                                                             \
    } while (0)
#else
#define CALL(name, width, ...) name##_plain(__VA_ARGS__)
#endif

/* out = silu(gate) * up for rows `both` [rows, 2 * size], gates first; `size` a multiple of 16. */
void medha_gated(const float *both, int64_t rows, int64_t size, float *out, int64_t width)
{
    CALL(gated, width, both, rows, size, out);
}

/* out = x / sqrt(mean x^2 + eps) * weight for rows `x` [rows, size]; `size` a multiple of 16. */
void medha_norm(const float *x, int64_t rows, int64_t size, const float *weight, double eps,
                float *out, int64_t width)
{
    CALL(norm, width, x, rows, size, weight, (float)eps, out);
}

/* out = x W for rows `x` [rows, inputs] and FP8 `numbers` [outputs, inputs], inputs = step * parts:
   input i of output o counts scales[of_output[o], i / step] times; `step` a multiple of 32. Of every
   32 inputs, x has the even ones first. */
void medha_fp8(const float *x, int64_t rows, int64_t step, int64_t parts, const char *numbers,
               int64_t outputs, const float *scales, const int32_t *of_output, float *out,
               int64_t width)
{
    CALL(fp8, width, x, rows, step, parts, numbers, outputs, scales, of_output, out);
}

/* Penalties of one row of `size` scores, in place: by the repetition penalty of each token, the
   smaller of product and quotient (if it `raises`, the larger); `once` from tokens with a count, and
   `each` times it. */
void medha_penalised(float *score, const float *factor, const float *count, int64_t size,
                     int64_t raises, double once, double each, int64_t width)
{
    CALL(penalised, width, score, factor, count, size, raises, (float)once, (float)each);
}
