/* The fused all-reduce, sequentially consistent: slots that are their own flag, one shot and two shots in any order.
   Can a call read another call's row, write over a row that nobody has read, or wait for ever?

   A slot is empty (0) or holds the call that wrote it. A reader empties its slots at the END of its call: the store
   may come to memory as late as that, whatever stands before it in the program.

   One shot, call e of rank r:
     store e into direct[side][q][r] of every peer q; wait until direct[side][r][q] is there for every q
   Two shots of T tokens, token t summed by rank t:
     store e into part[side][t][r] of every owner t; owners wait until part[side][r][q] is there for every q, then
     store e into whole[q][r] of every peer q; all wait until whole[r][t] is there for every other owner t
   Every call is drawn once, for all ranks. side is the parity of e: direct and part have two buffers, whole has one.

   Size      N ranks, CALLS calls
   Mutants   ONE_SIDE  direct and part have one buffer
             ONE_PART  part has one buffer, direct two
             FENCED    the owner's slots are emptied in memory before it stores the sum (right, also with ONE_PART)
             KEEP      slots are not emptied
             BLIND     owners do not wait for the rank behind them
             ABSENT    rank 0 leaves out one call */
#ifndef N
#define N 3
#endif
#ifndef CALLS
#define CALLS 4
#endif
#define ONE_SHOT (N + 1)

#ifdef ONE_SIDE
#define SIDE 0
#else
#define SIDE (e % 2)
#endif
#ifdef ONE_PART
#define PART_SIDE 0
#else
#define PART_SIDE SIDE
#endif
#ifdef BLIND
#define WAITS_FOR(q) ((q) != (_pid + 1) % N)
#else
#define WAITS_FOR(q) true
#endif

byte direct[2 * N * N];
byte part[2 * N * N];
byte whole[N * N];
#define AT(side, receiver, source) ((side) * N * N + (receiver) * N + (source))
byte kind[CALLS + 1]; /* 1 .. N: two shots of so many tokens; ONE_SHOT; 0: not drawn yet */

inline draw() {
    if
    :: kind[e] != 0 -> skip
    :: else ->
        if
        :: kind[e] = ONE_SHOT
        :: kind[e] = 1
        :: kind[e] = N - 1
        :: kind[e] = N
        fi
    fi
}

/* Writing over a row that nobody has read would lose it. */
#define PUT(slot) d_step { assert(slot == 0); slot = e }
#define GET(slot) atomic { slot != 0; assert(slot == e) }
#ifdef KEEP
#define CLEAR(slot) skip
#else
#define CLEAR(slot) slot = 0
#endif

inline one_shot() {
    q = 0;
    do
    :: q < N && q != _pid -> PUT(direct[AT(SIDE, q, _pid)]); q++
    :: q == _pid -> q++
    :: q == N -> break
    od;
    q = 0;
    do
    :: q < N && q != _pid -> GET(direct[AT(SIDE, _pid, q)]); q++
    :: q == _pid -> q++
    :: q == N -> break
    od;
    q = 0;
    do
    :: q < N && q != _pid -> CLEAR(direct[AT(SIDE, _pid, q)]); q++
    :: q == _pid -> q++
    :: q == N -> break
    od
}

inline clear_parts() {
    q = 0;
    do
    :: q < N && q != _pid -> CLEAR(part[AT(PART_SIDE, _pid, q)]); q++
    :: q == _pid -> q++
    :: q == N -> break
    od
}

inline sum_token() {
    q = 0;
    do
    :: q < N && q != _pid && WAITS_FOR(q) -> GET(part[AT(PART_SIDE, _pid, q)]); q++
    :: q < N && (q == _pid || !WAITS_FOR(q)) -> q++
    :: q == N -> break
    od;
#ifdef FENCED
    clear_parts();
#endif
    q = 0;
    do
    :: q < N && q != _pid -> PUT(whole[AT(0, q, _pid)]); q++
    :: q == _pid -> q++
    :: q == N -> break
    od
}

inline two_shots() {
    q = 0;
    do
    :: q < kind[e] && q != _pid -> PUT(part[AT(PART_SIDE, q, _pid)]); q++
    :: q < kind[e] && q == _pid -> q++
    :: q == kind[e] -> break
    od;
    if
    :: _pid < kind[e] -> sum_token()
    :: else -> skip
    fi;
    q = 0;
    do
    :: q < kind[e] && q != _pid -> GET(whole[AT(0, _pid, q)]); q++
    :: q < kind[e] && q == _pid -> q++
    :: q == kind[e] -> break
    od;
    q = 0;
    do
    :: q < kind[e] && q != _pid -> CLEAR(whole[AT(0, _pid, q)]); q++
    :: q < kind[e] && q == _pid -> q++
    :: q == kind[e] -> break
    od;
#ifndef FENCED
    if
    :: _pid < kind[e] -> clear_parts()
    :: else -> skip
    fi
#endif
}

active [N] proctype rank() {
    byte e = 1, q;
    do
    :: e > CALLS -> break
    :: e <= CALLS ->
        atomic { draw(); q = 0 };
#ifdef ABSENT
        if
        :: _pid == 0 && e == 2 -> goto next
        :: else -> skip
        fi;
#endif
        if
        :: kind[e] == ONE_SHOT -> one_shot()
        :: else -> two_shots()
        fi;
#ifdef ABSENT
next:
#endif
        e++
    od
}
