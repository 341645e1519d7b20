// Sending results while another kernel of this GPU still makes them. The product releases one unit
// into the cell of a block of columns for each tile that it has stored; a sender waits until all
// tiles of a block are there, then sends these columns of all rows. It empties the cells itself,
// when no CTA will look at them again, so a replayed graph begins as the first round did.
#pragma once
#include <weft/protocol/group.cuh>

namespace weft {

constexpr u32 signalled_columns = 512;  // that are waited for at a time, in whole blocks

template <Shape S> WEFT_FN u32 blocks_of(const GroupArgs& a) {
    return (S.hidden + a.block_columns - 1) / a.block_columns;
}

// Tiles of one block of columns: each group has its own.
template <Grouping G> WEFT_FN u32 tiles_of_block(const GroupArgs& a) {
    u32 tiles = 0;
    for (u32 g = 0; g < G.groups; ++g)
        tiles += (u32(a.counts[g]) + a.block_rows - 1) / a.block_rows;
    return tiles;
}

// Ends a wait for tiles at the deadline, when a host asks to leave, or when a peer has gone: with a
// record; false while it goes on.
WEFT_FN bool gives_up_on_tiles(Header& header, const Site& site, u32 block, u32 tiles, u32 seen,
                               u64 epoch, u64 start_ns) {
    const Wait wait{site.rank, Phase::combine, epoch, seen};
    const Verdict v = check_wait(header, site, wait, start_ns);
    const bool late = v.code == Code::peer_timeout && v.told_by == 0;
    if (v.code == Code::ok) return false;
    fail(header, site,
         {.code = u32(late ? Code::signal_timeout : v.code),
          .peer = v.culprit,
          .phase = u32(Phase::combine),
          .wanted = late ? tiles : epoch,
          .seen = seen,
          .elapsed_ns = now_ns() - start_ns,
          .token = block,
          .told_by = v.told_by});
    return true;
}

// Waits until a cell shows `tiles`; false when it never will. Order: after `true`, this thread may
// read what every releasing thread had stored or met in a barrier; its team may once it has met in
// `all`.
WEFT_FN bool await_tiles(const GroupArgs& a, Header& header, u32 block, u32 tiles, u64 epoch) {
    u64 start = 0;
    for (u32 turns = 1;; ++turns) {
        const u32 seen = load_acquire_local(a.cells + block);
        if (seen >= tiles) return true;
        if (turns % polls_per_check == 0) {
            if (start == 0) start = now_ns();
            if (gives_up_on_tiles(header, a.site, block, tiles, seen, epoch, start)) return false;
        }
        relax(turns);
    }
}

// Calls send(first, end) for the columns of each block, or of several narrow ones, once they are
// there. False, for the whole team, when one did not come.
template <Shape S, Grouping G, class Team, class Send>
WEFT_FN bool send_when_signalled(const Team& team, const GroupArgs& a, u64 epoch, Send send) {
    Header& header = mine<S>(a.site).header;
    const u32 blocks = blocks_of<S>(a), tiles = team.lane() == 0 ? tiles_of_block<G>(a) : 0;
    const u32 each = a.block_columns < signalled_columns ? signalled_columns / a.block_columns : 1;
    for (u32 block = 0; block < blocks; block += each) {
        const u32 until = block + each < blocks ? block + each : blocks;
        bool came = true;
        if (team.lane() == 0)
            for (u32 b = block; b < until && came; ++b)
                came = await_tiles(a, header, b, tiles, epoch);
        if (!team.all(came)) return false;
        fault(header, Point::before_tiles, a.site.rank, epoch);
        const u32 end = until * a.block_columns;
        send(block * a.block_columns, end < S.hidden ? end : S.hidden);
    }
    return true;
}

// By the last team, when all have seen every cell. The next product comes behind this kernel.
template <Shape S, class Team> WEFT_FN void empty_cells(const Team& team, const GroupArgs& a) {
    if (a.cells == nullptr) return;
    for (u32 block = team.lane(); block < blocks_of<S>(a); block += team.lanes())
        store_relaxed(a.cells + block, 0);
}

}  // namespace weft
