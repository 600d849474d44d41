/* The arithmetic of one scheduling decision with the policy `lars`, over the rows of one group.
 *
 *     medha_margins    margins of who is kept                                       \  once per
 *     medha_relegate   who gives way where margins are overrun                      |  decision
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
enum { BARE, LEFT, KEY };                                      /* scratch, in seconds */
enum { HELD, TIER, LONG };                                     /* marks */
enum { OWED = -1, ABSORBED, SLACK, DEADLINE, RELEGATED, NONE };

/* `struct _Rows` of native.py. `least`: smallest margin of all, `least_promised` of a promise,
 * `least_bare` of a promise if promises were all, at bare cost; `last`: what may be done out of
 * order by whoever is due last. All are infinite with nobody. */
struct rows {
    const double *fields;
    const uint8_t *flags;
    double *scratch;
    int8_t *marks;
    int64_t capacity, count;
    double least, least_promised, least_bare, last;
};

static void find_least(struct rows *rows)
{
    const double *left = rows->scratch + LEFT * rows->capacity;
    const int8_t *held = rows->marks + HELD * rows->capacity;
    double least = INFINITY, promised = INFINITY;
    for (int64_t i = 0; i < rows->count; i++) {
        if (held[i] && left[i] < least)
            least = left[i];
        if (held[i] == 2 && left[i] < promised)
            promised = left[i];
    }
    rows->least = least;
    rows->least_promised = promised;
}

/* HELD becomes 2 for a promise, 1 for who else is kept, 0 for the rest; BARE what each of the held
 * costs, LEFT its margin: the time until it is due less the costs of the held due no later. Costs
 * of a promise count in full for promises (`inflation`), bare for who is merely kept. */
void medha_margins(struct rows *rows, double start, double share, double overhead,
                   double inflation)
{
    const int64_t size = rows->capacity;
    const double *due = rows->fields + DUE * size, *work = rows->fields + WORK * size;
    const uint8_t *kept = rows->flags + KEPT * size, *promised = rows->flags + PROMISED * size;
    double *bare = rows->scratch + BARE * size, *left = rows->scratch + LEFT * size;
    int8_t *held = rows->marks + HELD * size;
    double sum = 0.0, full = 0.0, sure = 0.0;
    rows->least_bare = INFINITY;
    for (int64_t i = 0; i < rows->count; i++) {
        held[i] = (int8_t)(kept[i] ? 1 + promised[i] : 0);
        if (!held[i])
            continue;
        const double cost = work[i] / share + overhead;
        bare[i] = cost;
        sum += cost;
        full += held[i] == 2 ? cost * inflation : cost;
        left[i] = due[i] - start - (held[i] == 2 ? full : sum);
        sure += held[i] == 2 ? cost : 0.0;
        if (held[i] == 2 && due[i] - start - sure < rows->least_bare)
            rows->least_bare = due[i] - start - sure;
    }
    find_least(rows);
}

/* Where a margin is overrun, of who is kept without a promise and due no later the largest gives
 * way: by more than `tolerance` for those themselves, at all for a promise. At most `most` do, the
 * earliest overrun first; their rows go to `lost`. Returns how many. */
int64_t medha_relegate(struct rows *rows, double tolerance, int64_t most, int64_t *lost)
{
    const double *bare = rows->scratch + BARE * rows->capacity;
    double *left = rows->scratch + LEFT * rows->capacity;
    int8_t *held = rows->marks + HELD * rows->capacity;
    int64_t count = 0;
    for (; count < most; count++) {
        int64_t largest = -1, i = 0;
        for (; i < rows->count; i++) {
            if (held[i] == 1 && (largest < 0 || bare[i] > bare[largest]))
                largest = i;
            if (largest >= 0 && held[i] && left[i] < (held[i] == 2 ? 0.0 : -tolerance))
                break;
        }
        if (i == rows->count)
            break;
        held[largest] = 0;
        for (i = largest + 1; i < rows->count; i++)
            left[i] += held[i] ? bare[largest] : 0.0;
        lost[count] = largest;
    }
    find_least(rows);
    return count;
}

/* TIER and KEY of every row that is ready and needs at most `pages`, NONE for the others. The tiers
 * are described in policies.py. A kept one may do, out of order, what the margins of those due
 * before it bear (anyone else: those of all), and of that `guard` does not count.
 * `long_above`: work, or with `by_tokens` tokens, beyond which a prompt is long. `owed`: 0, or the
 * relegated have their share coming and it is the turn of 1: the one due first, 2: short ones. */
void medha_order(struct rows *rows, double pages, double start, double share, double long_above,
                 int by_tokens, double guard, int owed)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->fields + DUE * size, *all_work = rows->fields + WORK * size;
    const double *norm = rows->fields + NORM * size, *tokens = rows->fields + TOKENS * size;
    const double *need = rows->fields + NEED * size, *left = rows->scratch + LEFT * size;
    const uint8_t *kept = rows->flags + KEPT * size, *ready = rows->flags + READY * size;
    double *key = rows->scratch + KEY * size, before = INFINITY, allowance = INFINITY;
    int8_t *held = rows->marks + HELD * size, *tier = rows->marks + TIER * size;
    int8_t *is_long = rows->marks + LONG * size;
    int64_t first = -1, shorts = 0;
    for (int64_t i = 0; i < count; i++) {
        allowance = held[i] ? before : rows->least;
        if (held[i] && left[i] < before)
            before = left[i];
        tier[i] = NONE;
        if (!ready[i] || need[i] > pages)
            continue;
        const double work = all_work[i] / share, due_in = due[i] - start;
        const double room = allowance - guard;
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
    rows->last = allowance;
    for (int64_t i = 0; owed && i < count; i++)
        if (tier[i] != NONE && !kept[i] && (owed == 2 && shorts ? !is_long[i] : i == first))
            tier[i] = OWED, key[i] = all_work[i] / share;
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
    int64_t found = 0;
    for (int64_t i = 0; i < rows->count; i++) {
        if (tier[i] == NONE || need[i] > pages || (only_short && is_long[i]))
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
    return found;
}
