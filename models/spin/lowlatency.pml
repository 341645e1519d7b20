/* Low-latency rows: a place that is blank until its row is there, and blank again once it is taken.
 *
 * N ranks make the same sequence of operations, of two kinds: out (0, a dispatch) and home (1, a
 * combine). An operation stores a row at every rank and takes one from every rank, in any order. Rows
 * out and rows home have places of their own. At the start of each call a rank sends credits: it tells all
 * ranks how many operations of either kind it has finished. It stores a row at a peer when that peer
 * has credited all earlier operations of the kind. A row carries its operation; an assertion fails
 * when another one is taken, or when a place that is not blank is stored into. `init` makes up every
 * legal sequence of calls. Words that are tagged, not blanked, are places as well: they are written
 * and read between the same two credits.
 *
 *   HALVES     an operation may be one call, or two, send and receive, with others in between.
 *   SPLIT      every operation is two calls.
 *   STEADY     dispatch and combine take turns; asserts that nobody ever waits for a credit.
 *   HOMES      with STEADY: between dispatch and combine somebody else stores the rows home, behind the
 *              credits of combines that the dispatch has waited for; the combine stores nothing. The
 *              next dispatch may then have to wait, for a row comes before its sender's combine begins.
 *   BLIND      wrong, with HOMES: the rows home are stored when the dispatch begins.
 *   EAGER      wrong: stores without a credit.
 *   HASTY      wrong: gives credit for the operation that begins.
 *   SHARED     one place for both kinds, credits of both waited for; wrong with HALVES or STEADY.
 *   LAX        wrong, with SHARED: credits of the own kind alone are waited for.
 *   UNEQUAL    wrong: rank 0 makes its first two calls the other way round.
 *   KEEP       wrong: a place is not left blank.
 */
#ifndef N
#define N 2
#endif
#ifndef CALLS
#define CALLS 4
#endif

#ifdef SHARED
#define AT(kind, owner, source) place[(owner) * N + (source)]
#else
#define AT(kind, owner, source) place[(kind) * N * N + (owner) * N + (source)]
#endif
#define CREDITED(kind, me, by) credited[(kind) * N * N + (me) * N + (by)]

/* A call: its kind, and 2 more for a send, 4 for a receive. */
#define KIND(call) ((call) % 2)
#define SENDS(call) ((call) < 4)
#define TAKES(call) ((call) < 2 || (call) >= 4)

byte place[2 * N * N];   /* 0 blank, else 2 * number + kind */
byte credited[2 * N * N]; /* operations that the last rank of the index has finished */
byte schedule[CALLS];
bool ready = false;

#if defined(EAGER)
#define MAY_STORE(k, me, p) true
#elif defined(SHARED) && !defined(LAX)
#define MAY_STORE(k, me, p) \
    (CREDITED(0, me, p) >= sent[0] - (k == 0) && CREDITED(1, me, p) >= sent[1] - (k == 1))
#else
#define MAY_STORE(k, me, p) (CREDITED(k, me, p) >= sent[k] - 1)
#endif

#ifdef KEEP
#define BLANK(k, me, p) skip
#else
#define BLANK(k, me, p) AT(k, me, p) = 0
#endif

#ifdef HOMES
#define STORES(call) (SENDS(call) && KIND(call) == 0)
#else
#define STORES(call) SENDS(call)
#endif

/* A row for everybody's next combine, by who waits for nobody. */
#define STORE_HOME \
    p = 0; \
    do \
    :: p < N -> \
        atomic { \
            assert(AT(1, p, me) == 0); \
            AT(1, p, me) = 2 * (sent[1] + 1) + 1; \
            p++ \
        } \
    :: else -> break \
    od

#ifdef HASTY
#define EARLY 1
#else
#define EARLY 0
#endif

#define WITH(p) \
    :: p < N && !stored[p] && MAY_STORE(k, me, p) -> \
        atomic { \
            assert(AT(k, p, me) == 0); \
            AT(k, p, me) = 2 * sent[k] + k; \
            stored[p] = true; left-- \
        } \
    :: p < N && !taken[p] && AT(k, me, p) != 0 -> \
        assert(AT(k, me, p) == 2 * finished[k] + 2 + k); \
        BLANK(k, me, p); \
        taken[p] = true; left--

proctype Rank(byte me) {
    byte sent[2], finished[2], step = 0, p, k, left, call;
    bool stored[3], taken[3];
    ready;
    do
    :: step < CALLS ->
#ifdef UNEQUAL
        call = schedule[(me == 0 && step < 2 -> 1 - step : step)];
#else
        call = schedule[step];
#endif
        k = KIND(call);
        p = 0;
        do
        :: p < N ->
            atomic {
                CREDITED(0, p, me) = finished[0] + EARLY;
                CREDITED(1, p, me) = finished[1] + EARLY;
                stored[p] = !STORES(call);
                taken[p] = !TAKES(call);
                p++
            }
        :: else -> break
        od;
        left = N * STORES(call) + N * TAKES(call);
        if
        :: SENDS(call) -> sent[k]++
        :: else -> skip
        fi;
#if defined(HOMES) && defined(BLIND)
        if
        :: k == 0 -> STORE_HOME
        :: else -> skip
        fi;
#endif
#if defined(STEADY) && !defined(HOMES)
        p = 0;
        do
        :: p < N -> assert(MAY_STORE(k, me, p)); p++
        :: else -> break
        od;
#endif
        do
        :: left == 0 -> break
        WITH(0)
        WITH(1)
#if N > 2
        WITH(2)
#endif
        od;
        if
        :: TAKES(call) -> finished[k]++
        :: else -> skip
        fi;
#if defined(HOMES) && !defined(BLIND)
        if
        :: k == 0 ->
            p = 0;
            do
            :: p < N -> CREDITED(1, me, p) >= sent[1]; p++
            :: else -> break
            od;
            STORE_HOME
        :: else -> skip
        fi;
#endif
        step++
    :: else -> break
    od
}

init {
    byte step = 0, out[2], in[2];
    do
    :: step < CALLS ->
        if
#ifdef STEADY
        :: schedule[step] = step % 2
#elif !defined(SPLIT)
        :: out[0] == in[0] && out[0] - in[1] < 2 -> schedule[step] = 0; out[0]++; in[0]++
        :: out[1] == in[1] && out[1] < in[0] -> schedule[step] = 1; out[1]++; in[1]++
#endif
#if defined(HALVES) || defined(SPLIT)
        :: out[0] == in[0] && out[0] - in[1] < 2 -> schedule[step] = 2; out[0]++
        :: out[1] == in[1] && out[1] < in[0] -> schedule[step] = 3; out[1]++
        :: out[0] > in[0] -> schedule[step] = 4; in[0]++
        :: out[1] > in[1] -> schedule[step] = 5; in[1]++
#endif
        fi;
        step++
    :: else -> break
    od;
    atomic {
        run Rank(0);
        run Rank(1);
#if N > 2
        run Rank(2);
#endif
        ready = true
    }
}
