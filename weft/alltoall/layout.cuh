// SPDX-License-Identifier: Apache-2.0
// The layout of a rank's share of an all-to-all, and the arguments of its entries. A layout is a
// struct: `sizeof` is its size, and `->` is its only address arithmetic. Values that change between
// replays of a graph, such as epochs, are in the heap, not in the arguments. Python mirrors the
// structs in alltoall/config.py and heap/header.py.
#pragma once
#include <weft/device/header.cuh>
#include <weft/device/quantize.cuh>

namespace weft {

constexpr u32 max_planes = 8;  // opaque payload tensors of one dispatch

// How combine returns rows to the tokens' owners. pull: the owner loads them. push: the experts'
// ranks store them; push_fp8: as FP8 with one scale per 128 columns, with flag-in-data. gemm_push:
// the kernel that computes an expert's row stores it at the owner, which weights and sums the rows.
enum class Combine : u32 { pull = 0, push = 1, push_fp8 = 2, gemm_push = 3 };

// One Shape specialises every kernel. All ranks of a group use equal Shapes; creation verifies it.
struct Shape {
    u32 ranks, tokens, top_k, experts;
    u32 hidden;                 // columns of a combine row
    DType dtype;                // of a combine row
    u32 planes;                 // payload tensors
    u32 row_bytes[max_planes];  // bytes of one token's row of each
    Combine combine = Combine::pull;
    Quant quant = Quant::none;
    bool mapped = false;             // experts are placed by a table, not in contiguous blocks
    u32 stats = 0;                   // integers that each rank sends to all ranks with its tokens
    Reduce reduce = Reduce::sender;  // receiver: only with gemm_push

    constexpr u32 padded_top_k() const { return (top_k + 3) / 4 * 4; }  // whole 16-byte vectors
    constexpr u32 pitch(u32 plane) const { return (row_bytes[plane] + 15) / 16 * 16; }
    constexpr u32 element_bytes() const { return dtype == DType::fp32 ? 4 : 2; }
    constexpr u32 out_bytes() const { return hidden * element_bytes(); }
    constexpr u32 block() const { return quant == Quant::mxfp8 ? 32 : 128; }
    // Bytes of a pushed row: the row itself, or e4m3 values and their blocks' scales, padded to
    // whole lines: a warp's store of 512 bytes that touches five lines costs one packet more on the
    // link.
    constexpr u32 returned_bytes() const {
        return combine == Combine::push_fp8 ? (hidden + hidden / 128 * 4 + 127) / 128 * 128
                                            : out_bytes();
    }
};

// One token's routing as the receiver reads it: LOCAL expert ids or -1, and the weights.
template <Shape S> struct alignas(16) Route {
    i32 expert[S.padded_top_k()];
    float weight[S.padded_top_k()];
};

template <Shape S, u32 P> struct alignas(128) Plane {
    u8 row[S.ranks * S.tokens][S.pitch(P)];
};

// The payload tensors, one plane after the other; `plane<P>(planes)` is one of them.
template <Shape S, u32 P = 0> struct Planes {
    Plane<S, P> first;
    Planes<S, P + 1> rest;
};
template <Shape S, u32 P>
    requires(P == S.planes)
struct Planes<S, P> {};

template <u32 P, class T> WEFT_FN auto& plane(T& planes) {
    if constexpr (P == 0)
        return planes.first;
    else
        return plane<P - 1>(planes.rest);
}

// Rows that peers push to their tokens' owner: slot (pushing rank, token). With gemm_push: slot
// (token, entry of its top k).
template <Shape S> struct Returned {
    alignas(128) u8 row[S.ranks][S.tokens][S.returned_bytes()];
};
template <Shape S>
    requires(S.combine == Combine::pull)
struct Returned<S> {};
template <Shape S>
    requires(S.combine == Combine::gemm_push)
struct Returned<S> {
    alignas(128) u8 row[S.tokens][S.top_k][S.returned_bytes()];
};

// Integers that each rank sends to every rank, for example the load of its experts. An empty struct
// takes a line, because NVRTC 13.0 lays out [[no_unique_address]] one way in offsets and another
// way in code.
template <Shape S> struct Stats {
    alignas(128) i32 row[S.ranks][S.stats];
};
template <Shape S>
    requires(S.stats == 0)
struct Stats<S> {};

// The slot of a token of a source, in the inbox and in the outbox of every rank. Each source has
// `source_rows` contiguous slots, a number up to S.tokens that each call chooses and that is equal
// on all ranks. The slot depends only on the token's index at its source, so no counter is shared
// and the order is deterministic.
WEFT_FN constexpr u32 slot_of(u32 source_rows, u32 source, u32 token) {
    return source * source_rows + token;
}

// Written by peers.
template <Shape S> struct Inbox {
    alignas(128) u64 dispatched[S.ranks];  // flags; one writer each
    alignas(128) u64 ready[S.ranks];   // flags: a peer's experts are done, its outbox may be read
    alignas(128) i32 counts[S.ranks];  // tokens of each source in this round
    // How long each source took from the start of its dispatch to its flag, up to 2^32 - 1.
    alignas(128) u32 sent_ns[S.ranks];
    alignas(128) Route<S> route[S.ranks * S.tokens];
    Planes<S> payload;
    Returned<S> returned;
    Stats<S> stats;
};

// Written by this rank's experts, read by peers: the row for token t of source s.
template <Shape S> struct Outbox {
    alignas(128) u8 row[S.ranks * S.tokens][S.out_bytes()];
};
template <Shape S>
    requires(S.combine == Combine::gemm_push)
struct Outbox<S> {};

// The routing of this rank's own tokens that combine needs with gemm_push: the rank of each entry
// (max_ranks: none) and its weight. Dispatch saves it, because the caller's tensors may have
// changed by then.
template <Shape S> struct SavedRouting {};
template <Shape S>
    requires(S.combine == Combine::gemm_push)
struct SavedRouting<S> {
    alignas(128) u32 rank[S.tokens][S.padded_top_k()];
    float weight[S.tokens][S.padded_top_k()];
};

template <Shape S> struct Share {
    Header header;
    Inbox<S> inbox;
    Outbox<S> outbox;
    alignas(128) RankSet destinations[S.tokens];  // of own tokens, saved for combine
    SavedRouting<S> saved_routing;
};

struct DispatchArgs {
    Site site;
    const void* payload[max_planes];
    const void* ids;        // [tokens, top_k] int32 or int64
    const float* weights;   // [tokens, top_k]; null means 1
    const i32* placement;   // [experts] of rank << 16 | local id, when the Shape is mapped
    const i32* num_tokens;  // count on the device; null means `tokens`
    u32 tokens;
    u32 ids_bytes;     // 4 or 8
    const i32* stats;  // [stats], when the Shape has any
    u32 source_rows;   // slots for each source, at least as many as any rank has tokens
    u32 reserved;
    CallRecord call;  // source_rows is in it
};

struct CombineArgs {
    Site site;
    void* out;
    const void* add;  // [tokens, hidden], added after the sum; null means none
    u32 tokens;
    u32 pushers;      // push_fp8: CTAs that push rows while the others sum them
    u32 strips;       // push_fp8: strips of a row that one warp pushes
    u32 source_rows;  // as in the dispatch
};

template <Shape S> WEFT_FN Share<S>& share(const Site& site, u32 rank) {
    return *reinterpret_cast<Share<S>*>(site.base + rank * site.stride);
}
template <Shape S> WEFT_FN Share<S>& own_share(const Site& site) {
    return share<S>(site, site.rank);
}

}  // namespace weft
