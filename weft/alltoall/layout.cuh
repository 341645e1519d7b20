// What lies where in a rank's share of an all-to-all, and the arguments of its entries. A layout is
// a struct: `sizeof` is its size and `->` its only address arithmetic. Nothing that changes from
// call to call of a replayed graph is an argument: epochs live in the heap. Python mirrors the
// structs in alltoall/layout.py and runtime/args.py.
#pragma once
#include <weft/device/header.cuh>
#include <weft/device/quantize.cuh>

namespace weft {

constexpr u32 max_planes = 8;  // opaque payload tensors of one dispatch

// How combine's rows come home: pulled by the owner, pushed by the experts' ranks, or pushed as FP8
// with one scale for 128 columns. Or each of a token's choices by itself: whatever kernel makes the
// row of an expert stores it at the owner, who weighs and sums.
enum class Way : u32 { pull = 0, push = 1, fp8 = 2, choices = 3 };

// One name specialises every kernel. All ranks of a group use equal Shapes; creation verifies it.
struct Shape {
    u32 ranks, tokens, top_k, experts;
    u32 hidden;                 // elements of a combine row
    Number number;              // and their type
    u32 planes;                 // payload tensors
    u32 row_bytes[max_planes];  // bytes of one token's row of each
    Way way = Way::pull;
    Quant quant = Quant::none;
    bool mapped = false;  // experts lie where a table says, not in contiguous blocks
    u32 stats = 0;        // numbers that each rank tells all ranks with its tokens

    constexpr u32 slots() const {
        return (top_k + 3) / 4 * 4;
    }  // top_k padded to whole 16-byte vectors
    constexpr u32 pitch(u32 plane) const { return (row_bytes[plane] + 15) / 16 * 16; }
    constexpr u32 element_bytes() const { return number == Number::fp32 ? 4 : 2; }
    constexpr u32 out_bytes() const { return hidden * element_bytes(); }
    constexpr u32 block() const { return quant == Quant::mxfp8 ? 32 : 128; }
    // Bytes of a pushed row: as it is, or e4m3 numbers and their blocks' scales, in whole lines: a
    // warp's store of 512 bytes across five of them is a packet more on the link.
    constexpr u32 returned_bytes() const {
        return way == Way::fp8 ? (hidden + hidden / 128 * 4 + 127) / 128 * 128 : out_bytes();
    }
};

// One token's routing as the receiver sees it: LOCAL expert ids or -1, and the weights.
template <Shape S> struct alignas(16) Route {
    i32 expert[S.slots()];
    float weight[S.slots()];
};

template <Shape S, u32 P> struct alignas(128) Plane {
    u8 row[S.ranks][S.tokens][S.pitch(P)];
};

// The payload tensors, one plane after the other; `plane<P>(planes)` names one.
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

// Rows that peers push home: slot (the pushing rank, my token).
template <Shape S> struct Returned {
    alignas(128) u8 row[S.ranks][S.tokens][S.returned_bytes()];
};
template <Shape S>
    requires(S.way == Way::pull)
struct Returned<S> {};
template <Shape S>
    requires(S.way == Way::choices)
struct Returned<S> {
    alignas(128) u8 row[S.tokens][S.top_k][S.returned_bytes()];
};

// Numbers that each rank tells every rank, for example the load of its experts. An empty struct
// takes a line: NVRTC 13.0 lays out [[no_unique_address]] one way in offsets and another way in
// code.
template <Shape S> struct Stats {
    alignas(128) i32 row[S.ranks][S.stats];
};
template <Shape S>
    requires(S.stats == 0)
struct Stats<S> {};

// Written by peers. The slot of a token is its index at the source, so no counter is shared and no
// order is lost.
template <Shape S> struct Inbox {
    alignas(128) u64 dispatched[S.ranks];  // flags, one writer each, one line for one poll
    alignas(128) u64 ready[S.ranks];       // a peer's experts are done: its outbox may be read
    alignas(128) i32 counts[S.ranks];      // tokens of each source in this round
    alignas(128) Route<S> route[S.ranks][S.tokens];
    Planes<S> payload;
    Returned<S> returned;
    Stats<S> stats;
};

// Written by this rank's experts, read by peers: the row for token t of source s.
template <Shape S> struct Outbox {
    alignas(128) u8 row[S.ranks][S.tokens][S.out_bytes()];
};
template <Shape S>
    requires(S.way == Way::choices)
struct Outbox<S> {};

// What combine needs to know of my own tokens' choices: the rank of each (max_ranks: none), and its
// weight. Kept from dispatch, because the caller's tensors may have changed.
template <Shape S> struct Choices {};
template <Shape S>
    requires(S.way == Way::choices)
struct Choices<S> {
    alignas(128) u32 rank[S.tokens][S.slots()];
    float weight[S.tokens][S.slots()];
};

template <Shape S> struct Share {
    Header header;
    Inbox<S> inbox;
    Outbox<S> outbox;
    alignas(128) u32
        destinations[S.tokens];  // my own tokens' peers, kept from dispatch for combine
    Choices<S> choices;
};

struct DispatchArgs {
    Site site;
    const void* payload[max_planes];
    const void* ids;        // [tokens, top_k] int32 or int64
    const float* weights;   // [tokens, top_k]; null means 1
    const i32* placement;   // [experts] of rank << 16 | local id, when the Shape is mapped
    const i32* num_tokens;  // device-side count; null means `tokens`
    u32 tokens;
    u32 ids_bytes;     // 4 or 8
    const i32* stats;  // [stats], when the Shape has any
};

struct CombineArgs {
    Site site;
    void* out;
    const void* add;  // [tokens, hidden] added after the sum; null means none
    u32 tokens;
    u32 pushers;  // CTAs that push rows, where others sum them as they come
    u32 strips;   // of a row, that one warp of them pushes
};

template <Shape S> WEFT_FN Share<S>& share(const Site& site, u32 rank) {
    return *reinterpret_cast<Share<S>*>(site.base + rank * site.stride);
}
template <Shape S> WEFT_FN Share<S>& mine(const Site& site) { return share<S>(site, site.rank); }

}  // namespace weft
