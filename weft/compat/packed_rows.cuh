// SPDX-License-Identifier: Apache-2.0
// Packs rows, or returns packed rows. Each entry is one kernel.
//
// fetch_rows   loads this rank's rows from the sources' outboxes, after the sources' flags are set
// return_rows  stores rows at their tokens' owners, in slot (token, this rank) of an all-to-all
//              with one expert per rank, whose rows this kernel stores (gemm_push); the last CTA
//              publishes the flags
//
// Grid: any number of CTAs. A warp copies 64 vectors of one row, or the row's scales, at a time.
// Rows are ordered by (place among the source's rows, source), and each rank starts with itself, so
// that ranks do not access the same peer at once.
#pragma once
#include <weft/compat/packed_layout.cuh>
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

// Calls visit(source, row, token, piece) for every piece of every packed row, each in one warp.
// Lane s holds the row range of source s.
template <Shape S, class Visit>
WEFT_FN void for_pieces(const Block& team, const PackedRows& a, u32 rank, u32 pieces, Visit visit) {
    const u32 lane = team.warp_lane(), warps = team.lanes() / warp_lanes;
    const SourceRows source_rows =
        lane < S.ranks ? SourceRows::of<S>(a, rank, lane) : SourceRows{.first = 0, .count = 0};
    u32 max_count = 0;
    for (u32 source = 0; source < S.ranks; ++source)
        max_count = max(max_count, __shfl_sync(all_lanes, source_rows.count, source));
    for (u64 unit = u64(blockIdx.x) * warps + team.warp(); unit < u64(max_count) * S.ranks * pieces;
         unit += u64(gridDim.x) * warps) {
        const u32 index = u32(unit / pieces), place = index / S.ranks;
        const u32 source = (rank + index) % S.ranks;
        const u32 row = __shfl_sync(all_lanes, source_rows.first, source) + place;
        if (place >= __shfl_sync(all_lanes, source_rows.count, source)) continue;
        visit(source, row, u32(a.tokens[row]), u32(unit % pieces));
    }
}

constexpr u32 piece_vectors = 2 * warp_lanes;

// Copies a piece of a row with one warp. The row may be in a peer's memory, so both loads are
// issued before the first store.
WEFT_FN void copy_piece(const u8* from, u8* to, u32 piece, u32 vectors, u32 lane) {
    uint4 data[2];
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 v = piece * piece_vectors + i * warp_lanes + lane;
        if (v < vectors) data[i] = load_peer_row(reinterpret_cast<const uint4*>(from) + v);
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const u32 v = piece * piece_vectors + i * warp_lanes + lane;
        if (v < vectors) store(reinterpret_cast<uint4*>(to) + v, data[i]);
    }
}

// Copies words that a peer wrote with one warp. Volatile loads avoid the non-coherent path.
WEFT_FN void fetch_words(const u8* from, u8* to, u32 words, u32 lane) {
    for (u32 i = lane; i < words; i += warp_lanes)
        reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const volatile u32*>(from)[i];
}

template <Shape S> WEFT_FN void fetch_rows(const FetchArgs& a) {
    const Block team;
    griddep_wait();
    launch_dependents();
    if (own_share<S>(a.site).header.state.failed != 0) return;
    const u32 vectors = a.row_bytes / 16, lane = team.warp_lane();
    const u32 row_pieces = (vectors + piece_vectors - 1) / piece_vectors;
    const u32 pieces = row_pieces + (a.scales != nullptr ? 1 : 0);
    for_pieces<S>(team, a.packed, a.site.rank, pieces,
                  [&](u32 source, u32 row, u32 token, u32 piece) {
                      if (token >= S.ranks * S.tokens) return;
                      const u8* from = share<S>(a.site, source).outbox.row[token];
                      if (piece < row_pieces)
                          copy_piece(from, a.rows + u64(row) * a.row_bytes, piece, vectors, lane);
                      else
                          fetch_words(from + a.row_bytes, a.scales + u64(row) * a.scale_bytes,
                                      a.scale_bytes / 4, lane);
                  });
}

template <Shape S> WEFT_FN void return_pieces(const Block& team, const ReturnArgs& a) {
    constexpr u32 vectors = S.out_bytes() / 16;
    for_pieces<S>(team, a.packed, a.site.rank, (vectors + piece_vectors - 1) / piece_vectors,
                  [&](u32 source, u32 row, u32 token, u32 piece) {
                      if (token >= S.tokens) return;
                      copy_piece(static_cast<const u8*>(a.rows) + u64(row) * S.out_bytes(),
                                 share<S>(a.site, source).inbox.returned.row[token][a.site.rank],
                                 piece, vectors, team.warp_lane());
                  });
}

template <Shape S> WEFT_FN void return_rows(const ReturnArgs& a) {
    static_assert(S.combine == Combine::gemm_push && S.top_k == S.ranks);
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    const RankSet living = header.living;  // loaded with the state
    if (state.failed != 0) return;
    const u64 start = start_of_lane<S>(team);
    mark_start(team, header, Phase::combine, state.epoch, start);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for (u32 token = blockIdx.x * team.lanes() + team.lane(); token < a.num_tokens;
         token += gridDim.x * team.lanes())
        save_ranks<S>(a, token);
    return_pieces<S>(team, a);
    if (!team.is_last_cta(a.arrived)) return;
    publish_combine<S>(team, a.site, living, state.epoch);
}

}  // namespace weft
