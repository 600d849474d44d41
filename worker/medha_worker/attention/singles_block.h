/* Attention of a few query heads over one block of tokens, for one vector width. singles.c includes
   this once per instruction set, with

     WIDTH   float lanes of a register           TARGET  attribute that allows the instructions
     TILE    registers of output per query head  SET(x)  x with the set's suffix

   A block is at most BLOCK tokens of one page and one KV head: its keys are contiguous, and so are
   its values. */

#include "lanes.h"

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
