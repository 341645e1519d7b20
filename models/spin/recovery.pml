/* A rank dies at any step of an exchange on single buffers (dispatched, rows, ready), and the others go on among
   themselves in the same memory. Each ends its calls, meets the others, writes its share as at creation, meets them
   again, and begins with round 1 anew. A row carries the life and the round that wrote it.

     NOFIRST   no meeting before shares are written: a peer may still store what belongs to the broken round
     NOSECOND  none after: a peer's first store of the new life may be overwritten
     KEEP      the flags of the broken round stay
     UNMASKED  the living wait for the dead rank, too */
#define N 3
#define DEAD 2
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define AT(to, from) ((to) * N + (from))
#define ROW(life, round) (10 * (life) + (round))
#ifdef UNMASKED
#define LIVES(p) true
#else
#define LIVES(p) (life == 0 || (p) != DEAD)
#endif

byte row[N * N], dispatched[N * N], ready[N * N]; /* by owner, then by the rank that writes */
bool dead;
byte met_before, met_after; /* the living that have come to each meeting */

/* A step of the rank that dies. */
#define STEP \
    if \
    :: me == DEAD -> dead = true; goto ended \
    :: skip \
    fi

/* Waits for a flag. In the first life the notice of the death ends the wait. */
#define AWAIT(flag) \
    if \
    :: flag >= round -> skip \
    :: dead && life == 0 -> goto broken \
    fi

proctype rank(byte me) {
    byte life, round, p;
again:
    skip; /* a jump to the loop itself would keep `round` */
    for (round : 1 .. ROUNDS) {
        for (p : 0 .. N - 1) {
            if
            :: LIVES(p) -> STEP; row[AT(p, me)] = ROW(life, round); STEP; dispatched[AT(p, me)] = round
            :: else
            fi
        }
        for (p : 0 .. N - 1) {
            if
            :: LIVES(p) -> STEP; AWAIT(dispatched[AT(me, p)])
            :: else
            fi
        }
        for (p : 0 .. N - 1) {
            if
            :: LIVES(p) -> assert(row[AT(me, p)] == ROW(life, round))
            :: else
            fi
        }
        for (p : 0 .. N - 1) {
            if
            :: LIVES(p) -> STEP; ready[AT(p, me)] = round
            :: else
            fi
        }
        for (p : 0 .. N - 1) {
            if
            :: LIVES(p) -> STEP; AWAIT(ready[AT(me, p)])
            :: else
            fi
        }
    }
    if
    :: life == 1 -> goto ended
    :: me == DEAD -> dead = true; goto ended
    :: life == 0 && me != DEAD -> dead
    fi;
broken:
#ifndef NOFIRST
    met_before++;
    met_before == N - 1;
#endif
    for (p : 0 .. N - 1) {
        row[AT(me, p)] = 0;
#ifndef KEEP
        dispatched[AT(me, p)] = 0;
        ready[AT(me, p)] = 0
#endif
    }
    met_after++;
#ifndef NOSECOND
    met_after == N - 1;
#endif
    life = 1;
    goto again;
ended:
    skip
}

init {
    atomic {
        run rank(0);
        run rank(1);
        run rank(2)
    }
}
