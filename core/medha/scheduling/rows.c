/* The arithmetic over the waiting prefills of one KVP group, and over the decodes alongside them:
 * the extension module `rows`, of which native.py is the only caller.
 *
 *     rows             medha_insert, medha_remove
 *     decodes          medha_begin, medha_end
 *     work             medha_mean, medha_coming, medha_apply   after a batch
 *                      medha_try                               for a new decode
 *     promises         medha_room, medha_least, medha_promises, medha_tight, medha_crowding,
 *                      medha_promise_needs, medha_relegated
 *     one decision     medha_margins, medha_relegate, medha_open, medha_fitting, medha_keep,
 *                      medha_order, medha_few                  with the policy `lars`
 *     several groups   medha_spans_least, medha_spans_lower
 *     reports          medha_report
 *
 * Rows stand in order of deadline. What every pass reads lies in columns of that order; the rest of
 * a row stays in its slot while rows are inserted before it. The passes see no object; the types at
 * the end hold their memory and check what crosses. Sums run from the first row to the last and
 * nothing is contracted or reordered (hatch_build.py), so that the same input gives the same
 * decision on every machine.
 */
#include "stable_abi.h"

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

enum { LEVELS = 6, BANDS = 8 };                          /* prefill_times.py, load_report.py */
enum { DUE, WORK, BARE_WORK, ALONGSIDE, NEED, NORM, COLUMNS }; /* columns, by row */
enum { KEPT, PROMISED, READY, BEYOND, FLAGS };           /* flags, by row */
enum { ARRIVAL, TOKENS, PASSED, TURN, NUMBER, LEVEL, SLOT = LEVEL + LEVELS }; /* by slot */
enum { BARE, LEFT, KEY, OWN, OTHERS, MEAN, MORE, TRIAL, BEFORE, SCRATCH }; /* scratch, in s */
enum { RANK, TIER, LONG, MARKS };                        /* marks */
enum { FEW = 8 }; /* rows handed out at a time: most batches hold one prompt or two */
enum { OWED = -1, ABSORBED, SLACK, DEADLINE, RELEGATED, NONE };

/* `slot`: that of each row, and behind them those that are free. `counts`: rows with each flag.
 * `summed`: rows of which BEFORE holds the work up to each, itself included.
 * `held`: the rows that are kept, so many of them; `able`: those that were put in order, so many are
 * `left`; those handed out are of tier NONE. `least`: smallest margin of all, `least_promised` of a
 * promise, `least_bare` of a promise if promises were all, at bare cost; `last`: what may be done out
 * of order by whoever is due last. All are infinite with nobody. */
struct rows {
    double *columns;
    uint8_t *flags;
    double *slots;
    int32_t *slot;
    double *scratch;
    int8_t *marks;
    int32_t *held, *able;
    int64_t capacity, count, kept, left, summed, counts[FLAGS];
    double least, least_promised, least_bare, last;
};

/* Decodes of one group in the order of their ends. `cost`: seconds that each takes of a batch. */
struct decodes {
    double *ends, *cost;
    int64_t *numbers;
    int64_t count, capacity;
};

/* What a decode adds to the rows: `cost` seconds of each batch for `length` seconds. It runs, or it
 * comes in `begin` seconds, alongside the rows from `first` on. */
enum { RUNS, COMES, FOLLOWS };
struct decode {
    int64_t kind, first;
    double cost, length, begin;
};

/* Decodes that are tried at once, at most. */
enum { MOST_TRIED = 8 };

static const double FRACTIONS[LEVELS] = {0.0, 0.125, 0.25, 0.5, 0.75, 1.0};
/* 1 over the width below each fraction: a power of two, so that a product is exactly the quotient. */
static const double STEPS[LEVELS] = {0.0, 8.0, 8.0, 4.0, 4.0, 4.0};
static const double LEAST = 1e-300;

/* Which rows count comes as it falls, and a branch on that is mispredicted again and again: rows
 * are listed without one, and what does not count is compared as infinite. These are by RANK. */
static const double APART[] = {INFINITY, 0.0, 0.0, 0.0};
static const double MERELY[] = {INFINITY, INFINITY, 0.0, INFINITY};

/* Part of the time until a promise is due that a long prompt without one leaves of its margin. */
static const double SPARED = 0.05;

