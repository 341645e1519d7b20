/* A product makes results tile by tile, and the sender's CTAs wait for the tiles of a block of columns before they
   read them, in ordered memory: can a CTA read an unfinished or an older row, or wait for ever, over rounds that
   repeat like replays of one graph?

   A round e of the stream: gather (begun := e), send on CTAS CTAs, receive. The product of round e begins behind the
   gather. For each block it stores each tile, then adds 1 to the block's cell. A CTA waits until the cell shows all
   tiles, reads them all, and at its end counts itself; the last one empties the cells.

   Size      CTAS senders, BLOCKS of columns, TILES of each, ROUNDS
   Tokens    IDLE    odd rounds have no row: no tile is made and none is waited for
   Mutants   KEEP    nobody empties the cells
             HASTY   each CTA empties a cell once it has read the block
             EAGER   the product adds to the cell before it stores the tile
             LOOSE   the product begins a round without waiting for the gather
             DETACHED  the next gather does not wait for the product's end */
#ifndef CTAS
#define CTAS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif

#ifdef IDLE
#define HAS(e) ((e) % 2 == 0 -> TILES : 0)
#else
#define HAS(e) TILES
#endif

byte y[BLOCKS * TILES]; /* holds the round that wrote the tile */
byte cell[BLOCKS];
byte labels;            /* what gather wrote, and the product reads */
byte begun, ended, sent, arrived;

active proctype stream() {
    byte e = 1;
    do
    :: e > ROUNDS -> break
    :: else ->
        labels = e;
        begun = e;
        sent == e; /* the send, and the receive behind it */
#ifndef DETACHED
        ended == e;
#endif
        e++
    od
}

active proctype product() {
    byte e = 1, b, t;
    do
    :: e > ROUNDS -> break
    :: else ->
#ifndef LOOSE
        begun >= e;
#endif
        b = 0;
        do
        :: b == BLOCKS -> break
        :: else ->
            t = 0;
            do
            :: t == HAS(e) -> break
            :: else ->
#ifdef EAGER
                cell[b]++;
                y[b * TILES + t] = e;
#else
                y[b * TILES + t] = e;
                cell[b]++;
#endif
                t++
            od;
            b++
        od;
#ifndef LOOSE
        assert(labels == e);
#endif
        ended = e;
        e++
    od
}

active [CTAS] proctype cta() {
    byte e = 1, b, t;
    do
    :: e > ROUNDS -> break
    :: else ->
        begun >= e;
        b = 0;
        do
        :: b == BLOCKS -> break
        :: else ->
            cell[b] >= HAS(e);
            t = 0;
            do
            :: t == HAS(e) -> break
            :: else ->
                assert(y[b * TILES + t] == e);
                t++
            od;
#ifdef HASTY
            cell[b] = 0;
#endif
            b++
        od;
        atomic {
            arrived++;
            if
            :: arrived == CTAS ->
                arrived = 0;
#ifndef KEEP
                b = 0;
                do
                :: b == BLOCKS -> break
                :: else -> cell[b] = 0; b++
                od;
#endif
                sent = e
            :: else -> skip
            fi
        }
        sent >= e; /* a kernel ends as a whole */
        e++
    od
}
