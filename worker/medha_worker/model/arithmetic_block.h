/* Norms and gated activations for one vector width. arithmetic.c includes this once per instruction
   set, with WIDTH, TARGET, EACH and SET(x) of lanes.h. */

#include "../attention/lanes.h"

/* x / (1 + e^-x), by the exponential of -|x|, which cannot overflow. */
INLINE lanes SET(silu)(lanes x)
{
    const lanes zero = {0}, unit = zero + 1.0f;
    SET(ints) below = x < zero;
    lanes negative = (lanes)((SET(ints))x | INT32_MIN);
    lanes small = SET(power)(negative * (float)M_LOG2E);
    lanes upper = (lanes)(((SET(ints))small & below) | ((SET(ints))unit & ~below));
    return x * upper / (unit + small);
}

TARGET static void SET(gated)(const float *both, int64_t rows, int64_t size, float *out)
{
    for (int64_t r = 0; r < rows; r++, both += 2 * size, out += size)
        for (int64_t i = 0; i < size; i += WIDTH)
            *(lanes *)(out + i) =
                SET(silu)(*(const lanes *)(both + i)) * *(const lanes *)(both + size + i);
}

TARGET static void SET(norm)(const float *x, int64_t rows, int64_t size, const float *weight,
                             float eps, float *out)
{
    for (int64_t r = 0; r < rows; r++, x += size, out += size) {
        lanes sum = {0};
        for (int64_t i = 0; i < size; i += WIDTH) {
            lanes value = *(const lanes *)(x + i);
            sum += value * value;
        }
        const float squares = SET(total)(sum);
        const float scale = 1 / sqrtf(squares / size + eps);
        for (int64_t i = 0; i < size; i += WIDTH)
            *(lanes *)(out + i) = *(const lanes *)(x + i) * scale * *(const lanes *)(weight + i);
    }
}

#undef INLINE
#undef lanes
#undef WIDTH
#undef TARGET
#undef SET
#undef EACH