static double smaller(double a, double b)
{
    return a < b ? a : b;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

/* `value` if `flag` is 1, 0 if it is 0; no branch. */
static double only(int flag, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits &= -(uint64_t)flag;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

static double *slot_of(const struct rows *rows, int64_t row)
{
    return rows->slots + (int64_t)rows->slot[row] * SLOT;
}

/* Slots lie in no order: a pass that reads them all asks for those that it will reach soon. */
static void fetch_slot(const struct rows *rows, int64_t row)
{
    if (row + 12 < rows->count)
        __builtin_prefetch(slot_of(rows, row + 12) + LEVEL);
}

/* Rows with a flag, in order: few of many have it, or any of them. `also`: and those of a rank, if it
 * is not NULL. `eight`: of eight rows those that are not visited yet, `row` the first of the next. */
struct walk {
    const uint8_t *flag;
    const int8_t *also;
    int64_t row, count;
    uint64_t eight;
};

static struct walk walk_over(const uint8_t *flag, int64_t count)
{
    return (struct walk){.flag = flag, .count = count};
}

/* The next row with the flag; `count` if there is none. */
static inline int64_t next_row(struct walk *walk)
{
    while (!walk->eight) {
        const int64_t left = walk->count - walk->row;
        if (left <= 0)
            return walk->count;
        memcpy(&walk->eight, walk->flag + walk->row, sizeof walk->eight);
        if (walk->also) {
            uint64_t ranks;
            memcpy(&ranks, walk->also + walk->row, sizeof ranks);
            walk->eight |= (ranks | ranks >> 1) & 0x0101010101010101ULL;
        }
        if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)
            walk->eight = __builtin_bswap64(walk->eight);
        if (left < 8)
            walk->eight &= (1ULL << 8 * left) - 1;
        walk->row += 8;
    }
    const int64_t row = walk->row - 8 + __builtin_ctzll(walk->eight) / 8;
    walk->eight &= walk->eight - 1;
    return row;
}

/* --- rows ------------------------------------------------------------------------------------- */

/* The work of the row, or which row it is, has changed. */
static void forget_sums(struct rows *rows, int64_t row)
{
    rows->summed = row < rows->summed ? row : rows->summed;
}

/* The rows from `from` on move to `to`, one place on or back. */
static void shift(struct rows *rows, int64_t from, int64_t to)
{
    forget_sums(rows, from < to ? from : to);
    const int64_t count = rows->count - from;
    for (int column = DUE; column < COLUMNS; column++) {
        double *values = rows->columns + column * rows->capacity;
        memmove(values + to, values + from, (size_t)count * sizeof *values);
    }
    for (int flag = KEPT; flag < FLAGS; flag++) {
        uint8_t *values = rows->flags + flag * rows->capacity;
        memmove(values + to, values + from, (size_t)count);
    }
    memmove(rows->slot + to, rows->slot + from, (size_t)count * sizeof *rows->slot);
}

static void set_flag(struct rows *rows, int64_t row, int flag, int value)
{
    uint8_t *cell = rows->flags + flag * rows->capacity + row;
    rows->counts[flag] += value - *cell;
    *cell = (uint8_t)value;
}

/* Inserts a row, where there is room for one more. `flags`: bit k is flag k. */
static void medha_insert(struct rows *rows, int64_t at, int64_t flags, const double *columns,
                         const double *values)
{
    const int32_t slot = rows->slot[rows->count];
    shift(rows, at, at + 1);
    for (int column = DUE; column < COLUMNS; column++)
        rows->columns[column * rows->capacity + at] = columns[column];
    for (int flag = KEPT; flag < FLAGS; flag++) {
        rows->flags[flag * rows->capacity + at] = 0;
        set_flag(rows, at, flag, flags >> flag & 1);
    }
    rows->slot[at] = slot;
    rows->count++;
    memcpy(slot_of(rows, at), values, SLOT * sizeof *values);
}

static void medha_remove(struct rows *rows, int64_t at)
{
    const int32_t slot = rows->slot[at];
    for (int flag = KEPT; flag < FLAGS; flag++)
        set_flag(rows, at, flag, 0);
    shift(rows, at + 1, at);
    rows->slot[--rows->count] = slot;
}

/* The first row that is due at `due` or later. */
static int64_t medha_first_due(const struct rows *rows, double due)
{
    const double *all_due = rows->columns + DUE * rows->capacity;
    int64_t low = 0, high = rows->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (all_due[middle] < due)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The row of a prompt at or after `row`, where none is due before it; -1 if it does not wait. */
static int64_t row_from(const struct rows *rows, int64_t row, double due, int64_t number)
{
    const double *all_due = rows->columns + DUE * rows->capacity;
    for (; row < rows->count && all_due[row] == due; row++)
        if ((int64_t)slot_of(rows, row)[NUMBER] == number)
            return row;
    return -1;
}

/* --- decodes ---------------------------------------------------------------------------------- */

/* The number of decodes that end before `time`. */
static int64_t ended(const struct decodes *decodes, double time)
{
    int64_t low = 0, high = decodes->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (decodes->ends[middle] < time)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void move_decodes(struct decodes *decodes, int64_t from, int64_t to, int64_t count)
{
    const size_t size = (size_t)count * sizeof(double);
    memmove(decodes->ends + to, decodes->ends + from, size);
    memmove(decodes->cost + to, decodes->cost + from, size);
    memmove(decodes->numbers + to, decodes->numbers + from, size);
}

static void medha_begin(struct decodes *decodes, int64_t number, double cost, double ends)
{
    const int64_t at = ended(decodes, ends);
    move_decodes(decodes, at, at + 1, decodes->count - at);
    decodes->ends[at] = ends, decodes->cost[at] = cost, decodes->numbers[at] = number;
    decodes->count++;
}

/* The place of a decode, -1 if it is not there. */
static int64_t medha_find(const struct decodes *decodes, int64_t number, double ends)
{
    for (int64_t at = ended(decodes, ends); at < decodes->count && decodes->ends[at] == ends; at++)
        if (decodes->numbers[at] == number)
            return at;
    return -1;
}

/* Removes the decode at a place; returns its cost. */
static double medha_end(struct decodes *decodes, int64_t at)
{
    const double cost = decodes->cost[at];
    decodes->count--;
    move_decodes(decodes, at + 1, at, decodes->count - at);
    return cost;
}

/* --- work alongside decodes ------------------------------------------------------------------- */

/* The seconds of a slot at a part of the decode capacity: `between` of prefill_times.py. */
static double between(const double *slot, double part)
{
    int upper = 1;
    for (int level = 1; level < LEVELS - 1; level++)
        upper += part >= FRACTIONS[level];
    const double low = slot[LEVEL + upper - 1], high = slot[LEVEL + upper];
    const double way = (part - FRACTIONS[upper - 1]) * STEPS[upper], inside = smaller(way, 1.0);
    const double slowed = high / larger(high - (high - low) * inside, LEAST);
    return low * slowed + (high - low) * (way - inside);
}

/* Rows from `first` on, before `end`. */
struct range {
    int64_t first, end;
};

/* Decodes of which some have ended by a time: seconds of a batch, and for those that ended, by when. */
struct running {
    const struct decodes *decodes;
    double total, ended_cost, ended_work;
    int64_t at;
};

static struct running running_of(const struct decodes *decodes)
{
    struct running running = {decodes, 0.0, 0.0, 0.0, 0};
    for (int64_t j = 0; j < decodes->count; j++)
        running.total += decodes->cost[j];
    return running;
}

/* The mean decode time of a batch over the next `until` seconds, which grows from call to call. A
 * decode that is behind its pace goes on for another `least`. */
static double mean_until(struct running *running, double until, double now, double least)
{
    const struct decodes *decodes = running->decodes;
    double left;
    while (running->at < decodes->count &&
           (left = larger(decodes->ends[running->at] - now, least)) < until) {
        running->ended_work += left * decodes->cost[running->at];
        running->ended_cost += decodes->cost[running->at++];
    }
    return running->ended_work / until + (running->total - running->ended_cost);
}

/* The mean decode time of a batch from now until each of those rows is due, at least `budget` from
 * now. */
static void medha_mean(const struct rows *rows, double *mean, struct range of,
                       const struct decodes *decodes, double now, double budget, double least)
{
    const double *due = rows->columns + DUE * rows->capacity;
    struct running running = running_of(decodes);
    for (int64_t i = of.first; i < of.end; i++)
        mean[i] = mean_until(&running, larger(due[i] - now, budget), now, least);
}

/* Adds a decode that is to come to the means of those rows. It fills a part of a row's own run, which
 * is its window, or the work if the row must run before the window, too. */
static void medha_coming(const struct rows *rows, double *mean, struct range of,
                         const struct decode *decode, double now, double budget)
{
    const double *due = rows->columns + DUE * rows->capacity;
    const double *bare = rows->columns + BARE_WORK * rows->capacity;
    const double cost = decode->cost, length = decode->length, begin = decode->begin;
    for (int64_t i = decode->first > of.first ? decode->first : of.first; i < of.end; i++) {
        const double window = larger(due[i] - now, budget) - begin;
        const double run = larger(larger(window, bare[i]), 1e-9);
        mean[i] += cost * (larger(smaller(length, window), 0.0) / run);
    }
}

/* What a decode that is to come adds to the mean of a prompt that has no row, due at `due`. */
static double medha_coming_until(const struct rows *rows, const struct decode *decode, double due,
                                 double now, double budget)
{
    const double window = larger(due - now, budget) - decode->begin;
    if (window <= 0.0 || decode->first > medha_first_due(rows, due))
        return 0.0;
    return decode->cost * smaller(decode->length, window) / window;
}

/* MEAN, times `part`, is alongside each of those rows from now on. */
static void medha_apply(struct rows *rows, struct range of, double part)
{
    const double *mean = rows->scratch + MEAN * rows->capacity;
    double *alongside = rows->columns + ALONGSIDE * rows->capacity;
    double *work = rows->columns + WORK * rows->capacity;
    for (int64_t i = of.first; i < of.end; i++)
        alongside[i] = mean[i] * part;
    for (int64_t i = of.first; i < of.end; i++) {
        fetch_slot(rows, i);
        work[i] = between(slot_of(rows, i), alongside[i]);
    }
    if (of.first < of.end)
        forget_sums(rows, of.first);
}

/* What a decode adds to the mean of a row that is due in `due_in` seconds. */
static double tried(const struct decode *decode, int64_t row, double due_in, double bare)
{
    if (row < decode->first)
        return 0.0;
    const double window = due_in - decode->begin;
    const double run = decode->kind == RUNS ? window : larger(larger(window, bare), 1e-9);
    return decode->cost * (larger(smaller(decode->length, window), 0.0) / run);
}

/* TRIAL: the work of every promise alongside the decodes that are counted, at least `least` (a part
 * of the capacity), and so many more. */
static void medha_try(struct rows *rows, double least, const struct decode *decodes, int64_t more,
                      double now, double budget, double part)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size, *counted = rows->columns + ALONGSIDE * size;
    const double *bare = rows->columns + BARE_WORK * size;
    const uint8_t *promised = rows->flags + PROMISED * size;
    double *trial = rows->scratch + TRIAL * size;
    struct walk walk = walk_over(promised, count);
    for (int64_t i = next_row(&walk); i < count; i = next_row(&walk)) {
        fetch_slot(rows, i);
        double added = 0.0;
        for (int64_t k = 0; k < more; k++)
            added += tried(decodes + k, i, larger(due[i] - now, budget), bare[i]);
        trial[i] = between(slot_of(rows, i), larger(counted[i], least) + added * part);
    }
}

/* --- promises --------------------------------------------------------------------------------- */

/* What is left of the time of the row at `place`, or of a kept row due later, if it is kept, too:
 * negative if it does not fit. */
static double medha_room(const struct rows *rows, int64_t place, double start, double overhead)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size, *work = rows->columns + WORK * size;
    struct walk walk = walk_over(rows->flags + KEPT * size, count);
    double sum = 0.0, before = 0.0, later = INFINITY;
    for (int64_t i = next_row(&walk); i < count; i = next_row(&walk)) {
        sum += work[i] + overhead;
        const double due_in = due[i] - start, margin = due_in - sum;
        if (i < place)
            before = due_in - margin;
        else
            later = smaller(margin, later);
    }
    return smaller(due[place] - start - before, later) - (work[place] + overhead);
}

/* The least margin of a promise if everything else gives way, infinite with none: by TRIAL with
 * `tried`, else by WORK. */
static double medha_least(const struct rows *rows, int tried, double start, double overhead,
                          double inflation)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size;
    const double *work = tried ? rows->scratch + TRIAL * size : rows->columns + WORK * size;
    const uint8_t *promised = rows->flags + PROMISED * size;
    struct walk walk = walk_over(promised, count);
    double sum = 0.0, least = INFINITY;
    for (int64_t i = next_row(&walk); i < count; i = next_row(&walk)) {
        sum += (work[i] + overhead) * inflation;
        least = smaller(due[i] - start - sum, least);
    }
    return least;
}

/* The first of so many promises in one of so many runs. */
static int64_t first_of_run(int64_t run, int64_t promises, int64_t runs)
{
    return run < runs ? run * promises / runs : -1;
}

/* The promises by deadline: their times until due from `start` on, and `most` behind them their
 * margins by TRIAL. Where there are more than `most`, each is of a run of promises, as if all its
 * work were due with the first. Returns how many. */
