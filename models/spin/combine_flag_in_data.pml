/* Combine with flag-in-data, sequentially consistent: rows that bring their own news, in single places. Can a rank sum a
   row of another round, can an inbox be overwritten while it is read, can the ranks wait for each other for ever?

   A round of rank r, epoch e. Its combine is three processes at once, as CTAs of one kernel are:
     rank     dispatch: store into every inbox (routes at least); flag dispatched; wait for dispatched of all;
              the experts read the inbox. Then the combine's coordinator: wait for the pusher's count; flag ready; wait
              for ready of all, and for the end of the others
     pusher   read the inbox; count itself; store a row into the place (p, r) of each p that sent a token here
     taker    for each p that it sent a token to: wait until the place (r, p) is not blank, read it, leave it blank
   A word holds the round that wrote it; 0 is blank.

   Size      N ranks, ROUNDS rounds
             COARSE  what one process stores, or reads, in a row is one step
   Tokens    SPARSE  each rank has tokens for some peers only, others in every round
             IDLE    rank 0 never has a token
   Disturb   CRASH   rank 0's pusher may stop at any store
             DEADLINE  who waits may leave then
   Mutants   KEEP    a row that was taken stays in its place
             EAGER   a pusher counts itself before it has read the inbox
             DEAF    nobody waits for ready
             DENSE   rows go home that nobody is owed
             BLIND   dispatch does not wait */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif

#if defined(SPARSE)
#define SENDS(src, dst, e) (((src) + (dst) + (e)) % 2 == 0)
#elif defined(IDLE)
#define SENDS(src, dst, e) ((src) != 0)
#else
#define SENDS(src, dst, e) true
#endif
#ifdef DENSE
#define PUSHES(src, dst, e) true
#else
#define PUSHES(src, dst, e) SENDS(src, dst, e)
#endif
#ifdef COARSE
#define STEPS atomic
#else
#define STEPS
#endif
#ifdef DEADLINE
#define MAY_LEAVE broken
#else
#define MAY_LEAVE false
#endif

#define AT(receiver, source) (receiver) * N + (source)
byte inbox[N * N], flag[2 * N * N];
#define DISPATCHED 0
#define READY 1
byte returned[N * N]; /* receiver: the token's rank; source: the experts' */
byte begun[N], counted[N], ended[N];
bool broken; /* somebody stopped */

inline publish(kind, e) {
    p = 0;
    STEPS {
        do
        :: p < N -> flag[kind * N * N + AT(p, r)] = e; p++
        :: else -> p = 0; break
        od
    }
}

inline await(kind, e) {
    p = 0;
    do
    :: p < N ->
        if
        :: flag[kind * N * N + AT(r, p)] >= e -> p++
        :: MAY_LEAVE -> goto left
        fi
    :: else -> p = 0; break
    od
}

inline read_inbox(e) {
    p = 0;
    STEPS {
        do
        :: p < N -> assert(inbox[AT(r, p)] == e); p++
        :: else -> p = 0; break
        od
    }
}

proctype pusher(byte r) {
    byte e, p;
    do
    :: e < ROUNDS ->
        e++;
        if
        :: begun[r] >= e -> skip
        :: MAY_LEAVE -> goto left
        fi;
#ifdef EAGER
        counted[r] = e;
        read_inbox(e);
#else
        read_inbox(e);
        counted[r] = e;
#endif
        STEPS {
            do
            :: p < N ->
#ifdef CRASH
                if
                :: r == 0 -> broken = true; goto left
                :: true -> skip
                fi;
#endif
                if
                :: PUSHES(p, r, e) -> returned[AT(p, r)] = e
                :: else -> skip
                fi;
                p++
            :: else -> p = 0; break
            od
        };
        atomic { ended[r] = ended[r] + 1 }
    :: else -> break
    od;
left:
    skip
}

proctype taker(byte r) {
    byte e, p;
    do
    :: e < ROUNDS ->
        e++;
        if
        :: begun[r] >= e -> skip
        :: MAY_LEAVE -> goto left
        fi;
        do
        :: p < N && !SENDS(r, p, e) -> p++
        :: p < N && SENDS(r, p, e) ->
            if
            :: returned[AT(r, p)] != 0 -> skip
            :: MAY_LEAVE -> goto left
            fi;
            assert(returned[AT(r, p)] == e);
#ifndef KEEP
            returned[AT(r, p)] = 0;
#endif
            p++
        :: p == N -> p = 0; break
        od;
        atomic { ended[r] = ended[r] + 1 }
    :: else -> break
    od;
left:
    skip
}

proctype rank(byte r) {
    byte e, p;
    do
    :: e < ROUNDS ->
        e++;
        STEPS {
            do
            :: p < N -> inbox[AT(p, r)] = e; p++
            :: else -> p = 0; break
            od
        };
        publish(DISPATCHED, e);
#ifndef BLIND
        await(DISPATCHED, e);
        read_inbox(e);
#endif
        begun[r] = e;
        if
        :: counted[r] >= e -> skip
        :: MAY_LEAVE -> goto left
        fi;
        publish(READY, e);
#ifndef DEAF
        await(READY, e);
#endif
        if
        :: ended[r] == 2 -> ended[r] = 0
        :: MAY_LEAVE -> goto left
        fi
    :: else -> break
    od;
left:
    skip
}

init {
    byte r;
    atomic {
        do
        :: r < N -> run rank(r); run pusher(r); run taker(r); r++
        :: else -> break
        od
    }
}
