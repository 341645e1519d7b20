// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that pack rows by source, and that return packed rows to the ranks that
// own their tokens. They use the tensors of a handle, so the routing is not sent again.
#pragma once
#include <weft/alltoall/phases.cuh>

namespace weft {

// Origin of packed rows. Mirrored by `PackedRows` in compat/packed_rows.py.
struct PackedRows {
    const i32* tokens;  // [limit], each row's token at its source
    const i32* prefix;  // [ranks, ranks]: rows that ranks up to i have for rank j
    u32 limit;          // number of rows
    u32 reserved;
};

// Mirrored by `FetchArgs` in compat/packed_rows.py.
struct FetchArgs {
    Site site;
    PackedRows packed;
    u8* rows;    // [limit, row_bytes]
    u8* scales;  // [limit, scale_bytes], or null
    u32 row_bytes, scale_bytes;
};

// Mirrored by `ReturnArgs` in compat/packed_rows.py.
struct ReturnArgs {
    Site site;
    PackedRows packed;
    const void* rows;   // [limit, hidden], in the order of source, then token
    const u8* in_rank;  // [num_tokens, ranks]: whether the token has a row on that rank
    u32* arrived;       // CTAs that have sent their rows; 0 between calls
    u32 num_tokens;
    u32 reserved;
};

// The packed rows of one source. The prefix matrix's values are clamped to the number of rows.
struct SourceRows {
    u32 first, count;

    template <Shape S> WEFT_FN static SourceRows of(const PackedRows& a, u32 rank, u32 source) {
        const i32* column = a.prefix + rank;
        const u32 begin = source == 0 ? 0 : u32(column[(source - 1) * S.ranks]);
        const u32 end = u32(column[source * S.ranks]);
        const u32 first = begin < a.limit ? begin : a.limit;
        const u32 last = end < a.limit ? end : a.limit;
        return {first, last > first ? last - first : 0};
    }
};

// Stores for combine's receiver which ranks have rows of a token of this rank: entry r is rank r,
// with weight 1.
template <Shape S> WEFT_FN void save_ranks(const ReturnArgs& a, u32 token) {
    Share<S>& own = own_share<S>(a.site);
    RankSet destinations{};
    for (u32 rank = 0; rank < S.ranks; ++rank) {
        const bool has_row = a.in_rank[u64(token) * S.ranks + rank] != 0;
        own.saved_routing.rank[token][rank] = has_row ? rank : max_ranks;
        own.saved_routing.weight[token][rank] = 1.0f;
        add_if(destinations, has_row, rank);
    }
    own.destinations[token] = destinations;
}

}  // namespace weft