static int64_t medha_promises(const struct rows *rows, int64_t promises, double start,
                              double overhead, double inflation, int64_t most, double *found)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size, *trial = rows->scratch + TRIAL * size;
    const uint8_t *promised = rows->flags + PROMISED * size;
    const int64_t runs = promises < most ? promises : most;
    struct walk walk = walk_over(promised, count);
    double sum = 0.0;
    int64_t run = -1, seen = 0;
    for (int64_t i = next_row(&walk); i < count; i = next_row(&walk)) {
        sum += (trial[i] + overhead) * inflation;
        if (seen++ == first_of_run(run + 1, promises, runs))
            found[++run] = due[i] - start;
        found[most + run] = found[run] - sum;
    }
    return runs;
}

/* The first promise, at or after the row `place` if that is not -1, that lacks room for short prompts
 * to come: they take the part `coming` of its time. `place` counts as kept. Works are those alongside
 * at least `expected` (a part of the capacity). Returns its row, or -1. */
static int64_t medha_tight(const struct rows *rows, int64_t place, double now, double drain,
                           double overhead, double inflation, double expected, double coming)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size;
    const double *alongside = rows->columns + ALONGSIDE * size;
    const uint8_t *kept = rows->flags + KEPT * size, *promised = rows->flags + PROMISED * size;
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        if (!kept[i] && i != place)
            continue;
        const double work = between(slot_of(rows, i), larger(alongside[i], expected));
        sum += promised[i] ? (work + overhead) * inflation : work;
        if (promised[i] && i >= place && (due[i] - now - drain) * (1.0 - coming) < sum)
            return i;
    }
    return -1;
}

/* The largest row, with work beyond `long_above`, that is kept without a promise and due before a
 * promise that lacks room as in `medha_tight`. Returns -1 if there is none. */
static int64_t medha_crowding(const struct rows *rows, double long_above, double now, double drain,
                              double overhead, double inflation, double expected, double coming)
{
    const double *work = rows->columns + WORK * rows->capacity;
    const uint8_t *kept = rows->flags + KEPT * rows->capacity;
    const uint8_t *promised = rows->flags + PROMISED * rows->capacity;
    struct walk walk = walk_over(kept, rows->count);
    int64_t largest = -1, end = rows->count;
    for (int64_t i = next_row(&walk); i < end; i = next_row(&walk)) {
        if (promised[i] || work[i] <= (largest < 0 ? long_above : work[largest]))
            continue;
        if (largest < 0) {
            end = medha_tight(rows, -1, now, drain, overhead, inflation, expected, coming);
            if (end < i)
                return -1;
        }
        largest = i;
    }
    return largest;
}

/* Whether a promised row needs pages. */
static int medha_promise_needs(const struct rows *rows)
{
    const double *need = rows->columns + NEED * rows->capacity;
    struct walk walk = walk_over(rows->flags + PROMISED * rows->capacity, rows->count);
    for (int64_t i = next_row(&walk); i < rows->count; i = next_row(&walk))
        if (need[i] > 0.0)
            return 1;
    return 0;
}

/* Whether a row is neither kept nor beyond its tenant's share. */
static int medha_relegated(const struct rows *rows)
{
    const uint8_t *kept = rows->flags + KEPT * rows->capacity;
    const uint8_t *beyond = rows->flags + BEYOND * rows->capacity;
    for (int64_t i = 0; i < rows->count; i++)
        if (!kept[i] && !beyond[i])
            return 1;
    return 0;
}

/* The work of the rows before `row`, or before its end: sums that still hold are not added again. */
static double medha_work_before(struct rows *rows, int64_t row)
{
    const double *work = rows->columns + WORK * rows->capacity;
    double *before = rows->scratch + BEFORE * rows->capacity;
    double sum = rows->summed ? before[rows->summed - 1] : 0.0;
    for (int64_t i = rows->summed; i < row; i++)
        before[i] = sum += work[i];
    rows->summed = row > rows->summed ? row : rows->summed;
    return row ? before[row - 1] : 0.0;
}

/* --- reports ---------------------------------------------------------------------------------- */

/* Sums of work: by relative slack, up to each of the `edges`; of what is not kept; of short prompts that are kept, and
 * of those that are not; and the number of rows in need of pages. What is beyond the share of its tenant
 * runs last, as if it had infinite slack. */
enum { LOST = BANDS, KEPT_SHORT, LOST_SHORT, NEEDY, SUMS };
/* Two bands each: an index would wait for the sum that the row before has stored. */
typedef double two_bands __attribute__((vector_size(16)));
typedef int64_t which_bands __attribute__((vector_size(16)));
static const two_bands NUMBERS[BANDS / 2] = {{0.0, 1.0}, {2.0, 3.0}, {4.0, 5.0}, {6.0, 7.0}};
static void medha_report(const struct rows *rows, double now, double short_below,
                         const double *edges, int all_kept, double *sums)
{
    const int64_t size = rows->capacity;
    const double *due = rows->columns + DUE * size, *work = rows->columns + WORK * size;
    const double *need = rows->columns + NEED * size, *norm = rows->columns + NORM * size;
    double *restrict band = rows->scratch + KEY * size;
    const uint8_t *kept = rows->flags + KEPT * size, *beyond = rows->flags + BEYOND * size;
    two_bands bands[BANDS / 2] = {{0.0, 0.0}};
    double lost = 0.0, kept_short = 0.0, lost_short = 0.0;
    int64_t needy = 0;
    for (int64_t i = 0; i < rows->count; i++) {
        const double slack = (due[i] - now - work[i]) / norm[i];
        double above = 0.0;
        for (int upto = 0; upto < BANDS - 1; upto++)
            above += edges[upto] < slack ? 1.0 : 0.0;
        band[i] = above;
    }
    for (int64_t i = 0; i < rows->count; i++)
        band[i] = beyond[i] & !(kept[i] | all_kept) ? BANDS - 1 : band[i];
    for (int64_t i = 0; i < rows->count; i++) {
        const int is_lost = !(kept[i] | all_kept), is_short = norm[i] <= short_below;
        const two_bands own = {band[i], band[i]}, both = {work[i], work[i]};
        for (int of = 0; of < BANDS / 2; of++)
            bands[of] += (two_bands)((NUMBERS[of] == own) & (which_bands)both);
        lost += only(is_lost, work[i]);
        kept_short += only(is_short & (1 - is_lost), work[i]);
        lost_short += only(is_short & is_lost, work[i]);
        needy += need[i] > 0.0;
    }
    memcpy(sums, bands, sizeof bands);
    sums[LOST] = lost;
    sums[KEPT_SHORT] = kept_short;
    sums[LOST_SHORT] = lost_short;
    sums[NEEDY] = (double)needy;
}

/* --- promises that span groups ---------------------------------------------------------------- */

/* The `count` prompts that several groups work on, in order of (due,
 * arrival, id). Those of the k-th are `parts`, indices of `groups`, from `first[k]` to `first[k + 1]`
 * in the order in which it works in them. `row`: of each prompt in one group, or -1. Of each group:
 * how far it is `summed`, and scratch. */
struct spans {
    struct rows **groups;
    int64_t *numbers, *first, *parts, *row;
    double *due, *spare;
    struct reach { int64_t at; double sum, free, laid, own, single, least; } *reach;
    int64_t count, group_count;
};

/* Works that a layout takes: WORK, but TRIAL in the group `tried`. */
struct terms {
    int64_t tried;
    double by, overhead, inflation;
};

static double cost_of(const struct spans *spans, int64_t group, int64_t row,
                      const struct terms *terms)
{
    const struct rows *rows = spans->groups[group];
    const double *work = terms->tried == group ? rows->scratch + TRIAL * rows->capacity
                                               : rows->columns + WORK * rows->capacity;
    return (work[row] + terms->overhead) * terms->inflation;
}

/* Adds up the costs of a group's promises up to the prompt; returns its row, or -1. */
static int64_t reach(const struct spans *spans, int64_t group, double due, int64_t number,
                     const struct terms *terms)
{
    const struct rows *rows = spans->groups[group];
    const double *all_due = rows->columns + DUE * rows->capacity;
    const uint8_t *promised = rows->flags + PROMISED * rows->capacity;
    struct reach *of = spans->reach + group;
    int64_t end = of->at;
    while (end < rows->count && all_due[end] < due)
        end++;
    const int64_t row = row_from(rows, end, due, number);
    if (row >= 0)
        end = row + 1;
    for (; of->at < end; of->at++)
        if (promised[of->at])
            of->sum += cost_of(spans, group, of->at, terms);
    return row;
}

/* When the k-th prompt leaves stage 0 in all of its groups, -1 if it has no promise or nothing left
 * to do: a prompt of one group is laid out behind the work of its group, this one phase by phase
 * behind all of its groups. The k-th group works from phase k on, so that phase k lasts the k-th
 * group's work less that of the next. */
