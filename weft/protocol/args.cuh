// The structs that cross from Python to an entry; jit/args.py checks the Python mirrors against the
// offsets below. Nothing that changes from call to call of a replayed graph is here: epochs live in
// the heap.
#pragma once
#include <weft/protocol/layout.cuh>

namespace weft {

// Where the shares lie and who I am. Rank r's share starts at base + r * stride.
struct Site {
    u64 base, stride;
    u64 mailbox;
    u32 rank, descriptor;  // descriptor: eight bits of the Shape's hash, compared in every flag
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
WEFT_FN Mailbox& mailbox(const Site& site) { return *reinterpret_cast<Mailbox*>(site.mailbox); }

}  // namespace weft
