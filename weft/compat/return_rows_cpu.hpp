// Packed rows go to their tokens' owners, on a CPU: one row after the other.
#pragma once
#include <weft/compat/return_layout.cuh>

#include <weft/device/cpu.hpp>

#include <cstring>

namespace weft {

template <Shape S> void return_rows(const ReturnArgs& a) {
    static_assert(S.combine == Combine::gemm_push && S.top_k == S.ranks);
    Header& header = mine<S>(a.site).header;
    const EpochState state = header.state;
    if (state.failed != 0) return;
    mark_start(Solo{}, header, Phase::combine, state.epoch, now_ns());
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for (u32 token = 0; token < a.own_tokens; ++token) save_ranks<S>(a, token);
    for (u32 source = 0; source < S.ranks; ++source) {
        const SourceRows held = SourceRows::of<S>(a, source);
        for (u32 row = held.first; row < held.first + held.count; ++row) {
            const u32 token = u32(a.tokens[row]);
            if (token >= S.tokens) continue;
            const u8* from = static_cast<const u8*>(a.rows) + u64(row) * S.out_bytes();
            u8* to = share<S>(a.site, source).inbox.returned.row[token][a.site.rank];
            std::memcpy(to, from, S.out_bytes());
        }
    }
    publish<S>(Solo{}, a.site, Phase::combine, state.epoch, 0);
}

}  // namespace weft