static double end_of(const struct spans *spans, int64_t k, int64_t focus,
                     const struct terms *terms)
{
    const int64_t *first = spans->parts + spans->first[k], *last = spans->parts + spans->first[k + 1];
    int counts = 0;
    spans->row[k] = -1;
    for (const int64_t *part = first; part < last; part++) {
        struct reach *of = spans->reach + *part;
        const struct rows *rows = spans->groups[*part];
        const int64_t row = reach(spans, *part, spans->due[k], spans->numbers[k], terms);
        of->own = -1.0;
        if (row < 0)
            continue;
        if (*part == focus)
            spans->row[k] = row;
        counts = rows->flags[PROMISED * rows->capacity + row] &&
                 slot_of(rows, row)[TOKENS] > 0.0;
        of->own = cost_of(spans, *part, row, terms);
        of->single = of->sum - of->own - of->laid;
    }
    if (!counts)
        return -1.0;
    double end = 0.0;
    for (const int64_t *part = first, *next; part < last; part = next) {
        const struct reach *of = spans->reach + *part;
        for (next = part + 1; next < last && spans->reach[*next].own < 0.0;)
            next++;
        if (of->own < 0.0)
            continue;
        const double later = next < last ? spans->reach[*next].own : 0.0;
        end = larger(end, of->free + of->single) + larger(0.0, of->own - later);
    }
    for (const int64_t *part = first; part < last; part++) {
        struct reach *of = spans->reach + *part;
        if (of->own < 0.0)
            continue;
        of->free = end - of->single;
        of->laid += of->own;
    }
    return end;
}

/* Each prompt's margin, the smaller of its own and those of promises laid out behind it; infinite
 * without a promise. */
static void lay_out(const struct spans *spans, int64_t focus, const struct terms *terms)
{
    double *spare = spans->spare;
    for (int64_t group = 0; group < spans->group_count; group++)
        spans->reach[group] = (struct reach){.least = INFINITY};
    for (int64_t k = 0; k < spans->count; k++)
        spare[k] = end_of(spans, k, focus, terms);
    for (int64_t k = spans->count - 1; k >= 0; k--) {
        const int64_t *first = spans->parts + spans->first[k];
        const int64_t *last = spans->parts + spans->first[k + 1];
        if (spare[k] < 0.0) {
            spare[k] = INFINITY;
            continue;
        }
        spare[k] = spans->due[k] - terms->by - spare[k];
        for (const int64_t *part = first; part < last; part++)
            spare[k] = smaller(spans->reach[*part].least, spare[k]);
        for (const int64_t *part = first; part < last; part++)
            spans->reach[*part].least = spare[k];
    }
}

/* The least margin of a promise of `group` that spans groups, infinite with none: with `tried` by
 * TRIAL there, else by WORK. */
static double medha_spans_least(const struct spans *spans, int64_t group, int tried, double by,
                                double overhead, double inflation)
{
    const struct terms terms = {tried ? group : spans->group_count, by, overhead, inflation};
    double least = INFINITY;
    lay_out(spans, group, &terms);
    for (int64_t k = 0; k < spans->count; k++)
        if (spans->row[k] >= 0)
            least = smaller(spans->spare[k], least);
    return least;
}

/* Limits LEFT of promises of `group` to their margins across groups, after `medha_margins`. */
static void medha_spans_lower(const struct spans *spans, int64_t group, double by, double overhead,
                              double inflation)
{
    const struct terms terms = {spans->group_count, by, overhead, inflation};
    struct rows *rows = spans->groups[group];
    double *left = rows->scratch + LEFT * rows->capacity;
    lay_out(spans, group, &terms);
    for (int64_t k = 0; k < spans->count; k++) {
        const int64_t row = spans->row[k];
        if (row < 0 || spans->spare[k] == INFINITY)
            continue;
        left[row] = smaller(spans->spare[k], left[row]);
        rows->least = smaller(left[row], rows->least);
        rows->least_promised = smaller(left[row], rows->least_promised);
    }
}

/* --- one decision with `lars` ----------------------------------------------------------------- */

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
static void medha_margins(struct rows *rows, double start, double overhead, double inflation)
{
    const int64_t size = rows->capacity;
    const double *due = rows->columns + DUE * size, *work = rows->columns + WORK * size;
    const uint8_t *kept = rows->flags + KEPT * size, *promised = rows->flags + PROMISED * size;
    double *bare = rows->scratch + BARE * size, *left = rows->scratch + LEFT * size;
    int8_t *rank = rows->marks + RANK * size;
    double sum = 0.0, full = 0.0, sure = 0.0;
    double least = INFINITY, least_promised = INFINITY, least_bare = INFINITY;
    int64_t count = 0;
    for (int64_t i = 0; i < rows->count; i++)
        rank[i] = (int8_t)(kept[i] + (kept[i] & promised[i]));
    struct walk walk = walk_over(kept, rows->count);
    for (int64_t i = next_row(&walk); i < rows->count; i = next_row(&walk)) {
        rows->held[count++] = (int32_t)i;
        const double cost = work[i] + overhead, due_in = due[i] - start;
        const double also[] = {cost, cost * inflation}, more[] = {0.0, cost};
        sum += cost;
        full += also[promised[i]];
        sure += more[promised[i]];
        const double taken[] = {sum, full};
        bare[i] = cost;
        left[i] = due_in - taken[promised[i]];
        least = smaller(left[i], least);
        least_promised = smaller(left[i] + MERELY[rank[i]], least_promised);
        least_bare = smaller(due_in - sure + MERELY[rank[i]], least_bare);
    }
    rows->kept = count;
    rows->least = least;
    rows->least_promised = least_promised;
    rows->least_bare = least_bare;
}

/* Where a margin is overrun, of who is kept without a promise and due no later the largest gives
 * way: by more than `tolerance` for those themselves, at all for a promise. At most `most` do, the
 * earliest overrun first; their rows go to `lost`. Those of RANK 3 are kept, and do not. Returns how
 * many. */
