/* Survivors agree on who is gone (weft/group/agreement.py): N ranks, a page for each that it alone writes.
 *
 * Up to DEATHS ranks are killed, at any step. Every rank takes part in a first agreement, as late as it likes, and in
 * another one whenever a rank has died that the last one did not name. A rank that is slow is one that was stopped:
 * SUSPECT may be killed by any rank that misses its word, and may wake and publish before it dies. A killed rank makes
 * no further step.
 *
 * In a round a rank publishes the dead that it knows in one word with the round, and reads the word of every other
 * rank outside that set. If one has ended, it looks at its page once more. Assertions: a round is decided by all
 * who finish it, with one set, or by none (`decided`); nobody who lives is left out (`ended`); no word is overwritten
 * before all have read it (`word`). A rank that waits for ever is an invalid end state.
 *
 * With SWAP each rank enters an agreement with new pages or without: new processes have met all survivors, some or
 * none, for one may die in the middle. A bit of the word carries it; one that is not set takes it from all. Where it
 * is decided all go on with the new pages, else all with the old ones; only one that has them decides so (`has`).
 *
 *   SLOTS      words of a page; a round has the one of its number, modulo.
 *   ONCE       wrong: the page is not read again after the end was seen.
 *   EXPEL      wrong: SUSPECT is not killed, but counted among the dead.
 *   HASTY      wrong: a rank decides on its own set, if nobody died unpublished.
 *   SWAP       with new pages or without.
 *   ALONE      wrong: who has new pages goes on with them, without an agreement.
 */
#ifndef N
#define N 3
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef SUSPECT
#define SUSPECT N
#endif

#define ROUNDS 8
#define ME (1 << me)
#define IN(set, rank) (((set) >> (rank)) & 1)
#define ROUND(value) ((value) >> (N + 1))
#define SET(value) ((value) & ((1 << (N + 1)) - 1)) /* and the bit */
#define BIT (1 << N)
#define KEPT(bit) ((bit) << N)
#ifdef ALONE
#define PAGE(rank) word[((has) * N + (rank)) * SLOTS + number % SLOTS]
short word[2 * N * SLOTS]; /* of both kinds of pages */
#else
#define PAGE(rank) word[(rank) * SLOTS + number % SLOTS]
short word[N * SLOTS]; /* round, bit and set; 0 at first */
#endif
#define OPEN 255
#define NONE 254

bool alive[N] = true;
byte ended = 0;          /* the set of those that are not alive */
byte killed = 0;         /* how many death() has taken */
byte decided[ROUNDS];    /* the set of a round, once a rank has decided, or that it has none */

inline end_of(rank) {
    alive[rank] = false;
    ended = ended | (1 << (rank))
}

/* Takes what a peer has published in this round. */
inline take() {
    assert(ROUND(PAGE(peer)) == number);
    found = found | (SET(PAGE(peer)) & ~BIT);
    all = all && (SET(PAGE(peer)) & BIT) != 0;
    equal = equal && SET(PAGE(peer)) == (dead | KEPT(keep))
}

proctype rank(byte me) {
    byte number = 0; /* the round */
    byte dead = 0;   /* the set that this rank publishes */
    byte found = 0;  /* what it learns in the round */
    byte gone = 0;   /* who ended unpublished */
    byte peer = 0;
    bool equal = true;
    bool has = false;  /* new pages */
    bool keep = false; /* what this rank publishes of them */
    bool all = false;  /* what it learns in the round */

enter:
#ifdef SWAP
    if
    :: has = true
    :: has = false
    fi;
    keep = has;
#endif
begin:
    if
    :: atomic { alive[me] ->
           dead = dead | ended;
           number++;
           assert(number < ROUNDS);
           PAGE(me) = number << (N + 1) | KEPT(keep) | dead;
           found = 0; gone = 0; equal = true; all = keep; peer = 0
       }
    :: !alive[me] -> goto stopped
    fi;

    do
    :: d_step { peer == N -> skip }; break
    :: atomic { peer < N && (peer == me || IN(dead, peer)) -> peer++ }
    :: atomic { alive[me] && peer < N && peer != me && !IN(dead, peer) && ROUND(PAGE(peer)) >= number ->
           take();
           peer++
       }
#ifdef ONCE
    :: atomic { alive[me] && peer < N && peer != me && !IN(dead, peer) && ROUND(PAGE(peer)) < number -> skip };
       if
       :: atomic { alive[me] && !alive[peer] -> gone = gone | 1 << peer; peer++ }
       :: !alive[me] || alive[peer] -> skip
       fi
#else
    :: atomic { alive[me] && peer < N && peer != me && !IN(dead, peer) && !alive[peer] -> skip };
       if
       :: atomic { alive[me] ->
              if
              :: ROUND(PAGE(peer)) >= number -> take()
              :: else -> gone = gone | 1 << peer
              fi;
              peer++
          }
       :: !alive[me] -> skip
       fi
#endif
    :: atomic { alive[me] && peer < N && peer == SUSPECT && peer != me && !IN(dead, peer) && ROUND(PAGE(peer)) < number -> skip };
#ifdef EXPEL
       atomic { gone = gone | 1 << peer; peer++ }
#else
       if
       :: atomic { alive[me] -> end_of(peer) }
       :: !alive[me] -> skip
       fi
#endif
    :: !alive[me] -> goto stopped
    od;

    if
    :: atomic { alive[me] ->
           if
#ifdef HASTY
           :: gone == 0 ->
#else
           :: gone == 0 && equal ->
#endif
              assert(decided[number] == OPEN || decided[number] == (dead | KEPT(keep)));
              decided[number] = dead | KEPT(keep);
              assert(!keep || has);
              assert((dead & ~ended) == 0);
              assert(!IN(dead, me))
           :: else ->
              assert(decided[number] == OPEN || decided[number] == NONE);
              decided[number] = NONE;
              dead = dead | found | gone;
              keep = all;
              assert((dead & ~ended) == 0);
              goto begin
           fi
       }
    :: !alive[me] -> goto stopped
    fi;

end_idle: /* with nothing to do until another one dies */
    if
    :: atomic { alive[me] && (ended & ~dead) != 0 -> goto enter }
    :: !alive[me] -> skip
    fi;
stopped:
    skip
}

proctype death() {
    byte victim;
end_death:
    do
    :: killed < DEATHS ->
       select(victim : 0 .. N - 1);
       atomic {
           if
           :: alive[victim] -> end_of(victim); killed++
           :: else -> skip
           fi
       }
    :: break
    od
}

init {
    byte i;
    atomic {
        for (i : 0 .. ROUNDS - 1) { decided[i] = OPEN }
        for (i : 0 .. N - 1) { run rank(i) }
        run death()
    }
}
