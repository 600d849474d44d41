/* Attention of chunks over pages of keys and values, causal within a chunk, in one pass.

   A KV head's tokens are packed part by part, in float32 and keys transposed, and each part is taken
   in by all queries of the head before the next: so packing costs little, and a part stays in the
   second-level cache. QUERIES queries at once fill the registers with sums. Softmax is online, and
   blocks begin at fixed tokens, so a query's bits do not depend on how its prompt is cut. Plain C: no
   Python, no torch; native_chunks.py checks all inputs. The instruction set is chosen at the first call. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Queries that share registers: rows and query heads of one KV head, in this order; and how often
   that many share a block in the first-level cache, at most. */
#define QUERIES 6
#define STRIP 8
/* Scalars of a strip's queries, for heads of up to 512. */
#define OWN (QUERIES * STRIP * 64)
/* Scalars of a part's keys, and of its values: both fit into a second-level cache. */
#define PART 32768

/* Planned by native_chunks.py once per step. Span i is rows [row[i], row[i] + length[i]) of queries and
   outputs; its pages are `pages[first[i]]` and those that follow. All rows see `held[i]` tokens, and
   if `tail[i]`, row r also sees the r + 1 tokens after them. */
struct plan {
    const int64_t *row, *length, *held, *tail, *first, *pages;
    int64_t heads, kv_heads, head_dim, page_tokens;
    int64_t narrow; /* 1: the pool holds bfloat16, 0: float32 */
    int64_t planes; /* 2: keys and values, 1: keys that are the values too */
    double scale;   /* of the scores */
};

#define SET(x) x##_plain
#define TARGET
#define WIDTH 4
#define EACH(mask) FOUR(mask, 0)
#define TILE 2
#include "chunks_block.h"

#if defined(__x86_64__)
#define SET(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4)
#define TILE 2
#include "chunks_block.h"

#define SET(x) x##_avx512
#define TARGET __attribute__((target("avx512f")))
#define WIDTH 16
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4), FOUR(mask, 8), FOUR(mask, 12)
#define TILE 4
#include "chunks_block.h"
#endif

typedef void visitor(int, int, const float *, const float *, const int64_t *, float, const float *,
                     struct state *, float *);

static visitor *choose(int64_t width)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (width >= 16 && __builtin_cpu_supports("avx512f"))
        return visit_avx512;
    if (width >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return visit_avx2;
#endif
    (void)width;
    return visit_plain;
}

static inline float scalar(const char *at, int narrow)
{
    float value;
    if (!narrow)
        return memcpy(&value, at, 4), value;
    uint16_t upper;
    memcpy(&upper, at, 2);
    uint32_t bits = (uint32_t)upper << 16;
    return memcpy(&value, &bits, 4), value;
}

/* Packs tokens [token, token + count) of a span and KV head: keys [blocks][dim][BLOCK], the last block
   filled up with zeros, and values [count][dim]. */
static void pack(const struct plan *plan, const char *pool, int64_t span, int64_t head,
                 int64_t token, int64_t count, float *keys, float *values)
{
    const int64_t dim = plan->head_dim, size = plan->narrow ? 2 : 4;
    const int64_t plane = plan->page_tokens * dim * size;
    const char *rows[BLOCK];
    for (int64_t at = 0; at < count; at += BLOCK, keys += dim * BLOCK) {
        const int filled = count - at < BLOCK ? count - at : BLOCK;
        for (int t = 0; t < filled; t++) {
            int64_t n = token + at + t, page = plan->pages[plan->first[span] + n / plan->page_tokens];
            rows[t] = pool + (page * plan->planes * plan->kv_heads + head) * plane +
                      n % plan->page_tokens * dim * size;
        }
        if (filled < BLOCK)
            memset(keys, 0, sizeof(float) * dim * BLOCK);
        for (int t = 0; t < filled; t += 16)
            for (int64_t d = 0; d < dim; d++)
                for (int i = t; i < t + 16 && i < filled; i++)
                    keys[d * BLOCK + i] = scalar(rows[i] + d * size, plan->narrow);
        for (int t = 0; t < filled; t++, values += dim) {
            const char *from = rows[t] + (plan->planes - 1) * plan->kv_heads * plane;
            if (!plan->narrow)
                memcpy(values, from, sizeof(float) * dim);
            else
                for (int64_t d = 0; d < dim; d++)
                    values[d] = scalar(from + d * size, 1);
        }
    }
}