static int64_t medha_relegate(struct rows *rows, double tolerance, int64_t most, int64_t *lost)
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
static void medha_open(struct rows *rows, double start, double overhead, double inflation)
{
    const int64_t size = rows->capacity;
    const double *due = rows->columns + DUE * size, *work = rows->columns + WORK * size;
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
static int64_t medha_fitting(const struct rows *rows, double guard, int64_t after)
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
static void medha_keep(struct rows *rows, int64_t row)
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
 * before it bear (anyone else: those of all), and of that `guard` does not count. A long one without
 * a promise also leaves SPARED of each promise: with no margin, no short prompt without one could
 * start, as its decode would break the promise.
 * `long_above`: work, or with `by_tokens` tokens, beyond which a prompt is long. `owed`: 0, or the
 * relegated have their share coming and it is the turn of 1: the one due first, 2: short ones.
 * What is beyond the share of its tenant has only what is left over. */
static void medha_order(struct rows *rows, double pages, double start, double long_above,
                        int by_tokens, double guard, int owed)
{
    const int64_t size = rows->capacity, count = rows->count;
    const double *due = rows->columns + DUE * size, *all_work = rows->columns + WORK * size;
    const double *need = rows->columns + NEED * size, *norm = rows->columns + NORM * size;
    const double *left = rows->scratch + LEFT * size;
    const uint8_t *kept = rows->flags + KEPT * size, *ready = rows->flags + READY * size;
    const uint8_t *beyond = rows->flags + BEYOND * size;
    double *restrict key = rows->scratch + KEY * size, before = INFINITY, spared = INFINITY;
    const int8_t *rank = rows->marks + RANK * size;
    int8_t *restrict tier = rows->marks + TIER * size;
    int8_t *restrict is_long = rows->marks + LONG * size;
    int32_t *restrict able = rows->able;
    const double all_bear = rows->least - guard;
    int64_t found = 0, at = 0;
    for (int64_t i = 0; i < count; i++) {
        able[found] = (int32_t)i;
        found += ready[i] & (need[i] <= pages);
    }
    for (int64_t i = 0; i < count; i++)
        is_long[i] = (by_tokens ? slot_of(rows, i)[TOKENS] : all_work[i]) > long_above;
    for (int64_t i = 0; i < count; i++) { /* as if nobody were kept */
        tier[i] = (all_bear >= all_work[i]) & !is_long[i] & !beyond[i] ? ABSORBED : RELEGATED;
        key[i] = all_work[i];
    }
    rows->last = rows->least;
    struct walk walk = walk_over(kept, count);
    walk.also = rank;
    for (int64_t i = next_row(&walk); i < count; i = next_row(&walk)) {
        const double work = all_work[i], due_in = due[i] - start;
        const double reserved[] = {0.0, 0.0, due_in * SPARED, 0.0};
        const double room = rank[i] ? before - guard : all_bear;
        const double long_room = rank[i] == 1 ? spared - guard : room;
        rows->last = rank[i] && i == count - 1 ? before : rows->last;
        before = smaller(left[i] + APART[rank[i]], before);
        /* Of a promise that is never due this is not a number: not smaller than any. */
        spared = smaller(left[i] - reserved[rank[i]] + APART[rank[i]], spared);
        if (room >= work && !is_long[i] && (kept[i] || !beyond[i]))
            tier[i] = ABSORBED;
        else if (!kept[i])
            tier[i] = RELEGATED;
        else if (is_long[i] && long_room >= 0.0)
            tier[i] = SLACK, key[i] = (due_in - work) / norm[i];
        else
            tier[i] = DEADLINE, key[i] = due_in;
    }
    if (!count)
        rows->last = INFINITY;
    rows->left = found;
    if (!owed)
        return;
    int64_t first = -1, brief = -1; /* relegated ones: the first, and the first short one */
    for (at = 0; at < found && (first < 0 || (owed == 2 && brief < 0)); at++) {
        const int64_t i = able[at];
        if (kept[i] || beyond[i])
            continue;
        first = first < 0 ? i : first;
        brief = is_long[i] ? brief : i;
    }
    if (owed == 2 && brief >= 0) {
        for (at = 0; at < found; at++) {
            const int64_t i = able[at];
            tier[i] = kept[i] | beyond[i] | is_long[i] ? tier[i] : OWED;
        }
    } else if (first >= 0)
        tier[first] = OWED;
}

/* Whether row `a` is visited before row `b`: ties by (arrival, id), of which TURN is the rank. */
static int precedes(const struct rows *rows, int64_t a, int64_t b)
{
    const int8_t *tier = rows->marks + TIER * rows->capacity;
    const double *key = rows->scratch + KEY * rows->capacity;
    if (tier[a] != tier[b])
        return tier[a] < tier[b];
    return key[a] != key[b] ? key[a] < key[b]
                            : slot_of(rows, a)[TURN] < slot_of(rows, b)[TURN];
}

/* The next rows in order that need at most `pages` and, with `only_short`, are not long: the places
 * of at most `most` go to `few`, behind them `most` tiers and `most` times whether it is long.
 * Returns how many there are; they are not handed out again. */
static int64_t medha_few(struct rows *rows, double pages, int only_short, int64_t most,
                         int64_t *few)
{
    const double *need = rows->columns + NEED * rows->capacity;
    int8_t *tier = rows->marks + TIER * rows->capacity;
    const int8_t *is_long = rows->marks + LONG * rows->capacity;
    int64_t found = 0;
    int least = NONE; /* tier of the last of `few` once they are complete */
    for (int64_t at = 0; at < rows->left; at++) {
        const int64_t i = rows->able[at];
        if (tier[i] > least || tier[i] == NONE || need[i] > pages || (only_short && is_long[i]))
            continue;
        if (found == most && !precedes(rows, i, few[most - 1]))
            continue;
        int64_t at = found < most ? found++ : most - 1;
        for (; at > 0 && precedes(rows, i, few[at - 1]); at--)
            few[at] = few[at - 1];
        few[at] = i;
        least = found < most ? NONE : tier[few[most - 1]];
    }
    for (int64_t at = 0; at < found; at++) {
        few[most + at] = tier[few[at]];
        few[2 * most + at] = is_long[few[at]];
        tier[few[at]] = NONE;
    }
    return found;
}

/* --- Python ----------------------------------------------------------------------------------- */

enum { ARRAYS = 8 }; /* of `struct rows`, in this order */
struct Rows {
    PyObject_HEAD
    struct rows rows;
    Py_buffer buffers[ARRAYS];
};

struct Decodes {
    PyObject_HEAD
    struct decodes decodes;
};

/* `holders`: the tuple of Rows to which `spans.groups` points. `memory`: all its arrays. */
struct Spans {
    PyObject_HEAD
    struct spans spans;
    PyObject *holders;
    void *memory;
};

static PyTypeObject *rows_type, *decodes_type;

/* Takes a method's arguments, each as a letter says: `d` a double; `n` an int64_t; of `rows` a row
 * `r`, a row or the place behind them `p`, or a row or -1 `o`. Returns 0 with an exception set. */
static int take(PyObject *const *arguments, Py_ssize_t given, const struct rows *rows,
                const char *letters, ...)
{
    va_list targets;
    if (given != (Py_ssize_t)strlen(letters)) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", strlen(letters), given);
        return 0;
    }
    va_start(targets, letters);
    for (Py_ssize_t at = 0; at < given; at++) {
        if (letters[at] == 'd') {
            *va_arg(targets, double *) = PyFloat_AsDouble(arguments[at]);
            continue;
        }
        const int64_t value = PyLong_AsLongLong(arguments[at]);
        const int64_t least = letters[at] == 'o' ? -1 : 0;
        *va_arg(targets, int64_t *) = value;
        if (letters[at] != 'n' && !(value == -1 && PyErr_Occurred()) &&
            (value < least || value >= rows->count + (letters[at] == 'p'))) {
            PyErr_Format(PyExc_IndexError, "row %lld of %lld", value, rows->count);
            break;
        }
    }
    va_end(targets);
    return !PyErr_Occurred();
}

/* Takes the numbers of a sequence; returns 0 with an exception set if there are not `count`. */
static int take_numbers(PyObject *sequence, double *numbers, Py_ssize_t count)
{
    const Py_ssize_t given = PySequence_Size(sequence);
    if (given != count) {
        if (given >= 0)
            PyErr_Format(PyExc_ValueError, "%zd numbers, not %zd", count, given);
        return 0;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *number = PySequence_GetItem(sequence, at);
        numbers[at] = number ? PyFloat_AsDouble(number) : -1.0;
        Py_XDECREF(number);
    }
    return !PyErr_Occurred();
}

/* The decode that follows a prompt: at the end of its bare work, alongside the rows behind it; if it
 * is relegated, in that `part` of the time, and alongside all rows. At once if nothing of it waits. */
static void follow(const struct rows *rows, struct decode *decode, int64_t number, double due,
                   double now, double budget, double part)
{
    const int64_t row = row_from(rows, medha_first_due(rows, due), due, number);
    if (row < 0 || slot_of(rows, row)[TOKENS] <= 0.0)
        return;
    const double bare = rows->columns[BARE_WORK * rows->capacity + row];
    if (rows->flags[KEPT * rows->capacity + row]) {
        decode->begin = smaller(bare, larger(due - now, budget));
        decode->first = row + 1;
    } else
        decode->begin = bare / part;
}

/* Takes a decode from (kind, cost, length, in how many seconds it begins, number, due). If it
 * FOLLOWS the prompt of that number, due then, the fourth is the part of the time that the prompt
 * has if it is relegated. */
static int take_decode(PyObject *tuple, const struct rows *rows, double now, double budget,
                       struct decode *decode)
{
    PyObject *items[6];
    int64_t number;
    double begin, due;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 6) {
        PyErr_SetString(PyExc_TypeError, "a decode is a tuple of six");
        return 0;
    }
    for (Py_ssize_t at = 0; at < 6; at++)
        items[at] = PyTuple_GetItem(tuple, at);
    if (!take(items, 6, rows, "ndddnd", &decode->kind, &decode->cost, &decode->length, &begin,
              &number, &due))
        return 0;
    decode->first = 0, decode->begin = decode->kind == COMES ? begin : 0.0;
    if (decode->kind == FOLLOWS)
        follow(rows, decode, number, due, now, budget, begin);
    return 1;
}

static PyObject *list_of_numbers(const double *numbers, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t at = 0; list && at < count; at++)
        if (PyList_SetItem(list, at, PyFloat_FromDouble(numbers[at])) < 0)
            Py_CLEAR(list);
    return list;
}

/* The methods of Rows. */
#define ROWS_METHOD(name) \
    static PyObject *rows_##name(struct Rows *self, PyObject *const *arguments, Py_ssize_t given)
#define TAKE(...) \
    if (!take(arguments, given, &self->rows, __VA_ARGS__)) \
        return NULL

/* Uses those arrays from now on: of one capacity, a multiple of eight, they hold all rows. */
ROWS_METHOD(allot)
{
    static const Py_ssize_t widths[ARRAYS] = {COLUMNS * 8, FLAGS, SLOT * 8, 4, SCRATCH * 8, MARKS,
                                              4, 4};
    struct rows *rows = &self->rows;
    Py_buffer buffers[ARRAYS];
    Py_ssize_t at = 0, capacity = 0;
    if (given != ARRAYS)
        return PyErr_Format(PyExc_TypeError, "%d arrays, not %zd", ARRAYS, given);
    for (; at < ARRAYS && !PyErr_Occurred(); at++) {
        if (PyObject_GetBuffer(arguments[at], buffers + at, PyBUF_WRITABLE) < 0)
            break;
        capacity = buffers[0].len / widths[0];
        if (buffers[at].len != capacity * widths[at] || capacity % 8 || capacity < rows->count)
            PyErr_Format(PyExc_ValueError, "array %zd has another capacity", at);
    }
    if (PyErr_Occurred()) {
        while (at)
            PyBuffer_Release(buffers + --at);
        return NULL;
    }
    for (at = 0; at < ARRAYS; at++)
        PyBuffer_Release(self->buffers + at);
    memcpy(self->buffers, buffers, sizeof buffers);
    rows->columns = buffers[0].buf, rows->flags = buffers[1].buf, rows->slots = buffers[2].buf;
    rows->slot = buffers[3].buf, rows->scratch = buffers[4].buf, rows->marks = buffers[5].buf;
    rows->held = buffers[6].buf, rows->able = buffers[7].buf, rows->capacity = capacity;
    rows->summed = 0; /* scratch does not move along */
    Py_RETURN_NONE;
}

