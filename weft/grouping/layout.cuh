// SPDX-License-Identifier: Apache-2.0
// Grouping packs received rows by expert, in an order that depends only on the ids: source rank,
// then token, then top-k entry. Kernels are templates over a Grouping and the Shape, and all
// entries have the same struct of arguments.
#pragma once
#include <weft/alltoall/phases.cuh>

namespace weft {

enum class Packing : u32 {
    contiguous = 0,  // group after group
    masked = 1,      // each group in a separate block, with the same number of rows
};

constexpr Phase grouping_phase = Phase(3);  // in error records
constexpr u32 max_groups = 1024;
constexpr u32 no_group = ~0u;

struct Grouping {
    Packing packing;
    u32 groups;  // local experts
    u32 rows;    // contiguous: of all groups together; otherwise of each group
    u32 align;   // groups start at multiples of it, and are padded with zero rows up to one
    u32 tile;    // tokens of one source that one CTA counts

    constexpr u32 total() const { return packing == Packing::contiguous ? rows : groups * rows; }
    constexpr u32 padded(u32 count) const { return (count + align - 1) / align * align; }
    // The upper limit of the end of a group's rows.
    constexpr u32 limit(u32 group) const {
        return packing == Packing::contiguous ? rows : (group + 1) * rows;
    }
};

// Tiles of a source.
constexpr u32 tiles_of(Shape s, Grouping g) { return (s.tokens + g.tile - 1) / g.tile; }

struct GroupArgs {
    Site site;
    void* rows[max_planes];  // [row_limit, row bytes] of each payload
    i32* slot;               // [total] of source * tokens + token, or -1
    float* weight;           // [total]; 0 for a row without a slot
    i32* offsets;            // [groups + 1]
    i32* counts;             // [groups]
    i32* position;           // [ranks, tokens, top_k] of rows, -1 for none
    i32* within;      // the same shape: rank of an entry among its group's entries in its tile
    u32* before;      // [ranks * tiles, groups] entries of the group in earlier tiles
    u32* arrived;     // CTAs that have counted their tile; 0 between calls
    const void* y;    // [total, hidden] results, to scatter or to send
    i64* dst_addr;    // gemm_push: [total] address of each row's slot at its owner, or 0
    u32 source_rows;  // as in the dispatch
    u32 row_limit;    // contiguous: rows that this call's buffers hold, at most total
};

// The upper limit of the end of a group's rows, in the buffers of this call.
WEFT_FN u32 limit_of(const GroupArgs& a, Grouping g, u32 group) {
    const u32 limit = g.limit(group);
    return g.packing == Packing::contiguous && a.row_limit < limit ? a.row_limit : limit;
}

// The slot of entry k of a token at its owner, in this process's mapping.
template <Shape S> WEFT_FN u8* dst_addr_of(const Site& site, u32 source, u32 token, u32 k) {
    return share<S>(site, source).inbox.returned.row[token][k];
}

// Reports that the rows do not fit the buffer; the rest is dropped.
WEFT_FN void refuse_rows(Header& header, const Site& site, u32 limit, u64 needed, u32 group) {
    refuse(header, site,
           {.code = u32(Code::token_overflow),
            .phase = u32(grouping_phase),
            .expected = limit,
            .observed = needed,
            .index = group});
}

}  // namespace weft