/* Queries [from, to) of a span and KV head, in units of QUERIES. `q` and `out` point to the span's
   first row and the KV head's first query head. */
static void attend(const struct plan *plan, int64_t span, int64_t head, int64_t from, int64_t to,
                   const float *q, int64_t stride, const char *pool, float *out, struct state *state,
                   visitor *visit)
{
    const int64_t dim = plan->head_dim, heads = plan->heads, group = heads / plan->kv_heads;
    const int64_t held = plan->held[span], tail = plan->tail[span], rows = plan->length[span];
    const int64_t last = (to * QUERIES - 1) / group < rows ? (to * QUERIES - 1) / group : rows - 1;
    const int64_t tokens = held + tail * (last + 1), part = PART / dim / BLOCK * BLOCK;
    const float scale = (float)(M_LOG2E * plan->scale);
    const int64_t strip = dim <= 64 ? STRIP : dim <= 128 ? STRIP / 2 : STRIP / 8;
    float keys[PART] __attribute__((aligned(64))), values[PART] __attribute__((aligned(64)));
    for (int64_t token = 0; token < tokens; token += part) {
        const int64_t count = tokens - token < part ? tokens - token : part;
        pack(plan, pool, span, head, token, count, keys, values);
        for (int64_t tile = from; tile < to; tile += strip) {
            const int64_t first = tile * QUERIES, tiles = to - tile < strip ? to - tile : strip;
            const int64_t rest = rows * group - first, all = tiles * QUERIES;
            const int64_t filled = rest < all ? rest : all;
            float own_q[OWN], own_out[OWN];
            struct state own[STRIP * QUERIES];
            int64_t sees[STRIP * QUERIES];
            for (int64_t n = 0; n < all; n++) {
                /* The last query takes the places that are left over. */
                int64_t query = first + (n < filled ? n : filled - 1), row = query / group;
                int64_t seen = held + tail * (row + 1) - token, place = row * heads + query % group;
                sees[n] = seen < 0 ? 0 : seen < count ? seen : count;
                memcpy(own_q + n * dim, q + row * stride + query % group * dim, sizeof(float) * dim);
                memcpy(own_out + n * dim, out + place * dim, sizeof(float) * dim);
                own[n] = state[place];
            }
            if (!sees[all - 1])
                continue;
            visit(dim, tiles, keys, values, sees, scale, own_q, own, own_out);
            for (int64_t n = 0; n < filled; n++) {
                int64_t place = (first + n) / group * heads + (first + n) % group;
                memcpy(out + place * dim, own_out + n * dim, sizeof(float) * dim);
                state[place] = own[n];
            }
        }
    }
}

/* Queries [from, to) of the plan, in units of QUERIES: spans one after another, and in each its KV
   heads. `q` float32, `stride` scalars from row to row; `pool` [pages, planes, kv_heads, page_tokens,
   head_dim]; `out` [rows, heads, head_dim] and `lse` [rows, heads] float32, and `state` [rows, heads],
   written where the queries are. `width` limits the registers that are used, in float lanes. */
void medha_chunks(const struct plan *plan, int64_t spans, int64_t from, int64_t to, const float *q,
                  int64_t stride, const char *pool, float *out, float *lse, struct state *state,
                  int64_t width)
{
    const int64_t dim = plan->head_dim, heads = plan->heads, group = heads / plan->kv_heads;
    visitor *visit = choose(width);
    for (int64_t span = 0; span < spans; span++) {
        const int64_t queries = plan->length[span] * group;
        const int64_t tiles = (queries + QUERIES - 1) / QUERIES;
        for (int64_t head = 0; head < plan->kv_heads; head++, from -= tiles, to -= tiles) {
            const int64_t a = from < 0 ? 0 : from, b = to < tiles ? to : tiles;
            if (a >= b)
                continue;
            const int64_t row = plan->row[span], at = row * heads + head * group;
            const int64_t end = b * QUERIES < queries ? b * QUERIES : queries;
            for (int64_t n = a * QUERIES; n < end; n++) {
                int64_t place = at + n / group * heads + n % group;
                memset(out + place * dim, 0, sizeof(float) * dim);
                state[place] = (struct state){-FLT_MAX, 0};
            }
            attend(plan, span, head, a, b, q + row * stride + head * group * dim, stride, pool,
                   out + at * dim, state + at, visit);
            for (int64_t n = a * QUERIES; n < end; n++) {
                int64_t place = at + n / group * heads + n % group;
                finish(1, dim, state + place, out + place * dim, lse + place);
            }
        }
    }
}