ROWS_METHOD(first_due)
{
    double due;
    TAKE("d", &due);
    return PyLong_FromLongLong(medha_first_due(&self->rows, due));
}

/* Inserts a row; its levels are the last argument, and its work is that alongside `alongside`. */
ROWS_METHOD(insert)
{
    struct rows *rows = &self->rows;
    double columns[COLUMNS], values[SLOT];
    int64_t at, flags;
    if (given != 11)
        return PyErr_Format(PyExc_TypeError, "11 arguments, not %zd", given);
    if (!take(arguments, 10, rows, "pndddddddd", &at, &flags, columns + DUE, columns + ALONGSIDE,
              columns + NEED, columns + NORM, values + ARRIVAL, values + TOKENS, values + TURN,
              values + NUMBER) ||
        !take_numbers(arguments[10], values + LEVEL, LEVELS))
        return NULL;
    if (rows->count == rows->capacity)
        return PyErr_Format(PyExc_IndexError, "no room beyond %lld rows", (long long)rows->count);
    values[PASSED] = INFINITY;
    columns[WORK] = between(values, columns[ALONGSIDE]);
    columns[BARE_WORK] = values[LEVEL];
    medha_insert(rows, at, flags, columns, values);
    Py_RETURN_NONE;
}

ROWS_METHOD(remove)
{
    int64_t row;
    TAKE("r", &row);
    medha_remove(&self->rows, row);
    Py_RETURN_NONE;
}

/* update(row, ready, tokens, levels) */
ROWS_METHOD(update)
{
    struct rows *rows = &self->rows;
    double tokens, levels[LEVELS];
    int64_t row, ready;
    if (given != 4)
        return PyErr_Format(PyExc_TypeError, "4 arguments, not %zd", given);
    if (!take(arguments, 3, rows, "rnd", &row, &ready, &tokens) ||
        !take_numbers(arguments[3], levels, LEVELS))
        return NULL;
    double *slot = slot_of(rows, row);
    slot[TOKENS] = tokens;
    memcpy(slot + LEVEL, levels, sizeof levels);
    rows->columns[WORK * rows->capacity + row] =
        between(slot, rows->columns[ALONGSIDE * rows->capacity + row]);
    rows->columns[BARE_WORK * rows->capacity + row] = levels[0];
    forget_sums(rows, row);
    set_flag(rows, row, READY, ready != 0);
    Py_RETURN_NONE;
}

ROWS_METHOD(set_flags)
{
    int64_t row, kept, promised, ready;
    TAKE("rnnn", &row, &kept, &promised, &ready);
    set_flag(&self->rows, row, KEPT, kept != 0);
    set_flag(&self->rows, row, PROMISED, promised != 0);
    set_flag(&self->rows, row, READY, ready != 0);
    Py_RETURN_NONE;
}

/* The row needs no pages any more. */
ROWS_METHOD(start)
{
    int64_t row;
    TAKE("r", &row);
    self->rows.columns[NEED * self->rows.capacity + row] = 0.0;
    slot_of(&self->rows, row)[PASSED] = INFINITY;
    Py_RETURN_NONE;
}

ROWS_METHOD(work)
{
    int64_t row;
    TAKE("r", &row);
    return PyFloat_FromDouble(self->rows.columns[WORK * self->rows.capacity + row]);
}

ROWS_METHOD(bare_work)
{
    int64_t row;
    TAKE("r", &row);
    return PyFloat_FromDouble(self->rows.columns[BARE_WORK * self->rows.capacity + row]);
}

/* Times that `alongside_until` takes at most. */
enum { MOST_TIMES = 64 };

/* Whether these are lists of Decodes, and of a list for each; `count` arguments follow. */
static int are_lists(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t count)
{
    int right = given == 2 + count && PyList_Check(arguments[0]) && PyList_Check(arguments[1]) &&
                PyList_Size(arguments[0]) > 0 &&
                PyList_Size(arguments[0]) == PyList_Size(arguments[1]);
    for (Py_ssize_t at = 0; right && at < PyList_Size(arguments[0]); at++)
        right = Py_IS_TYPE(PyList_GetItem(arguments[0], at), decodes_type) &&
                PyList_Check(PyList_GetItem(arguments[1], at));
    if (!right)
        PyErr_Format(PyExc_TypeError, "lists of Decodes and of lists, and %zd more", count);
    return right;
}

static const struct decodes *running_at(PyObject *list, Py_ssize_t at)
{
    return &((struct Decodes *)PyList_GetItem(list, at))->decodes;
}

/* set_alongside(decodes, coming, row, now, budget, least, part): MEAN is the largest of the groups,
 * as a batch that spans groups waits for the slowest. */
ROWS_METHOD(set_alongside)
{
    struct rows *rows = &self->rows;
    struct decode coming;
    double now, budget, least, part;
    int64_t row;
    if (!are_lists(arguments, given, 5) ||
        !take(arguments + 2, 5, rows, "odddd", &row, &now, &budget, &least, &part))
        return NULL;
    const struct range of = row < 0 ? (struct range){0, rows->count} : (struct range){row, row + 1};
    double *slowest = rows->scratch + MEAN * rows->capacity;
    for (Py_ssize_t at = 0; at < PyList_Size(arguments[0]); at++) {
        double *mean = at ? rows->scratch + MORE * rows->capacity : slowest;
        PyObject *added = PyList_GetItem(arguments[1], at);
        medha_mean(rows, mean, of, running_at(arguments[0], at), now, budget, least);
        for (Py_ssize_t k = 0; k < PyList_Size(added); k++) {
            if (!take_decode(PyList_GetItem(added, k), rows, now, budget, &coming))
                return NULL;
            medha_coming(rows, mean, of, &coming, now, budget);
        }
        for (int64_t i = of.first; at && i < of.end; i++)
            slowest[i] = larger(slowest[i], mean[i]);
    }
    medha_apply(rows, of, part);
    Py_RETURN_NONE;
}

/* alongside_until(decodes, coming, due, now, budget, least): as MEAN, of a prompt without a row, for
 * each time in the list `due`, the earliest first. */
ROWS_METHOD(alongside_until)
{
    struct rows *rows = &self->rows;
    struct decode coming;
    double due[MOST_TIMES], mean[MOST_TIMES], now, budget, least;
    if (!are_lists(arguments, given, 4) || !PyList_Check(arguments[2]) ||
        !take(arguments + 3, 3, rows, "ddd", &now, &budget, &least))
        return NULL;
    const Py_ssize_t count = PyList_Size(arguments[2]);
    if (count > MOST_TIMES || !take_numbers(arguments[2], due, count))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%zd times", count);
    for (Py_ssize_t at = 0; at < PyList_Size(arguments[0]); at++) {
        struct running running = running_of(running_at(arguments[0], at));
        PyObject *added = PyList_GetItem(arguments[1], at);
        double of_group[MOST_TIMES];
        for (Py_ssize_t k = 0; k < count; k++)
            of_group[k] = mean_until(&running, larger(due[k] - now, budget), now, least);
        for (Py_ssize_t j = 0; j < PyList_Size(added); j++) {
            if (!take_decode(PyList_GetItem(added, j), rows, now, budget, &coming))
                return NULL;
            for (Py_ssize_t k = 0; k < count; k++)
                of_group[k] += medha_coming_until(rows, &coming, due[k], now, budget);
        }
        for (Py_ssize_t k = 0; k < count; k++)
            mean[k] = at ? larger(mean[k], of_group[k]) : of_group[k];
    }
    return list_of_numbers(mean, count);
}

/* try_decodes(decodes, least, now, budget, part): `decodes` is a list of at most MOST_TRIED. */
ROWS_METHOD(try_decodes)
{
    struct decode decodes[MOST_TRIED];
    double least, now, budget, part;
    if (given != 5 || !PyList_Check(arguments[0]) || PyList_Size(arguments[0]) > MOST_TRIED)
        return PyErr_Format(PyExc_TypeError, "not a list of at most %d and four numbers", MOST_TRIED);
    if (!take(arguments + 1, 4, &self->rows, "dddd", &least, &now, &budget, &part))
        return NULL;
    const Py_ssize_t count = PyList_Size(arguments[0]);
    for (Py_ssize_t k = 0; k < count; k++)
        if (!take_decode(PyList_GetItem(arguments[0], k), &self->rows, now, budget, decodes + k))
            return NULL;
    medha_try(&self->rows, least, decodes, count, now, budget, part);
    Py_RETURN_NONE;
}

