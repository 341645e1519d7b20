/* A stopped rank (SIGSTOP, a debugger, a GPU time slice) wakes after the others went on in a new generation. The
   generation in its flags makes its old FLAG harmless; its old PAYLOAD store carries no generation.

   Slots belong to the rank that they were made for, for ever: then the late row lands where nobody reads.
     RENUMBER  the survivors give the zombie's slot to another rank
     FENCE     the survivors wait until the zombie is certainly dead before the new generation starts */
#define OLD 1
#define NEW 2
#ifdef RENUMBER
#define SLOT 0
#else
#define SLOT 1
#endif
byte row[2];        /* one rank's inbox: [slot], holds the generation that wrote it */
byte generation[2]; /* that slot's flag */
bool dead;

active proctype zombie() {
    if
    :: atomic { !dead -> row[0] = OLD }
    :: dead -> goto stopped
    fi;
    if
    :: atomic { !dead -> generation[0] = OLD }
    :: dead -> skip
    fi;
stopped:
    skip
}

active proctype sender() {
#ifdef FENCE
    dead = true;
#endif
    row[SLOT] = NEW;
    generation[SLOT] = NEW
}

active proctype reader() {
    generation[SLOT] == NEW;
    assert(row[SLOT] == NEW)
}
