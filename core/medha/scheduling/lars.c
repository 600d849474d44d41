/* The arithmetic of one scheduling decision with the policy `lars`, over the rows of one group.
 *
 *     medha_margins    margins of who is kept                                       \  once per
 *     medha_relegate   who gives way where margins are overrun                      |  decision
 *     medha_open       what a newcomer would find alongside who is kept                |
 *     medha_fitting    who fits alongside them, one after the other                    |
 *     medha_order      tier and key of every row that may be packed                 /
 *     medha_few        the next rows in that order, as many as a batch is likely to hold
 *
 * Rows stand in order of deadline, in the arrays of waiting.py. No object, no allocation, no state
 * but what the caller owns; native.py is the only caller and checks what crosses. Sums run from the
 * first row to the last and nothing is contracted or reordered (hatch_build.py), so that the same
 * input gives the same decision on every machine.
 */
#include <math.h>
#include <stdint.h>

enum { DUE, ARRIVAL, WORK, NORM, TOKENS, NEED, PASSED, TURN }; /* fields: see waiting.py */
enum { KEPT, PROMISED, READY };                                /* flags: see waiting.py */
enum { BARE, LEFT, KEY, OWN, OTHERS };                         /* scratch, in seconds */
enum { RANK, TIER, LONG };                                     /* marks */
enum { OWED = -1, ABSORBED, SLACK, DEADLINE, RELEGATED, NONE };

/* `struct _Rows` of native.py. `held`: the rows that are kept, so many of them; `able`: those that
 * were put in order and not handed out yet, so many are `left`. `least`: smallest margin of all,
 * `least_promised` of a promise, `least_bare` of a promise if promises were all, at bare cost;
 * `last`: what may be done out of order by whoever is due last. All are infinite with nobody. */
struct rows {
    const double *fields;
    const uint8_t *flags;
    double *scratch;
    int8_t *marks;
    int32_t *held, *able;
    int64_t capacity, count, kept, left;
    double least, least_promised, least_bare, last;
};

/* Which rows count comes as it falls, and a branch on that is mispredicted again and again: rows
 * are listed without one, and what does not count is compared as infinite. These are by RANK. */
static const double APART[] = {INFINITY, 0.0, 0.0, 0.0};
static const double MERELY[] = {INFINITY, INFINITY, 0.0, INFINITY};

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static void find_least(struct rows *rows)
{
    const double *left = rows->scratch + LEFT * rows->capacity;
    const int8_t *rank = rows->marks + RANK * rows->capacity;
    double least = INFINITY, promised = INFINITY;
    for (int64_t at = 0; at < rows->kept; at++) {
        const int64_t i = rows->held[at];
        least = smaller(left[i] + APART[rank[i]], least);
        promised = smaller(left[i] + MERELY[rank[i]], promised);
    }
    rows->least = least;
    rows->least_promised = promised;
}

/* RANK becomes 2 for a promise, 1 for who else is kept, 0 for the rest; those of the kept, which
 * are then `held`, have in BARE what they cost, and in LEFT their margin: the time until they are
 * due less the costs of the held due no later. Costs of a promise count in full for promises
 * (`inflation`), bare for who is merely kept. */
void medha_margins(struct rows *rows, double start, double overhead, double inflation)
{
    const int64_t size = rows->capacity;
    const double *due = rows->fields + DUE * size, *work = rows->fields + WORK * size;
    const uint8_t *kept = rows->flags + KEPT * size, *promised = rows->flags + PROMISED * size;
    double *bare = rows->scratch + BARE * size, *left = rows->scratch + LEFT * size;
    int8_t *rank = rows->marks + RANK * size;
    double sum = 0.0, full = 0.0, sure = 0.0, least_bare = INFINITY;
    int64_t count = 0;
    for (int64_t i = 0; i < rows->count; i++) {
        rank[i] = (int8_t)(kept[i] + (kept[i] & promised[i]));
        rows->held[count] = (int32_t)i;
        count += kept[i];
    }
    for (int64_t at = 0; at < count; at++) {
        const int64_t i = rows->held[at];
        const double cost = work[i] + overhead, due_in = due[i] - start;
        const double also[] = {cost, cost * inflation}, more[] = {0.0, cost};
        sum += cost;
        full += also[promised[i]];
        sure += more[promised[i]];
        const double taken[] = {sum, full};
        bare[i] = cost;
        left[i] = due_in - taken[promised[i]];
        least_bare = smaller(due_in - sure + MERELY[rank[i]], least_bare);
    }
    rows->least_bare = least_bare;
    rows->kept = count;
    find_least(rows);
}