ROWS_METHOD(room)
{
    double start, overhead;
    int64_t row;
    TAKE("rdd", &row, &start, &overhead);
    return PyFloat_FromDouble(medha_room(&self->rows, row, start, overhead));
}

ROWS_METHOD(least_margin)
{
    double start, overhead, inflation;
    int64_t tried;
    TAKE("nddd", &tried, &start, &overhead, &inflation);
    return PyFloat_FromDouble(medha_least(&self->rows, tried != 0, start, overhead, inflation));
}

/* Pairs of the time until due, which counts from `after` before `start`, and the margin. */
ROWS_METHOD(promises)
{
    double start, overhead, inflation, after_s;
    int64_t most;
    TAKE("ndddd", &most, &start, &overhead, &inflation, &after_s);
    const int64_t promised = self->rows.counts[PROMISED];
    most = most < promised ? most : promised;
    most = most > 0 ? most : 0;
    double *found = PyMem_Calloc(2 * (size_t)most + 1, sizeof *found);
    if (!found)
        return PyErr_NoMemory();
    if (most)
        medha_promises(&self->rows, promised, start, overhead, inflation, most, found);
    PyObject *pairs = PyList_New(most);
    for (int64_t at = 0; pairs && at < most; at++) {
        PyObject *pair = PyTuple_New(2);
        if (!pair || PyList_SetItem(pairs, at, pair) < 0 ||
            PyTuple_SetItem(pair, 0, PyFloat_FromDouble(found[at] + after_s)) < 0 ||
            PyTuple_SetItem(pair, 1, PyFloat_FromDouble(found[most + at])) < 0)
            Py_CLEAR(pairs);
    }
    PyMem_Free(found);
    return pairs;
}

ROWS_METHOD(tight)
{
    double now, drain, overhead, inflation, expected, coming;
    int64_t row;
    TAKE("odddddd", &row, &now, &drain, &overhead, &inflation, &expected, &coming);
    return PyLong_FromLongLong(
        medha_tight(&self->rows, row, now, drain, overhead, inflation, expected, coming));
}

ROWS_METHOD(crowding)
{
    double long_above, now, drain, overhead, inflation, expected, coming;
    TAKE("ddddddd", &long_above, &now, &drain, &overhead, &inflation, &expected, &coming);
    return PyLong_FromLongLong(medha_crowding(&self->rows, long_above, now, drain, overhead,
                                              inflation, expected, coming));
}

ROWS_METHOD(promise_needs)
{
    TAKE("");
    return PyBool_FromLong(medha_promise_needs(&self->rows));
}

ROWS_METHOD(relegated)
{
    TAKE("");
    return PyBool_FromLong(medha_relegated(&self->rows));
}

ROWS_METHOD(work_before)
{
    int64_t row;
    TAKE("p", &row);
    return PyFloat_FromDouble(medha_work_before(&self->rows, row));
}

/* report(now, short below, all kept, edges) */
ROWS_METHOD(report)
{
    double now, short_below, edges[BANDS], sums[SUMS];
    int64_t all_kept;
    if (given != 4)
        return PyErr_Format(PyExc_TypeError, "4 arguments, not %zd", given);
    if (!take(arguments, 3, &self->rows, "ddn", &now, &short_below, &all_kept) ||
        !take_numbers(arguments[3], edges, BANDS))
        return NULL;
    medha_report(&self->rows, now, short_below, edges, all_kept != 0, sums);
    return list_of_numbers(sums, SUMS);
}

ROWS_METHOD(margins)
{
    double start, overhead, inflation;
    TAKE("ddd", &start, &overhead, &inflation);
    medha_margins(&self->rows, start, overhead, inflation);
    Py_RETURN_NONE;
}

ROWS_METHOD(margin)
{
    int64_t row;
    TAKE("r", &row);
    return PyFloat_FromDouble(self->rows.scratch[LEFT * self->rows.capacity + row]);
}

ROWS_METHOD(relegate)
{
    double tolerance;
    int64_t most;
    TAKE("dn", &tolerance, &most);
    most = most < self->rows.kept ? most : self->rows.kept;
    int64_t *lost = PyMem_Calloc((size_t)(most > 0 ? most : 1), sizeof *lost);
    if (!lost)
        return PyErr_NoMemory();
    const int64_t count = medha_relegate(&self->rows, tolerance, most, lost);
    PyObject *rows = PyList_New(count);
    for (int64_t at = 0; rows && at < count; at++)
        if (PyList_SetItem(rows, at, PyLong_FromLongLong(lost[at])) < 0)
            Py_CLEAR(rows);
    PyMem_Free(lost);
    return rows;
}

ROWS_METHOD(open)
{
    double start, overhead, inflation;
    TAKE("ddd", &start, &overhead, &inflation);
    medha_open(&self->rows, start, overhead, inflation);
    Py_RETURN_NONE;
}

ROWS_METHOD(fitting)
{
    double guard;
    int64_t after;
    TAKE("do", &guard, &after);
    return PyLong_FromLongLong(medha_fitting(&self->rows, guard, after));
}

ROWS_METHOD(keep)
{
    int64_t row;
    TAKE("r", &row);
    medha_keep(&self->rows, row);
    Py_RETURN_NONE;
}

ROWS_METHOD(order)
{
    double pages, start, long_above, guard;
    int64_t by_tokens, owed;
    TAKE("dddndn", &pages, &start, &long_above, &by_tokens, &guard, &owed);
    medha_order(&self->rows, pages, start, long_above, by_tokens != 0, guard, (int)owed);
    Py_RETURN_NONE;
}

/* few(pages, only_short): the next rows as (row, tier, is long). */
ROWS_METHOD(few)
{
    double pages;
    int64_t only_short, found[3 * FEW];
    TAKE("dn", &pages, &only_short);
    const int64_t count = medha_few(&self->rows, pages, only_short != 0, FEW, found);
    PyObject *few = PyList_New(count);
    for (int64_t at = 0; few && at < count; at++) {
        PyObject *next = PyTuple_New(3);
        for (int part = 0; next && part < 3; part++)
            PyTuple_SetItem(next, part, PyLong_FromLongLong(found[part * FEW + at]));
        if (!next || PyList_SetItem(few, at, next) < 0)
            Py_CLEAR(few);
    }
    return few;
}

#define METHOD(type, name) {#name, (PyCFunction)(void (*)(void))type##_##name, METH_FASTCALL, NULL}
static PyMethodDef rows_methods[] = {
    METHOD(rows, allot),           METHOD(rows, first_due),       METHOD(rows, insert),
    METHOD(rows, remove),          METHOD(rows, update),          METHOD(rows, set_flags),
    METHOD(rows, start),           METHOD(rows, work),            METHOD(rows, bare_work),
    METHOD(rows, set_alongside),   METHOD(rows, alongside_until), METHOD(rows, try_decodes),
    METHOD(rows, room),            METHOD(rows, least_margin),    METHOD(rows, promises),
    METHOD(rows, tight),           METHOD(rows, crowding),        METHOD(rows, promise_needs),
    METHOD(rows, work_before),     METHOD(rows, report),          METHOD(rows, margins),
    METHOD(rows, margin),          METHOD(rows, relegate),        METHOD(rows, open),
    METHOD(rows, fitting),         METHOD(rows, keep),            METHOD(rows, order),
    METHOD(rows, few),             METHOD(rows, relegated),
    {NULL, NULL, 0, NULL},
};

#define ROWS_MEMBER(name, field, type) \
    {name, type, offsetof(struct Rows, rows) + offsetof(struct rows, field), READONLY, NULL}
static PyMemberDef rows_members[] = {
    ROWS_MEMBER("count", count, T_LONGLONG),
    ROWS_MEMBER("kept_count", counts[KEPT], T_LONGLONG),
    ROWS_MEMBER("promised_count", counts[PROMISED], T_LONGLONG),
    ROWS_MEMBER("ready_count", counts[READY], T_LONGLONG),
    ROWS_MEMBER("least", least, T_DOUBLE),
    ROWS_MEMBER("least_promised", least_promised, T_DOUBLE),
    ROWS_MEMBER("least_bare", least_bare, T_DOUBLE),
    ROWS_MEMBER("last", last, T_DOUBLE),
    {NULL, 0, 0, 0, NULL},
};

