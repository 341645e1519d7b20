/* The rank-major all-to-all on single buffers, sequentially consistent: can a round read another round's rows, and
   can the ranks wait for each other for ever? (What the hardware may reorder is the subject of ../ptx.)

   A round of rank r, epoch e:
     dispatch  epoch := e; store rows into every peer's inbox; store flag e into every peer's dispatched[r];
               wait until dispatched[q] >= e for every q
     experts   read the own inbox, write the own outbox
     combine   store flag e into every peer's ready[r]; wait until ready[q] >= e for every q;
               read rows from every peer's outbox
   A flag is generation * 16 + epoch mod WRAP; a row holds the round that wrote it. Each phase has two halves: what
   stands before its wait, and the rest. As two calls they are the same steps, with something else in between.

   Size      N ranks, ROUNDS rounds, WRAP distinct epochs (at most 16)
   Ways      PUSH      combine stores rows into its peers' inboxes before its flags, in place of being read
             SETS=2    two all-to-alls, each with its own buffers: two micro-batches, overlapped two deep
   Between   WORK      what touches none of this, between both phases' halves
             READS     read what was received between combine's halves
             WRITES    write the own outbox between combine's halves
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
             BLIND     rank 0 waits for no dispatch (and does not look at what its experts read)
             DENSE     combine pushes the rows of all slots, also of those without a token
             OVERTAKE  dispatch of the next round is sent before this round's combine is received
             CROSS     two all-to-alls, and rank 0 does not call them in the order of the others
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
#ifndef SETS
#define SETS 1
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
#if defined(NEEDED)
#define WAITS_FOR(q, e) SENDS(q, _pid, e)
#elif defined(BLIND)
#define WAITS_FOR(q, e) (_pid != 0)
#else
#define WAITS_FOR(q, e) true
#endif

#ifdef BLIND
#define LOOKS_AWAY (_pid == 0)
#else
#define LOOKS_AWAY false
#endif
#ifdef DENSE
#define PUSHES(p, e) true
#else
#define PUSHES(p, e) SENDS(p, _pid, e)
#endif

#if defined(EARLY)
#define MAY_LEAVE(q) true
#elif defined(DEADLINE)
#define MAY_LEAVE(q) (gone[q] || abort_word[_pid])
#else
#define MAY_LEAVE(q) (abort_word[_pid])
#endif

byte flag[SETS * 2 * N * N] = FIRST_FLAG;
#define AT(b, kind, receiver, source) flag[(((b) * 2 + (kind)) * N + (receiver)) * N + (source)]
#define ROW(b, receiver, source) (((b) * N + (receiver)) * N + (source))
byte inbox[SETS * N * N];
byte outbox[SETS * N * N]; /* receiver: the experts' rank; source: the token's */
#ifdef PUSH
byte returned[SETS * N * N]; /* receiver: the token's rank; source: the experts' */
#endif
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

inline publish(b, kind, e) {
    p = 0;
    do
    :: p < N -> may_crash(); AT(b, kind, p, _pid) = FLAG(e); p++
    :: else -> p = 0; break
    od
}

inline await(b, kind, e, wanted) {
    do
    :: p < N ->
        if
        :: ARRIVED(AT(b, kind, _pid, p), e) || !(wanted) -> p++
        :: MAY_LEAVE(p) -> gone[_pid] = true; goto left
        fi
    :: else -> p = 0; break
    od
}

inline dispatch_send(b, e) {
    do
    :: p < N ->
        may_crash();
        if
        :: SENDS(_pid, p, e) -> inbox[ROW(b, p, _pid)] = e
        :: else -> skip
        fi;
        p++
    :: else -> p = 0; break
    od;
    publish(b, DISPATCHED, DISPATCH_EPOCH(e))
}

inline dispatch_receive(b, e) { await(b, DISPATCHED, DISPATCH_EPOCH(e), WAITS_FOR(p, e)) }

inline read_received(b, e) {
    do
    :: p < N -> assert(LOOKS_AWAY || !SENDS(p, _pid, e) || inbox[ROW(b, _pid, p)] == e); p++
    :: else -> p = 0; break
    od
}

/* Experts write every row of the outbox, as a grouped GEMM over whole tiles does. */
inline write_output(b, e) {
    do
    :: p < N -> outbox[ROW(b, _pid, p)] = e; p++
    :: else -> p = 0; break
    od
}

inline combine_send(b, e) {
#ifdef PUSH
    do
    :: p < N ->
        may_crash();
        if
        :: PUSHES(p, e) -> returned[ROW(b, p, _pid)] = outbox[ROW(b, _pid, p)]
        :: else -> skip
        fi;
        p++
    :: else -> p = 0; break
    od;
#endif
    publish(b, READY, COMBINE_EPOCH(e))
}

inline combine_receive(b, e) {
#ifndef NOREADY
    await(b, READY, COMBINE_EPOCH(e), true);
#endif
    do
#ifdef PUSH
    :: p < N -> assert(!SENDS(_pid, p, e) || returned[ROW(b, _pid, p)] == e); p++
#else
    :: p < N -> assert(!SENDS(_pid, p, e) || outbox[ROW(b, p, _pid)] == e); p++
#endif
    :: else -> p = 0; break
    od
}

inline experts(b, e) {
    read_received(b, e);
    write_output(b, e)
}

/* One round of one all-to-all. */
inline round(b, e) {
    dispatch_send(b, e);
#ifdef WORK
    skip;
#endif
    dispatch_receive(b, e);
    experts(b, e);
    combine_send(b, e);
#ifdef WORK
    skip;
#endif
#ifdef READS
    read_received(b, e);
#endif
#ifdef WRITES
    write_output(b, e + 1);
#endif
    combine_receive(b, e)
}

active [N] proctype rank() {
    byte e, p;
#if defined(OVERTAKE)
    dispatch_send(0, 1);
    do
    :: e < ROUNDS ->
        e++;
        dispatch_receive(0, e);
        experts(0, e);
        combine_send(0, e);
        if
        :: e < ROUNDS -> dispatch_send(0, e + 1)
        :: else -> skip
        fi;
        combine_receive(0, e)
    :: else -> break
    od;
#elif defined(CROSS)
    do
    :: e < ROUNDS ->
        e++;
        if
        :: _pid == 0 -> round(0, e); round(1, e)
        :: else -> round(1, e); round(0, e)
        fi
    :: else -> break
    od;
#elif SETS == 2
    /* Each half of one micro-batch runs while the other one is on its way. */
    dispatch_send(0, 1);
    do
    :: e < ROUNDS ->
        e++;
        dispatch_send(1, e);
        dispatch_receive(0, e);
        experts(0, e);
        combine_send(0, e);
        dispatch_receive(1, e);
        experts(1, e);
        combine_send(1, e);
        combine_receive(0, e);
        if
        :: e < ROUNDS -> dispatch_send(0, e + 1)
        :: else -> skip
        fi;
        combine_receive(1, e)
    :: else -> break
    od;
#else
    do
    :: e < ROUNDS ->
        e++;
#ifdef SKIP
        if
        :: _pid == 0 -> goto next
        :: else -> skip
        fi;
#endif
        round(0, e);
#ifdef SKIP
next:   skip
#endif
    :: else -> break
    od;
#endif
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
    :: r < N -> AT(0, DISPATCHED, r, 0) = OLD_FLAG; AT(0, READY, r, 0) = OLD_FLAG; r++
    :: else -> break
    od
}
#endif
