// SPDX-License-Identifier: Apache-2.0
// Packs rows, or returns packed rows, on a CPU, one row at a time.
#pragma once
#include <weft/compat/packed_layout.cuh>

#include <weft/device/cpu.hpp>

#include <cstring>

namespace weft {

// Calls visit(source, row, token) for every packed row.
template <Shape S, class Visit> void for_rows(const PackedRows& a, u32 rank, Visit visit) {
    for (u32 source = 0; source < S.ranks; ++source) {
        const SourceRows source_rows = SourceRows::of<S>(a, rank, source);
        for (u32 row = source_rows.first; row < source_rows.first + source_rows.count; ++row)
            visit(source, row, u32(a.tokens[row]));
    }
}

template <Shape S> void fetch_rows(const FetchArgs& a) {
    if (own_share<S>(a.site).header.state.failed != 0) return;
    for_rows<S>(a.packed, a.site.rank, [&](u32 source, u32 row, u32 token) {
        if (token >= S.ranks * S.tokens) return;
        const u8* from = share<S>(a.site, source).outbox.row[token];
        std::memcpy(a.rows + u64(row) * a.row_bytes, from, a.row_bytes);
        if (a.scales != nullptr)
            std::memcpy(a.scales + u64(row) * a.scale_bytes, from + a.row_bytes, a.scale_bytes);
    });
}

template <Shape S> void return_rows(const ReturnArgs& a) {
    static_assert(S.combine == Combine::gemm_push && S.top_k == S.ranks);
    Header& header = own_share<S>(a.site).header;
    const EpochState state = header.state;
    if (state.failed != 0) return;
    const u64 start = now_ns();
    mark_start(Solo{}, header, Phase::combine, state.epoch, start);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for (u32 token = 0; token < a.num_tokens; ++token) save_ranks<S>(a, token);
    for_rows<S>(a.packed, a.site.rank, [&](u32 source, u32 row, u32 token) {
        if (token >= S.tokens) return;
        const u8* from = static_cast<const u8*>(a.rows) + u64(row) * S.out_bytes();
        u8* to = share<S>(a.site, source).inbox.returned.row[token][a.site.rank];
        std::memcpy(to, from, S.out_bytes());
    });
    publish_combine<S>(Solo{}, a.site, header.living, state.epoch);
}

}  // namespace weft
