/* The grouped GEMM of a cluster of two CTAs: can a stage of the ring be overwritten while it is read, a word of
   the exchange be taken for that of another tile, a CTA end under a neighbour's arrival, or anybody wait for ever?

   Each CTA: a loader, which brings its half of the rows into both CTAs' stages; the scales' warps, as one; WARPS that
   multiply, and that exchange a word with the neighbour at the end of each tile. Loads, words, and arrivals at the
   neighbour are on their way until `engine` lets them happen, at any time. A barrier counts arrivals and what is
   expected; who waits for a phase sees its parity alone.

   Size      TILES, STEPS of each, STAGES, WARPS
             ALONE   the exchange alone, of multipliers that never wait for a stage
             TWO     tall tiles: multipliers hold two stages at a time, while there are two steps
   Mutants   FEW     `empty` takes one arrival too few
             DEAF    `empty` takes the CTA's own warps alone; the neighbour is told nothing
             SINGLE  one half of what is exchanged, instead of two in turn
             LATE    a word is expected after the wait for it
             HASTY   a loader ends without waiting for the last arrivals
             BLIND   `full` does not count the scales */
#ifndef TILES
#define TILES 2
#endif
#ifdef ALONE
#define STEPS 0
#endif
#ifndef STEPS
#define STEPS 1
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 1
#endif

#if defined(FEW)
#define EMPTY (2 * WARPS - 1)
#elif defined(DEAF)
#define EMPTY WARPS
#else
#define EMPTY (2 * WARPS)
#endif
#ifdef BLIND
#define FULL 1
#else
#define FULL 2
#endif
#ifdef SINGLE
#define HALF(tile) 0
#define TURN(tile) ((tile) % 2)
#else
#define HALF(tile) ((tile) % 2)
#define TURN(tile) ((tile) / 2 % 2)
#endif
#define AT(cta, stage) ((cta) * STAGES + (stage))
#define TOLD(cta, tile) ((cta) * 2 + HALF(tile))

/* Of each CTA's stages. Rows and scales hold the number of their step, from 1 on; rows by who loads them. */
byte rows[4 * STAGES], coming[4 * STAGES], scales[2 * STAGES], readers[2 * STAGES], arriving[2 * STAGES];
byte full_left[2 * STAGES] = FULL, empty_left[2 * STAGES] = EMPTY;
short full_wants[2 * STAGES];
bit full_phase[2 * STAGES], empty_phase[2 * STAGES];

/* Of each CTA's halves of the exchange: the tile + 1 whose word is there, or on its way; and the barrier. */
byte word[4 * WARPS], sent[4 * WARPS], met[2];
byte told_left[4] = 1;
short told_wants[4];
bit told_phase[4];
byte running[2] = 2 + WARPS; /* roles that have not ended */
byte flying;                 /* loads, words and arrivals on their way */

inline settle(phase, left, wants, count) {
    if
    :: left == 0 && wants == 0 -> phase = !phase; left = count
    :: else
    fi
}
inline arrive_full(s, more) {
    assert(full_left[s] > 0);
    full_left[s]--;
    full_wants[s] = full_wants[s] + more;
    settle(full_phase[s], full_left[s], full_wants[s], FULL)
}
inline arrive_empty(s) {
    empty_left[s]--;
    settle(empty_phase[s], empty_left[s], 0, EMPTY)
}
inline next_stage() {
    at++;
    if
    :: at == STAGES -> at = 0; parity = !parity
    :: else
    fi
}

inline load_for(cta) {
    assert(readers[AT(cta, at)] == 0 && coming[AT(cta, at) * 2 + me] == 0);
    coming[AT(cta, at) * 2 + me] = step + 1;
    rows[AT(cta, at) * 2 + me] = 0; /* from here on they may be anything */
    flying++
}

active [2] proctype loader() {
    byte me = _pid % 2, step = 0, at = 0;
    bit parity = 0;
    do
    :: step == TILES * STEPS -> break
    :: atomic {
        step < TILES * STEPS && empty_phase[AT(me, at)] == parity ->
        arrive_full(AT(me, at), 2); /* a half of the rows from each loader */
        load_for(0);
        load_for(1);
        step++;
        next_stage()
    }
    od;
#ifndef HASTY
    step = 0;
    do
    :: step == STAGES -> break
    :: atomic { step < STAGES && empty_phase[AT(me, at)] == parity -> step++; next_stage() }
    od;
#endif
    running[me]--
}

