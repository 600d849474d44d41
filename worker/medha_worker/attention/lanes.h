/* Registers of float32 lanes for one vector width, and the weights of attention's softmax. Kernels
   include this once per instruction set, with

     WIDTH   float lanes of a register           TARGET  attribute that allows the instructions
     SET(x)  x with the set's suffix             EACH(f) f(0), f(1), ... f(WIDTH - 1)

   Scores are kept in base 2, so that a weight is one power of two. */

#ifndef BLOCK
/* Lane i of the result is lane `mask(i)` of a and b side by side. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (SET(ints)){__VA_ARGS__})
#endif
#define FOUR(mask, i) mask(i), mask(i + 1), mask(i + 2), mask(i + 3)
#define FLIP_1(i) ((i) ^ 1)
#define FLIP_2(i) ((i) ^ 2)
#define FLIP_4(i) ((i) ^ 4)
#define FLIP_8(i) ((i) ^ 8)

/* Tokens of one block, at most. */
#define BLOCK 64

/* State of a query head: its largest score so far, and the sum of 2^(score - most). */
struct state {
    float most, total;
};

/* out / total, and log(sum of e^score); (0, -inf) where every score is -inf. */
static inline void finish(int64_t heads, int64_t dim, const struct state *state, float *out, float *lse)
{
    for (int64_t h = 0; h < heads; h++) {
        float inverse = state[h].total == 0 ? 0 : 1 / state[h].total;
        for (int64_t d = 0; d < dim; d++)
            out[h * dim + d] *= inverse;
        lse[h] = state[h].total == 0 ? -INFINITY
                                     : (float)((state[h].most + log2(state[h].total)) * M_LN2);
    }
}
#endif

typedef float SET(lanes) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t SET(ints) __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t SET(words) __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t SET(halves) __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
#define lanes SET(lanes)
#define INLINE static inline __attribute__((always_inline)) TARGET

/* WIDTH scalars of the pool, in float32: bfloat16 is its upper half. */
INLINE lanes SET(load)(const char *at, int narrow)
{
    if (!narrow)
        return *(const lanes *)at;
    return (lanes)(__builtin_convertvector(*(const SET(halves) *)at, SET(words)) << 16);
}

/* Of each lane the larger; where `y` is NaN, `x`. */
INLINE lanes SET(larger)(lanes x, lanes y)
{
    SET(ints) more = y > x;
    return (lanes)(((SET(ints))y & more) | ((SET(ints))x & ~more));
}

/* In all lanes, the largest of `x`, and the sum. */
INLINE lanes SET(largest)(lanes x)
{
#if WIDTH > 8
    x = SET(larger)(x, PICK(x, x, EACH(FLIP_8)));
#endif
#if WIDTH > 4
    x = SET(larger)(x, PICK(x, x, EACH(FLIP_4)));
#endif
    x = SET(larger)(x, PICK(x, x, EACH(FLIP_2)));
    return SET(larger)(x, PICK(x, x, EACH(FLIP_1)));
}
INLINE float SET(total)(lanes x)
{
#if WIDTH > 8
    x += PICK(x, x, EACH(FLIP_8));
#endif
#if WIDTH > 4
    x += PICK(x, x, EACH(FLIP_4));
#endif
    x += PICK(x, x, EACH(FLIP_2));
    x += PICK(x, x, EACH(FLIP_1));
    return x[0];
}

/* 2^x for x <= 0, and 0 where that is below 2^-126.5. NaN stays NaN. With n the nearest whole number,
   2^x = 2^n * e^(f ln 2), |f| <= 1/2: Taylor's series to the seventh power, relative error < 2e-7. */
INLINE lanes SET(power)(lanes x)
{
    const lanes zero = {0}, least = zero - 127.0f;
    const lanes round = zero + 0x1.8p23f; /* adding it leaves n in the low bits */
    SET(ints) below = x < least;
    x = (lanes)(((SET(ints))least & below) | ((SET(ints))x & ~below));
    lanes shifted = x + round;
    lanes f = x - (shifted - round);
    lanes p = zero + 1.5252734e-5f;
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    SET(ints) n = (SET(ints))shifted - (SET(ints))round;
    return p * (lanes)((n + 127) << 23);
}

/* Weights of the block's tokens for one query head, from its plain scores [BLOCK], in place; returns
   by what the output so far shrinks. `state` is its running maximum and sum. */
INLINE float SET(weigh)(float *score, int tokens, float scale, struct state *state)
{
    lanes top = (lanes){0} - FLT_MAX;
    for (int t = tokens; t % WIDTH; t++)
        score[t] = -INFINITY;
    for (int t = 0; t < tokens; t += WIDTH) {
        *(lanes *)(score + t) *= scale;
        top = SET(larger)(top, *(lanes *)(score + t));
    }
    lanes total = {0}, before = total + state->most;
    top = SET(largest)(SET(larger)(before, top));
    for (int t = 0; t < tokens; t += WIDTH)
        total += *(lanes *)(score + t) = SET(power)(*(lanes *)(score + t) - top);
    float shrink = SET(power)(before - top)[0];
    state->most = top[0];
    state->total = state->total * shrink + SET(total)(total);
    return shrink;
}