/* Where a margin is overrun, of who is kept without a promise and due no later the largest gives
 * way: by more than `tolerance` for those themselves, at all for a promise. At most `most` do, the
 * earliest overrun first; their rows go to `lost`. Those of RANK 3 are kept, and do not. Returns how
 * many. */
int64_t medha_relegate(struct rows *rows, double tolerance, int64_t most, int64_t *lost)
{
    const double *bare = rows->scratch + BARE * rows->capacity;
    double *left = rows->scratch + LEFT * rows->capacity;
    int8_t *rank = rows->marks + RANK * rows->capacity;
    const int32_t *held = rows->held;
    const double overrun[] = {-INFINITY, -tolerance, 0.0, -tolerance};
    int64_t count = 0, first = 0, upto = 0;
    for (; count < most; count++) {
        while (first < rows->kept && rank[held[first]] != 1)
            first++;
        if (upto < first) /* before it there was no overrun, and margins have only widened */
            upto = first;
        while (upto < rows->kept && left[held[upto]] >= overrun[rank[held[upto]]])
            upto++;
        if (upto >= rows->kept)
            break;
        int64_t largest = first;
        for (int64_t at = first + 1; at <= upto; at++)
            if (bare[held[at]] > bare[held[largest]] && rank[held[at]] == 1)
                largest = at;
        lost[count] = held[largest];
        rank[held[largest]] = 0;
        for (int64_t at = largest + 1; at < rows->kept; at++)
            left[held[at]] += bare[lost[count]];
    }
    if (count)
        find_least(rows);
    return count;
}

/* Makes ready for `medha_fitting`: BARE and OWN of every row, what it costs and the time until it is
 * due less the bare costs of the kept due no later; OTHERS the margin of the kept, as LEFT before
 * anyone gave way. `medha_margins` comes before: LEFT is let be. */
void medha_open(struct rows *rows, double start, double overhead, double inflation)
{
    const int64_t size = rows->capacity;
    const double *due = rows->fields + DUE * size, *work = rows->fields + WORK * size;
    const uint8_t *kept = rows->flags + KEPT * size, *promised = rows->flags + PROMISED * size;
    double *bare = rows->scratch + BARE * size, *own = rows->scratch + OWN * size;
    double *others = rows->scratch + OTHERS * size, sum = 0.0, full = 0.0;
    for (int64_t i = 0; i < rows->count; i++)
        bare[i] = work[i] + overhead;
    for (int64_t i = 0; i < rows->count; i++) {
        const double costs[] = {0.0, bare[i]};
        const double widened[] = {costs[kept[i]], costs[kept[i]] * inflation};
        sum += costs[kept[i]];
        full += widened[promised[i]];
        own[i] = due[i] - start - sum;
        const double margins[] = {own[i], due[i] - start - full};
        others[i] = margins[promised[i]] + APART[kept[i]];
    }
}

/* The smallest, of equal ones the first, of who is not kept and would fit with `guard` to spare;
 * of those beyond `after` in that order if that is not -1. Returns its row, or -1. */
int64_t medha_fitting(const struct rows *rows, double guard, int64_t after)
{
    const uint8_t *kept = rows->flags + KEPT * rows->capacity;
    const double *bare = rows->scratch + BARE * rows->capacity;
    const double *own = rows->scratch + OWN * rows->capacity;
    const double *others = rows->scratch + OTHERS * rows->capacity;
    double later = INFINITY;
    int64_t best = -1;
    for (int64_t i = rows->count - 1; i >= 0; i--) {
        later = smaller(others[i], later);
        if (smaller(own[i], later) - guard < bare[i] || kept[i])
            continue;
        if (best >= 0 && bare[i] > bare[best])
            continue;
        if (after < 0 || bare[i] > bare[after] || (bare[i] == bare[after] && i > after))
            best = i;
    }
    return best;
}

/* The row is kept from now on: it leaves that much less to itself and to whoever is due later. */
void medha_keep(struct rows *rows, int64_t row)
{
    double *own = rows->scratch + OWN * rows->capacity;
    double *others = rows->scratch + OTHERS * rows->capacity;
    const double cost = rows->scratch[BARE * rows->capacity + row];
    for (int64_t i = row; i < rows->count; i++) {
        own[i] -= cost;
        others[i] -= cost;
    }
    others[row] = own[row];
}