active [2] proctype scaler() {
    byte me = _pid % 2, step = 0, at = 0;
    bit parity = 0;
    do
    :: step == TILES * STEPS -> break
    :: atomic {
        step < TILES * STEPS && empty_phase[AT(me, at)] == parity ->
        assert(readers[AT(me, at)] == 0);
        scales[AT(me, at)] = step + 1;
#ifndef BLIND
        arrive_full(AT(me, at), 0);
#endif
        step++;
        next_stage()
    }
    od;
    running[me]--
}

inline take_stage() {
    atomic {
        full_phase[AT(me, at)] != parity ->
        step++;
        readers[AT(me, at)]++;
        assert(rows[AT(me, at) * 2] == step && rows[AT(me, at) * 2 + 1] == step);
        assert(scales[AT(me, at)] == step)
    }
}
inline release_stage(stage) {
    readers[AT(me, stage)]--;
    arrive_empty(AT(me, stage));
#ifndef DEAF
    arriving[AT(1 - me, stage)]++;
    flying++;
#endif
    left--
}

inline expect_word() {
    atomic {
        told_left[TOLD(me, tile)]--;
        told_wants[TOLD(me, tile)] = told_wants[TOLD(me, tile)] + WARPS;
        settle(told_phase[TOLD(me, tile)], told_left[TOLD(me, tile)], told_wants[TOLD(me, tile)], 1)
    }
}

active [2 * WARPS] proctype multiplier() {
    byte me = _pid % 2, step = 0, at = 0, tile = 0, left, first;
    byte warp = _pid / 2 - 2;
    bit parity = 0;
    do
    :: tile == TILES -> break
    :: else ->
        left = STEPS;
        do
        :: left == 0 -> break
#ifdef TWO
        :: left >= 2 ->
            take_stage();
            atomic { first = at; next_stage() }
            take_stage();
            atomic { release_stage(first) }
            atomic { release_stage(at); next_stage() }
        :: left == 1 ->
#else
        :: else ->
#endif
            take_stage();
            atomic { release_stage(at); next_stage() }
        od;
        /* Warps of a CTA meet before the exchange. */
        met[me]++;
        met[me] >= (tile + 1) * WARPS;
        atomic {
            assert(sent[TOLD(1 - me, tile) * WARPS + warp] == 0);
            sent[TOLD(1 - me, tile) * WARPS + warp] = tile + 1;
            flying++
        }
#ifndef LATE
        if
        :: warp == 0 -> expect_word()
        :: else
        fi;
#endif
        told_phase[TOLD(me, tile)] != TURN(tile);
#ifdef LATE
        if
        :: warp == 0 -> expect_word()
        :: else
        fi;
#endif
        assert(word[TOLD(me, tile) * WARPS + warp] == tile + 1);
        tile++
    od;
    running[me]--
}

/* Lets one thing that is on its way happen, whichever. Its CTA must not have ended. */
active proctype engine() {
    byte i = 0;
    end: do
    :: atomic {
        flying > 0 ->
        i = 0;
        do
        :: i < 4 * STAGES || i < 4 * WARPS -> i++
        :: i < 4 * STAGES && coming[i] != 0 ->
            assert(running[i / 2 / STAGES] > 0);
            rows[i] = coming[i];
            coming[i] = 0;
            flying--;
            full_wants[i / 2]--;
            settle(full_phase[i / 2], full_left[i / 2], full_wants[i / 2], FULL);
            break
        :: i < 2 * STAGES && arriving[i] != 0 ->
            assert(running[i / STAGES] > 0);
            arriving[i]--;
            flying--;
            arrive_empty(i);
            break
        :: i < 4 * WARPS && sent[i] != 0 ->
            assert(running[i / 2 / WARPS] > 0);
            word[i] = sent[i];
            sent[i] = 0;
            flying--;
            told_wants[i / WARPS]--;
            settle(told_phase[i / WARPS], told_left[i / WARPS], told_wants[i / WARPS], 1);
            break
        :: i >= 4 * STAGES && i >= 4 * WARPS -> break
        od;
        i = 0
    }
    od
}