static void free_self(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void rows_free(struct Rows *self)
{
    for (int at = 0; at < ARRAYS; at++)
        PyBuffer_Release(self->buffers + at);
    free_self((PyObject *)self);
}

static PyType_Slot rows_slots[] = {
    {Py_tp_methods, rows_methods},
    {Py_tp_members, rows_members},
    {Py_tp_dealloc, rows_free},
    {0, NULL},
};

/* The methods of Decodes. */
#define DECODES_METHOD(name) \
    static PyObject *decodes_##name(struct Decodes *self, PyObject *const *arguments, \
                                    Py_ssize_t given)

static int grow(struct decodes *decodes)
{
    const size_t capacity = 2 * (size_t)decodes->capacity + 64;
    double *ends = PyMem_Realloc(decodes->ends, capacity * sizeof *ends);
    decodes->ends = ends ? ends : decodes->ends;
    double *cost = PyMem_Realloc(decodes->cost, capacity * sizeof *cost);
    decodes->cost = cost ? cost : decodes->cost;
    int64_t *numbers = PyMem_Realloc(decodes->numbers, capacity * sizeof *numbers);
    decodes->numbers = numbers ? numbers : decodes->numbers;
    if (ends && cost && numbers)
        decodes->capacity = (int64_t)capacity;
    return ends && cost && numbers;
}

DECODES_METHOD(add)
{
    int64_t number;
    double cost, ends;
    if (!take(arguments, given, NULL, "ndd", &number, &cost, &ends))
        return NULL;
    if (self->decodes.count == self->decodes.capacity && !grow(&self->decodes))
        return PyErr_NoMemory();
    medha_begin(&self->decodes, number, cost, ends);
    Py_RETURN_NONE;
}

DECODES_METHOD(remove)
{
    int64_t number;
    double ends;
    if (!take(arguments, given, NULL, "nd", &number, &ends))
        return NULL;
    const int64_t at = medha_find(&self->decodes, number, ends);
    if (at < 0)
        return PyErr_Format(PyExc_KeyError, "decode %lld", (long long)number);
    return PyFloat_FromDouble(medha_end(&self->decodes, at));
}

static PyMethodDef decodes_methods[] = {
    METHOD(decodes, add), METHOD(decodes, remove), {NULL, NULL, 0, NULL},
};

static void decodes_free(struct Decodes *self)
{
    PyMem_Free(self->decodes.ends);
    PyMem_Free(self->decodes.cost);
    PyMem_Free(self->decodes.numbers);
    free_self((PyObject *)self);
}

static PyType_Slot decodes_slots[] = {
    {Py_tp_methods, decodes_methods},
    {Py_tp_dealloc, decodes_free},
    {0, NULL},
};

/* The methods of Spans. */
#define SPANS_METHOD(name) \
    static PyObject *spans_##name(struct Spans *self, PyObject *const *arguments, Py_ssize_t given)

/* Lays out the arrays of so many groups, prompts and parts, in one piece. */
static int lay_arrays(struct Spans *self, int64_t groups, int64_t prompts, int64_t parts)
{
    struct spans *spans = &self->spans;
    const int64_t words = groups * (1 + (int64_t)sizeof *spans->reach / 8) + 5 * prompts + 1 + parts;
    char *memory = self->memory = PyMem_Calloc((size_t)words, 8);
    if (!memory)
        return 0;
    spans->groups = (struct rows **)memory, memory += 8 * groups;
    spans->reach = (struct reach *)memory, memory += sizeof *spans->reach * (size_t)groups;
    spans->numbers = (int64_t *)memory, memory += 8 * prompts;
    spans->row = (int64_t *)memory, memory += 8 * prompts;
    spans->due = (double *)memory, memory += 8 * prompts;
    spans->spare = (double *)memory, memory += 8 * prompts;
    spans->first = (int64_t *)memory, memory += 8 * (prompts + 1);
    spans->parts = (int64_t *)memory;
    spans->count = prompts, spans->group_count = groups;
    return 1;
}

/* Takes the k-th prompt, (due, number, indices of groups), whose parts follow those before it. */
static int take_prompt(struct spans *spans, int64_t k, PyObject *prompt)
{
    PyObject *groups = PyTuple_GetItem(prompt, 2);
    int64_t *parts = spans->parts + spans->first[k];
    const Py_ssize_t count = PyTuple_Size(groups);
    spans->due[k] = PyFloat_AsDouble(PyTuple_GetItem(prompt, 0));
    spans->numbers[k] = PyLong_AsLongLong(PyTuple_GetItem(prompt, 1));
    spans->first[k + 1] = spans->first[k] + count;
    for (Py_ssize_t at = 0; at < count; at++) {
        parts[at] = PyLong_AsLongLong(PyTuple_GetItem(groups, at));
        if (parts[at] < 0 || parts[at] >= spans->group_count)
            PyErr_Format(PyExc_IndexError, "group %lld", (long long)parts[at]);
    }
    return !PyErr_Occurred();
}

/* Spans(rows of each group, [(due, number, (index of a group, …)), …]) */
static PyObject *spans_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    PyObject *holders, *prompts;
    int64_t parts = 0;
    (void)names;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyTuple_Type, &holders, &PyList_Type, &prompts))
        return NULL;
    for (Py_ssize_t at = 0; at < PyTuple_Size(holders); at++)
        if (!Py_IS_TYPE(PyTuple_GetItem(holders, at), rows_type))
            return PyErr_Format(PyExc_TypeError, "a tuple of Rows");
    for (Py_ssize_t k = 0; k < PyList_Size(prompts); k++) {
        PyObject *prompt = PyList_GetItem(prompts, k);
        if (!PyTuple_Check(prompt) || PyTuple_Size(prompt) != 3 ||
            !PyTuple_Check(PyTuple_GetItem(prompt, 2)))
            return PyErr_Format(PyExc_TypeError, "a list of (due, number, groups)");
        parts += PyTuple_Size(PyTuple_GetItem(prompt, 2));
    }
    struct Spans *self = (struct Spans *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    self->holders = Py_NewRef(holders);
    if (!lay_arrays(self, PyTuple_Size(holders), PyList_Size(prompts), parts))
        PyErr_NoMemory();
    for (Py_ssize_t at = 0; !PyErr_Occurred() && at < self->spans.group_count; at++)
        self->spans.groups[at] = &((struct Rows *)PyTuple_GetItem(holders, at))->rows;
    for (Py_ssize_t k = 0; !PyErr_Occurred() && k < self->spans.count; k++)
        take_prompt(&self->spans, k, PyList_GetItem(prompts, k));
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Takes (index of a group, …). */
static int take_group(struct Spans *self, PyObject *const *arguments, Py_ssize_t given,
                      int64_t *group, int64_t *tried, double *by, double *overhead,
                      double *inflation)
{
    if (!take(arguments, given, NULL, "nnddd", group, tried, by, overhead, inflation))
        return 0;
    if (*group >= 0 && *group < self->spans.group_count)
        return 1;
    PyErr_Format(PyExc_IndexError, "group %lld", (long long)*group);
    return 0;
}

SPANS_METHOD(least)
{
    double by, overhead, inflation;
    int64_t group, tried;
    if (!take_group(self, arguments, given, &group, &tried, &by, &overhead, &inflation))
        return NULL;
    return PyFloat_FromDouble(
        medha_spans_least(&self->spans, group, tried != 0, by, overhead, inflation));
}

SPANS_METHOD(lower)
{
    double by, overhead, inflation;
    int64_t group, tried;
    if (!take_group(self, arguments, given, &group, &tried, &by, &overhead, &inflation))
        return NULL;
    medha_spans_lower(&self->spans, group, by, overhead, inflation);
    Py_RETURN_NONE;
}

static PyMethodDef spans_methods[] = {
    METHOD(spans, least), METHOD(spans, lower), {NULL, NULL, 0, NULL},
};

static void spans_free(struct Spans *self)
{
    PyMem_Free(self->memory);
    Py_XDECREF(self->holders);
    free_self((PyObject *)self);
}

static PyType_Slot spans_slots[] = {
    {Py_tp_methods, spans_methods},
    {Py_tp_new, spans_new},
    {Py_tp_dealloc, spans_free},
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "medha.scheduling.rows", .m_size = -1};

static PyTypeObject *add_type(PyObject *rows, const char *name, size_t size, PyType_Slot *slots)
{
    PyType_Spec spec = {name, (int)size, 0, Py_TPFLAGS_DEFAULT, slots};
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type && PyModule_AddType(rows, type) == 0 ? type : NULL;
}

PyMODINIT_FUNC PyInit_rows(void)
{
    PyObject *rows = PyModule_Create(&module);
    if (!rows)
        return NULL;
    rows_type = add_type(rows, "medha.scheduling.rows.Rows", sizeof(struct Rows), rows_slots);
    decodes_type =
        add_type(rows, "medha.scheduling.rows.Decodes", sizeof(struct Decodes), decodes_slots);
    if (!rows_type || !decodes_type ||
        !add_type(rows, "medha.scheduling.rows.Spans", sizeof(struct Spans), spans_slots))
        Py_CLEAR(rows);
    return rows;
}
