/* Attention of a few query heads over one block of tokens, for one vector width. singles.c includes
   this once per instruction set, with

     WIDTH   float lanes of a register           TARGET  attribute that allows the instructions
     TILE    registers of output per query head  SET(x)  x with the set's suffix

   A block is at most BLOCK tokens of one page and one KV head: its keys are contiguous, and so are
   its values. Scores are kept in base 2, so that a weight is one power of two. */

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

/* The sums of the lanes of x[0] ... x[3]. Neighbours are added while they are brought side by side:
   first within quarters of four lanes, then quarter onto quarter. */
INLINE quad SET(sums)(const lanes *x)
{
    lanes a = PICK(x[0], x[1], EACH(LOW)) + PICK(x[0], x[1], EACH(HIGH));
    lanes b = PICK(x[2], x[3], EACH(LOW)) + PICK(x[2], x[3], EACH(HIGH));
    lanes c = PICK(a, b, EACH(LEFT)) + PICK(a, b, EACH(RIGHT));
    quad part[WIDTH / 4];
    memcpy(part, &c, sizeof c);
    for (int half = WIDTH / 8; half; half /= 2)
        for (int i = 0; i < half; i++)
            part[i] += part[i + half];
    return part[0];
}

/* Of each lane the larger; where `y` is NaN, `x`. */
INLINE lanes SET(larger)(lanes x, lanes y)
{
    SET(ints) more = y > x;
    return (lanes)(((SET(ints))y & more) | ((SET(ints))x & ~more));
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
    float most = state->most, sum[WIDTH];
    for (int i = 0; i < WIDTH; i++)
        most = top[i] > most ? top[i] : most;
    lanes total = {0};
    for (int t = 0; t < tokens; t += WIDTH)
        total += *(lanes *)(score + t) = SET(power)(*(lanes *)(score + t) - most);
    *(lanes *)sum = SET(power)((lanes){0} + (state->most - most));
    state->most = most;
    float shrink = sum[0];
    *(lanes *)sum = total;
    for (int i = 1; i < WIDTH; i++)
        sum[0] += sum[i];
    state->total = state->total * shrink + sum[0];
    return shrink;
}

/* The weighted values of the block, `tile` registers wide from dimension `d` on, into `out`. */
INLINE void SET(spread)(int heads, int tile, int narrow, int dim, int d, const struct block *block,
                        float (*weight)[BLOCK], const float *shrink, float *out)
{
    const int bytes = narrow ? 2 : 4, size = dim * bytes;
    lanes sum[HEADS][TILE];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < tile; i++)
            sum[h][i] = *(lanes *)(out + h * dim + d + i * WIDTH) * shrink[h];
    for (int t = 0; t < block->tokens; t++) {
        if (d == 0)
            FETCH(block->next_values + t * size, size);
        for (int i = 0; i < tile; i++) {
            const char *at = block->values + t * size + (d + i * WIDTH) * bytes;
            lanes value = SET(load)(at, narrow);
            for (int h = 0; h < heads; h++)
                sum[h][i] += value * weight[h][t];
        }
    }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < tile; i++)
            *(lanes *)(out + h * dim + d + i * WIDTH) = sum[h][i];
}

/* `heads` query heads `q` [heads, dim] over a block: their outputs so far, `out` [heads, dim], not
   yet divided by the sum of weights, take it in. The block that comes next is fetched meanwhile. */
INLINE void SET(attend)(int heads, int narrow, int dim, const struct block *block, float scale,
                        const float *q, struct state *state, float *out)
{
    const int bytes = narrow ? 2 : 4, size = dim * bytes;
    float score[HEADS][BLOCK], shrink[HEADS];
    for (int t = 0; t < block->tokens; t += 4) {
        lanes dot[HEADS][4];
        const char *keys[4];
        for (int i = 0; i < 4; i++) {
            int token = t + i < block->tokens ? t + i : block->tokens - 1;
            keys[i] = block->keys + token * size;
            FETCH(block->next_keys + token * size, size);
            for (int h = 0; h < heads; h++)
                dot[h][i] = (lanes){0};
        }
        for (int d = 0; d < dim; d += WIDTH)
            for (int i = 0; i < 4; i++) {
                lanes key = SET(load)(keys[i] + d * bytes, narrow);
                for (int h = 0; h < heads; h++)
                    dot[h][i] += key * *(const lanes *)(q + h * dim + d);
            }
        for (int h = 0; h < heads; h++)
            *(quad *)(score[h] + t) = SET(sums)(dot[h]);
    }
    for (int h = 0; h < heads; h++)
        shrink[h] = SET(weigh)(score[h], block->tokens, scale, state + h);
    int d = 0;
    for (; d + TILE * WIDTH <= dim; d += TILE * WIDTH)
        SET(spread)(heads, TILE, narrow, dim, d, block, score, shrink, out);
    for (; d < dim; d += WIDTH)
        SET(spread)(heads, 1, narrow, dim, d, block, score, shrink, out);
}

/* The same for any number of heads; each case has its counts as constants. */
TARGET static void SET(visit)(int heads, int narrow, int dim, const struct block *block,
                              float scale, const float *q, struct state *state, float *out)
{
#define CASE(count, kind, size)                                                                    \
    SET(attend)(count, kind, size, block, scale, q + at * dim, state + at, out + at * dim)
#define KINDS(count)                                                                               \
    (narrow ? CASE(count, 1, dim)                                                                  \
            : (dim == 64 ? CASE(count, 0, 64) : dim == 128 ? CASE(count, 0, 128) : CASE(count, 0, dim)))
    for (int at = 0; at < heads;) {
        int count = heads - at >= 4 ? 4 : heads - at >= 2 ? 2 : 1;
        count == 4 ? KINDS(4) : count == 2 ? KINDS(2) : KINDS(1);
        at += count;
    }
#undef KINDS
#undef CASE
}

#undef INLINE
#undef lanes
#undef WIDTH
#undef TARGET
#undef TILE
#undef SET
#undef EACH
