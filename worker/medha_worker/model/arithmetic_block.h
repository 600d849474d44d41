/* Norms, gated activations, penalties and FP8 products for one vector width. arithmetic.c includes this once per instruction
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

TARGET static void SET(penalised)(float *restrict score, const float *restrict factor,
                                  const float *restrict count, int64_t size, int64_t raises,
                                  float once, float each)
{
    for (int64_t i = 0; i < size; i++) {
        const float product = score[i] * factor[i], quotient = score[i] / factor[i];
        const float less = product < quotient ? product : quotient;
        const float more = product < quotient ? quotient : product;
        const float some = count[i] < 1 ? count[i] : 1;
        score[i] = (raises ? more : less) - some * once - count[i] * each;
    }
}

/* FP8 numbers (e4m3) in float32, without denormals on the way: from bits 20 to 26 of `bits`, and the
   signs of `sign`; NaN reads as 480. */
INLINE lanes SET(widened)(SET(words) bits, SET(words) sign)
{
    SET(ints) own = (SET(ints))(bits & 0x7f << 20), small = own < 1 << 23;
    SET(ints) normal = own + (120 << 23);
    SET(ints) denormal = (SET(ints))((lanes)(own + (121 << 23)) - 0x1p-6f);
    return (lanes)((denormal & small) | (normal & ~small) | ((SET(ints))sign & INT32_MIN));
}

/* Products of `rows` rows, a constant, with one output's `parts` of `step` inputs each. */
INLINE void SET(fp8_rows)(const float *x, int64_t rows, int64_t step, int64_t parts,
                          const char *numbers, const float *scales, float *out, int64_t stride)
{
    lanes sum[FP8_ROWS] = {{0}};
    for (int64_t p = 0; p < parts; p++, numbers += step) {
        lanes part[FP8_ROWS] = {{0}};
        for (int64_t i = 0; i < step; i += 32)
            for (int64_t j = 0; j < 16; j += WIDTH) {
                const SET(halves) *pairs = (const SET(halves) *)(numbers + i + 2 * j);
                SET(words) both = __builtin_convertvector(*pairs, SET(words));
                lanes even = SET(widened)(both << 20, both << 24);
                lanes odd = SET(widened)(both << 12, both << 16);
                for (int64_t r = 0; r < rows; r++) {
                    const float *own = x + (r * parts + p) * step + i + j;
                    part[r] += even * *(const lanes *)own + odd * *(const lanes *)(own + 16);
                }
            }
        for (int64_t r = 0; r < rows; r++)
            sum[r] += part[r] * scales[p];
    }
    for (int64_t r = 0; r < rows; r++)
        out[r * stride] = SET(total)(sum[r]);
}

TARGET static void SET(fp8)(const float *x, int64_t rows, int64_t step, int64_t parts,
                            const char *numbers, int64_t outputs, const float *scales,
                            const int32_t *of_output, float *out)
{
    const int64_t inputs = step * parts;
    for (; rows > 0; rows -= FP8_ROWS, x += FP8_ROWS * inputs, out += FP8_ROWS * outputs)
        for (int64_t o = 0; o < outputs; o++) {
            const char *own = numbers + o * inputs;
            const float *scale = scales + of_output[o] * parts;
            switch (rows) {
            case 1: SET(fp8_rows)(x, 1, step, parts, own, scale, out + o, outputs); break;
            case 2: SET(fp8_rows)(x, 2, step, parts, own, scale, out + o, outputs); break;
            case 3: SET(fp8_rows)(x, 3, step, parts, own, scale, out + o, outputs); break;
            default: SET(fp8_rows)(x, FP8_ROWS, step, parts, own, scale, out + o, outputs);
            }
        }
}

#undef INLINE
#undef lanes
#undef WIDTH
#undef TARGET
#undef SET
#undef EACH