/* TIER and KEY of every row that is ready and needs at most `pages`: those are `able`. The tiers
 * are described in policies.py. A kept one may do, out of order, what the margins of those due
 * before it bear (anyone else: those of all), and of that `guard` does not count.
 * `long_above`: work, or with `by_tokens` tokens, beyond which a prompt is long. `owed`: 0, or the
 * relegated have their share coming and it is the turn of 1: the one due first, 2: short ones. */
void medha_order(struct rows *rows, double pages, double start, double long_above, int by_tokens,
                 double guard, int owed)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->fields + DUE * size, *all_work = rows->fields + WORK * size;
    const double *norm = rows->fields + NORM * size, *tokens = rows->fields + TOKENS * size;
    const double *need = rows->fields + NEED * size, *left = rows->scratch + LEFT * size;
    const uint8_t *kept = rows->flags + KEPT * size, *ready = rows->flags + READY * size;
    double *key = rows->scratch + KEY * size, before = INFINITY;
    const int8_t *rank = rows->marks + RANK * size;
    int8_t *tier = rows->marks + TIER * size;
    int8_t *is_long = rows->marks + LONG * size;
    int32_t *able = rows->able;
    int64_t found = 0, first = -1, shorts = 0;
    rows->last = INFINITY;
    for (int64_t i = 0; i < count; i++) {
        key[i] = before; /* as yet: what those due before it bear */
        before = smaller(left[i] + APART[rank[i]], before);
        able[found] = (int32_t)i;
        found += ready[i] & (need[i] <= pages);
    }
    if (count)
        rows->last = rank[count - 1] ? key[count - 1] : rows->least;
    for (int64_t at = 0; at < found; at++) {
        const int64_t i = able[at];
        const double work = all_work[i], due_in = due[i] - start;
        const double room = (rank[i] ? key[i] : rows->least) - guard;
        is_long[i] = (by_tokens ? tokens[i] : work) > long_above;
        if (!kept[i] && first < 0)
            first = i;
        shorts += !kept[i] && !is_long[i];
        if (room >= work && !is_long[i])
            tier[i] = ABSORBED, key[i] = work;
        else if (kept[i] && is_long[i] && room >= 0.0)
            tier[i] = SLACK, key[i] = (due_in - work) / norm[i];
        else if (kept[i])
            tier[i] = DEADLINE, key[i] = due_in;
        else
            tier[i] = RELEGATED, key[i] = work;
    }
    for (int64_t at = 0; owed && at < found; at++) {
        const int64_t i = able[at];
        if (!kept[i] && (owed == 2 && shorts ? !is_long[i] : i == first))
            tier[i] = OWED, key[i] = all_work[i];
    }
    rows->left = found;
}

/* Whether row `a` is visited before row `b`: ties by (arrival, id), of which TURN is the rank. */
static int precedes(const struct rows *rows, int64_t a, int64_t b)
{
    const int8_t *tier = rows->marks + TIER * rows->capacity;
    const double *key = rows->scratch + KEY * rows->capacity;
    const double *turn = rows->fields + TURN * rows->capacity;
    if (tier[a] != tier[b])
        return tier[a] < tier[b];
    return key[a] != key[b] ? key[a] < key[b] : turn[a] < turn[b];
}

/* The next rows in order that need at most `pages` and, with `only_short`, are not long: the places
 * of at most `most` go to `few`, behind them `most` tiers and `most` times whether it is long.
 * Returns how many there are; they are not handed out again. */
int64_t medha_few(struct rows *rows, double pages, int only_short, int64_t most, int64_t *few)
{
    const double *need = rows->fields + NEED * rows->capacity;
    int8_t *tier = rows->marks + TIER * rows->capacity;
    const int8_t *is_long = rows->marks + LONG * rows->capacity;
    int64_t found = 0, stay = 0;
    for (int64_t one = 0; one < rows->left; one++) {
        const int64_t i = rows->able[one];
        if (need[i] > pages || (only_short && is_long[i]))
            continue;
        if (found == most && !precedes(rows, i, few[most - 1]))
            continue;
        int64_t at = found < most ? found++ : most - 1;
        for (; at > 0 && precedes(rows, i, few[at - 1]); at--)
            few[at] = few[at - 1];
        few[at] = i;
    }
    for (int64_t at = 0; at < found; at++) {
        few[most + at] = tier[few[at]];
        few[2 * most + at] = is_long[few[at]];
        tier[few[at]] = NONE;
    }
    for (int64_t one = 0; one < rows->left; one++) {
        rows->able[stay] = rows->able[one];
        stay += tier[rows->able[one]] != NONE;
    }
    rows->left = stay;
    return found;
}
