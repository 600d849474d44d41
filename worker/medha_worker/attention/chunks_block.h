/* Attention of STRIP times QUERIES queries over packed blocks of tokens, for one vector width. chunks.c includes
   this once per instruction set, with WIDTH, TARGET and SET(x) of lanes.h, and

     TILE    registers of scores, or of output, per query

   Keys come transposed, [blocks][dim][BLOCK], so that lanes are tokens and no sum crosses lanes. Inner
   loops load a tile's registers first and then one query's scalar at a time: AVX2 has sixteen
   registers, twelve of them sums, and six scalars beside the tile would push sums out to memory. */

#include "lanes.h"

/* The plain scores of all queries with the block's tokens. */
INLINE void SET(score)(int dim, const float *q, const float *keys, float (*score)[BLOCK])
{
    for (int t = 0; t < BLOCK; t += TILE * WIDTH) {
        lanes dot[QUERIES][TILE] = {0};
        for (int d = 0; d < dim; d++) {
            lanes key[TILE];
#pragma GCC unroll 8
            for (int i = 0; i < TILE; i++)
                key[i] = *(const lanes *)(keys + d * BLOCK + t + i * WIDTH);
#pragma GCC unroll 8
            for (int h = 0; h < QUERIES; h++)
#pragma GCC unroll 8
                for (int i = 0; i < TILE; i++)
                    dot[h][i] += key[i] * q[h * dim + d];
        }
        for (int h = 0; h < QUERIES; h++)
            for (int i = 0; i < TILE; i++)
                *(lanes *)(score[h] + t + i * WIDTH) = dot[h][i];
    }
}

/* The weighted values of the block, `tile` registers wide from dimension `d` on, into `out`. */
INLINE void SET(spread)(int tile, int dim, int d, int tokens, const float *values,
                        float (*weight)[BLOCK], const float *shrink, float *out)
{
    lanes sum[QUERIES][TILE];
    for (int h = 0; h < QUERIES; h++)
        for (int i = 0; i < tile; i++)
            sum[h][i] = *(lanes *)(out + h * dim + d + i * WIDTH) * shrink[h];
    for (int t = 0; t < tokens; t++) {
        lanes value[TILE];
#pragma GCC unroll 8
        for (int i = 0; i < tile; i++)
            value[i] = *(const lanes *)(values + t * dim + d + i * WIDTH);
#pragma GCC unroll 8
        for (int h = 0; h < QUERIES; h++)
#pragma GCC unroll 8
            for (int i = 0; i < tile; i++)
                sum[h][i] += value[i] * weight[h][t];
    }
    for (int h = 0; h < QUERIES; h++)
        for (int i = 0; i < tile; i++)
            *(lanes *)(out + h * dim + d + i * WIDTH) = sum[h][i];
}

/* Queries `q` [count, QUERIES, dim] over packed `keys` and `values` [tokens, dim]: query h sees the
   first `sees[h]` tokens, no more than a later query. Outputs so far, `out` [count, QUERIES, dim],
   not yet divided by the sum of weights, take them in. A block stays in the first-level cache until
   all have. */
INLINE void SET(attend)(int dim, int count, const float *keys, const float *values,
                        const int64_t *sees, float scale, const float *q, struct state *state,
                        float *out)
{
    const int64_t most = sees[count * QUERIES - 1];
    for (int64_t first = 0; first < most; first += BLOCK) {
        float weight[STRIP][QUERIES][BLOCK], shrink[STRIP][QUERIES];
        const int tokens = most - first < BLOCK ? most - first : BLOCK;
        for (int i = 0; i < count; i++) {
            if (sees[i * QUERIES + QUERIES - 1] <= first)
                continue;
            SET(score)(dim, q + i * QUERIES * dim, keys + first * dim, weight[i]);
            for (int h = 0; h < QUERIES; h++) {
                int64_t rest = sees[i * QUERIES + h] - first;
                int seen = rest < 0 ? 0 : rest < BLOCK ? rest : BLOCK;
                shrink[i][h] = SET(weigh)(weight[i][h], seen, scale, state + i * QUERIES + h);
                for (int t = seen; t < tokens; t++)
                    weight[i][h][t] = 0;
            }
        }
        for (int i = 0; i < count; i++) {
            if (sees[i * QUERIES + QUERIES - 1] <= first)
                continue;
            float *own = out + i * QUERIES * dim;
            int d = 0;
            for (; d + TILE * WIDTH <= dim; d += TILE * WIDTH)
                SET(spread)(TILE, dim, d, tokens, values + first * dim, weight[i], shrink[i], own);
            for (; d < dim; d += WIDTH)
                SET(spread)(1, dim, d, tokens, values + first * dim, weight[i], shrink[i], own);
        }
    }
}

/* The same with usual sizes as constants. */
TARGET static void SET(visit)(int dim, int count, const float *keys, const float *values,
                              const int64_t *sees, float scale, const float *q,
                              struct state *state, float *out)
{
    if (dim == 64)
        SET(attend)(64, count, keys, values, sees, scale, q, state, out);
    else if (dim == 128)
        SET(attend)(128, count, keys, values, sees, scale, q, state, out);
    else
        SET(attend)(dim, count, keys, values, sees, scale, q, state, out);
}

#undef INLINE
#undef lanes
#undef WIDTH
#undef TARGET
#undef TILE
#undef SET
#undef EACH
