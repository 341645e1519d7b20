/* The rank-major all-to-all on single buffers, sequentially consistent: can a round read another round's rows, and
   can the ranks wait for each other for ever? (What the hardware may reorder is the subject of ../ptx.)

   A round of rank r, epoch e:
     dispatch  epoch := e; store rows into every peer's inbox; store flag e into every peer's dispatched[r];
               wait until dispatched[q] >= e for every q
     experts   read the own inbox, write the own outbox
     combine   store flag e into every peer's ready[r]; wait until ready[q] >= e for every q;
               read rows from every peer's outbox
   A flag is generation * 16 + epoch mod WRAP; a row holds the round that wrote it.

   Size      N ranks, ROUNDS rounds, WRAP distinct epochs (at most 16)
   Tokens    SPARSE  each rank sends to some peers only, others in every round
             IDLE    rank 0 never has a token
   Disturb   CRASH   rank 0 may stop at any store
             OLD     the flags start as an older generation left them
             LATE    a flag of an older generation may arrive at any time, for rank 0
             ABORT   a host sets the abort words of ranks 0 .. ABORT-1, at any time, one after the other
   Leave     DEADLINE  a waiter may leave once the peer is gone
             EARLY     a waiter may leave at any time: a deadline that is too short
   Mutants   ONE       both phases share one flag array and count phases (right with >=, wrong with EQUAL)
             EQUAL     poll with == in place of >=
             PLAIN     compare epochs as plain numbers
             NOREADY   combine does not wait for the experts of its peers
             NEEDED    dispatch waits only for the ranks that send it tokens
             SKIP      a rank without tokens takes no part in the round
             NOGEN     the wait does not compare generations */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef WRAP
#define WRAP 16
#endif
#ifndef ABORT
#define ABORT 0
#endif

#define GENERATION 2
#define FLAG(e) (GENERATION * 16 + (e) % WRAP)
#define OLD_FLAG (1 * 16 + 3)
#ifdef OLD
#define FIRST_FLAG OLD_FLAG
#else
#define FIRST_FLAG 0 /* generation 0 is never given out */
#endif

#ifdef NOGEN
#define SAME_GENERATION(f) true
#else
#define SAME_GENERATION(f) ((f) / 16 == GENERATION)
#endif
#if defined(EQUAL)
#define REACHED(f, e) ((f) % 16 == (e) % WRAP)
#elif defined(PLAIN)
#define REACHED(f, e) ((f) % 16 >= (e) % WRAP)
#else /* serial: f - e lies in the lower half of the ring */
#define REACHED(f, e) (((f) % 16 + WRAP - (e) % WRAP) % WRAP < WRAP / 2)
#endif
#define ARRIVED(f, e) (SAME_GENERATION(f) && REACHED(f, e))

#if defined(SPARSE)
#define SENDS(src, dst, e) (((src) + (dst) + (e)) % 2 == 0)
#elif defined(IDLE)
#define SENDS(src, dst, e) ((src) != 0)
#else
#define SENDS(src, dst, e) true
#endif
#ifdef NEEDED
#define WAITS_FOR(q, e) SENDS(q, _pid, e)
#else
#define WAITS_FOR(q, e) true
#endif

#if defined(EARLY)
#define MAY_LEAVE(q) true
#elif defined(DEADLINE)
#define MAY_LEAVE(q) (gone[q] || abort_word[_pid])
#else
#define MAY_LEAVE(q) (abort_word[_pid])
#endif

byte flag[2 * N * N] = FIRST_FLAG;
#define AT(kind, receiver, source) flag[((kind) * N + (receiver)) * N + (source)]
byte inbox[N * N];  /* [receiver * N + source] */
byte outbox[N * N]; /* [expert's rank * N + source] */
bool abort_word[N];
bool gone[N]; /* crashed, or left a wait: publishes nothing more */

#define DISPATCHED 0
#ifdef ONE
#define READY DISPATCHED
#define DISPATCH_EPOCH(e) (2 * (e) - 1)
#define COMBINE_EPOCH(e) (2 * (e))
#else
#define READY 1
#define DISPATCH_EPOCH(e) (e)
#define COMBINE_EPOCH(e) (e)
#endif

inline may_crash() {
#ifdef CRASH
    if
    :: _pid == 0 -> gone[_pid] = true; goto left
    :: true -> skip
    fi
#else
    skip
#endif
}

inline publish(kind, e) {
    p = 0;
    do
    :: p < N -> may_crash(); AT(kind, p, _pid) = FLAG(e); p++
    :: else -> p = 0; break
    od
}

inline await(kind, e, wanted) {
    do
    :: p < N ->
        if
        :: ARRIVED(AT(kind, _pid, p), e) || !(wanted) -> p++
        :: MAY_LEAVE(p) -> gone[_pid] = true; goto left
        fi
    :: else -> p = 0; break
    od
}

active [N] proctype rank() {
    byte e, p;
    do
    :: e < ROUNDS ->
        e++;
#ifdef SKIP
        if
        :: _pid == 0 -> goto next
        :: else -> skip
        fi;
#endif
        do
        :: p < N ->
            may_crash();
            if
            :: SENDS(_pid, p, e) -> inbox[p * N + _pid] = e
            :: else -> skip
            fi;
            p++
        :: else -> p = 0; break
        od;
        publish(DISPATCHED, DISPATCH_EPOCH(e));
        await(DISPATCHED, DISPATCH_EPOCH(e), WAITS_FOR(p, e));

        /* Experts write every row of the outbox, as a grouped GEMM over whole tiles does. */
        do
        :: p < N ->
            assert(!SENDS(p, _pid, e) || inbox[_pid * N + p] == e);
            outbox[_pid * N + p] = e;
            p++
        :: else -> p = 0; break
        od;

        publish(READY, COMBINE_EPOCH(e));
#ifndef NOREADY
        await(READY, COMBINE_EPOCH(e), true);
#endif
        do
        :: p < N -> assert(!SENDS(_pid, p, e) || outbox[p * N + _pid] == e); p++
        :: else -> p = 0; break
        od;
#ifdef SKIP
next:   skip
#endif
    :: else -> break
    od;
left:
    skip
}

#if ABORT
active proctype host() {
    byte r;
    do
    :: r < ABORT -> abort_word[r] = true; r++
    :: else -> break
    od
}
#endif

#ifdef LATE
active proctype late() {
    byte r;
    do
    :: r < N -> AT(DISPATCHED, r, 0) = OLD_FLAG; AT(READY, r, 0) = OLD_FLAG; r++
    :: else -> break
    od
}
#endif
