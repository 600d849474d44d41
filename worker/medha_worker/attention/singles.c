/* Attention of single rows (decodes) over pages of keys and values, in one pass.

   A row's query heads see a contiguous run of its tokens, without a mask. All query heads of a KV
   head are computed while its keys and values are in the nearest cache, and the next block is
   prefetched, so that reading hides behind arithmetic. Softmax is online: a running maximum, and
   sums that shrink when it grows. Plain C: no Python, no torch; native_singles.py checks all inputs.
   The instruction set is chosen at the first call. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Query heads that are served at once, at most. */
#define HEADS 4
/* Query heads of a KV head, at most. */
#define GROUP 64
/* Prefetches the `size` bytes that are read next. */
#define FETCH(from, size)                                                                          \
    for (int fetched = 0; fetched < (size); fetched += 64)                                         \
    __builtin_prefetch((from) + fetched, 0, 2)

/* Planned by native_singles.py once per step. Row i is row `row[i]` of queries and outputs, its pages are
   `pages[first[i]]` and those that follow, and it sees their tokens [hidden[i], tokens[i]), at least
   one. */
struct plan {
    const int64_t *row, *tokens, *first, *pages;
    int64_t heads, kv_heads, head_dim, page_tokens;
    int64_t narrow; /* 1: the pool holds bfloat16, 0: float32 */
    const int64_t *hidden;
    int64_t planes; /* 2: keys and values, 1: keys that are the values too */
    double scale;   /* of the scores */
};

struct block {
    int64_t tokens;
    const char *keys, *values, *next_keys, *next_values;
};

typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

/* In each four lanes: a0 b0 a1 b1; a2 b2 a3 b3; a0 a1 b0 b1; a2 a3 b2 b3. */
#define LOW(i) (((i) & ~3) + ((i) >> 1 & 1) + ((i) & 1) * WIDTH)
#define HIGH(i) (LOW(i) + 2)
#define LEFT(i) (((i) & ~3) + ((i) & 1) + ((i) >> 1 & 1) * WIDTH)
#define RIGHT(i) (LEFT(i) + 2)

#define SET(x) x##_plain
#define TARGET
#define WIDTH 4
#define EACH(mask) FOUR(mask, 0)
#define TILE 4
#include "singles_block.h"

#if defined(__x86_64__)
#define SET(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define WIDTH 8
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4)
#define TILE 2
#include "singles_block.h"

#define SET(x) x##_avx512
#define TARGET __attribute__((target("avx512f")))
#define WIDTH 16
#define EACH(mask) FOUR(mask, 0), FOUR(mask, 4), FOUR(mask, 8), FOUR(mask, 12)
#define TILE 4
#include "singles_block.h"
#endif

typedef void visitor(int, int, int, const struct block *, float, const float *, struct state *,
                     float *);

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

/* The block at `token` of a pair of row and KV head. */
static struct block locate(const struct plan *plan, const char *pool, int64_t pair, int64_t token)
{
    int64_t row = pair / plan->kv_heads, head = pair % plan->kv_heads;
    int64_t page = plan->pages[plan->first[row] + token / plan->page_tokens];
    int64_t offset = token % plan->page_tokens, count = plan->page_tokens - offset;
    int64_t rest = plan->tokens[row] - token;
    int64_t size = plan->head_dim * (plan->narrow ? 2 : 4), plane = plan->page_tokens * size;
    const char *keys = pool + (page * plan->planes * plan->kv_heads + head) * plane + offset * size;
    count = count < rest ? count : rest;
    return (struct block){
        .tokens = count < BLOCK ? count : BLOCK,
        .keys = keys,
        .values = keys + (plan->planes - 1) * plan->kv_heads * plane,
    };
}

static void start(const struct plan *plan, int64_t group, struct state *state, float *out)
{
    for (int64_t h = 0; h < group; h++)
        state[h] = (struct state){-FLT_MAX, 0};
    memset(out, 0, sizeof(float) * group * plan->head_dim);
}

/* Pairs [from, to) of the plan's rows and the KV heads, heads of one row side by side. `q` float32,
   `stride` scalars from row to row; `pool` [pages, planes, kv_heads, page_tokens, head_dim]; `out` [rows,
   heads, head_dim] and `lse` [rows, heads] float32, written where the pairs are. `width` limits the
   registers that are used, in float lanes. */
void medha_singles(const struct plan *plan, int64_t from, int64_t to, const float *q,
                   int64_t stride, const char *pool, float *out, float *lse, int64_t width)
{
    const int64_t group = plan->heads / plan->kv_heads, dim = plan->head_dim;
    const float scale = (float)(M_LOG2E * plan->scale);
    visitor *visit = choose(width);
    struct state state[GROUP];
    for (int64_t pair = from; pair < to; pair++) {
        int64_t i = pair / plan->kv_heads, first = pair % plan->kv_heads * group;
        int64_t head = plan->row[i] * plan->heads + first;
        start(plan, group, state, out + head * dim);
        for (int64_t token = plan->hidden[i]; token < plan->tokens[i];) {
            struct block block = locate(plan, pool, pair, token), next = block;
            token += block.tokens;
            if (token < plan->tokens[i])
                next = locate(plan, pool, pair, token);
            else if (pair + 1 < to)
                next = locate(plan, pool, pair + 1, plan->hidden[(pair + 1) / plan->kv_heads]);
            block.next_keys = next.keys, block.next_values = next.values;
            visit(group, plan->narrow, dim, &block, scale,
                  q + plan->row[i] * stride + first * dim, state, out + head * dim);
        }
        finish(group, dim, state, out + head * dim, lse + head);
    }
}
