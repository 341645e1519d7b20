// Counts, ranks of tokens and local ids of deep_ep's normal mode: a kernel for each, all of them
// short. A thread takes a token, or an entry.
#pragma once
#include <weft/device/order.cuh>
#include <weft/device/team.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 layout_threads = 128;
constexpr u32 announced_words = 7;  // len(WORDS) in compat/normal_mode.py

// Mirrored by `LayoutArgs` in compat/rank_layout.py.
struct LayoutArgs {
    const void* ids;  // [tokens, top_k], int32 or int64
    u8* in_rank;      // [tokens, ranks]
    u32* counts;      // [ranks + experts], zeros before
    u32 tokens, top_k, ids_bytes, ranks, experts;
    u32 reserved;
};

// Mirrored by `AnnouncementArgs` in compat/rank_layout.py.
struct AnnouncementArgs {
    const void* ids;        // as above; null: there are none
    const u8* in_rank;      // [tokens, ranks]
    const i32* per_rank;    // [ranks]
    const i32* per_expert;  // [experts]
    i32* rank_ids;          // [tokens, ranks]: the rank, or -1
    u32* numbers;           // [words, 1, ranks, ranks, experts], zeros before
    u32* refused;           // entries that name no expert are added to it; null: they are not
    u32 tokens, top_k, ids_bytes, ranks, experts;
    u32 words[announced_words];
};

// Mirrored by `LocalArgs` in compat/rank_layout.py.
struct LocalArgs {
    void* ids;         // [entries], int32 or int64; null: there are none
    float* weights;    // [entries]
    const i32* slots;  // [rows] of source * max_tokens + token, or -1
    i32* tokens;       // [rows]
    u32 entries, rows, ids_bytes, max_tokens;
    i32 first;  // expert of this rank
    u32 count;  // of its experts
};

// Adds, once for each warp, how many of its lanes say yes.
WEFT_FN void count_lanes(u32* at, bool mine) {
    const u32 lanes = __ballot_sync(all_lanes, mine);
    if (lanes != 0 && threadIdx.x % warp_lanes == 0) add_relaxed(at, __popc(lanes));
}

// How many tokens go to each rank, and entries to each expert; the sums need no order.
WEFT_FN void dispatch_layout(const LayoutArgs& a) {
    griddep_wait();
    launch_dependents();
    const u32 token = blockIdx.x * layout_threads + threadIdx.x;
    const bool there = token < a.tokens;
    u32 ranks = 0;
    for (u32 k = 0; k < a.top_k && there; ++k) {
        const i64 id = id_at(a.ids, a.ids_bytes, u64(token) * a.top_k + k);
        if (id < 0 || id >= i64(a.experts)) continue;
        add_relaxed(a.counts + a.ranks + u32(id), 1);
        ranks |= 1u << (u32(id) / (a.experts / a.ranks));
    }
    for (u32 rank = 0; rank < a.ranks; ++rank) {
        const bool goes = (ranks >> rank & 1u) != 0;
        if (there) a.in_rank[u64(token) * a.ranks + rank] = goes;
        count_lanes(a.counts + rank, goes);
    }
}

// What a rank tells of its dispatch, and the ids by which its rows are sent.
WEFT_FN void announcement(const AnnouncementArgs& a) {
    griddep_wait();
    launch_dependents();
    const u32 thread = blockIdx.x * layout_threads + threadIdx.x;
    const bool there = thread < a.tokens;
    u32* refused = a.numbers + announced_words;
    u32* per_rank = refused + 1;
    for (u32 rank = 0; rank < a.ranks; ++rank) {
        const u64 at = u64(thread) * a.ranks + rank;
        const bool goes = there && a.in_rank[at] != 0;
        if (there) a.rank_ids[at] = goes ? i32(rank) : -1;
        count_lanes(per_rank + a.ranks + rank, goes);
    }
    for (u32 k = 0; k < a.top_k && a.ids != nullptr; ++k) {
        const i64 id = there ? id_at(a.ids, a.ids_bytes, u64(thread) * a.top_k + k) : -1;
        const bool bad = id < -1 || id >= i64(a.experts);
        count_lanes(refused, bad);
        if (a.refused != nullptr) count_lanes(a.refused, bad);
    }
    const u32 threads = gridDim.x * layout_threads;
    if (thread == 0)
        for (u32 i = 0; i < announced_words; ++i) a.numbers[i] = a.words[i];
    for (u32 i = thread; i < a.ranks; i += threads) per_rank[i] = u32(a.per_rank[i]);
    for (u32 i = thread; i < a.experts; i += threads)
        per_rank[2 * a.ranks + i] = u32(a.per_expert[i]);
}

// In place: ids counted from this rank's first expert, -1 for others', whose weights become 0.
// Beside them, each row's token at its source.
WEFT_FN void localize(const LocalArgs& a) {
    griddep_wait();
    launch_dependents();
    const u32 i = blockIdx.x * layout_threads + threadIdx.x;
    if (i < a.rows) a.tokens[i] = a.slots[i] < 0 ? -1 : i32(u32(a.slots[i]) % a.max_tokens);
    if (i >= a.entries || a.ids == nullptr) return;
    const i64 id = id_at(a.ids, a.ids_bytes, i), first = a.first;
    const bool held = id >= first && id < first + i64(a.count);
    const i32 local = held ? i32(id - first) : -1;
    if (a.ids_bytes == 8)
        static_cast<i64*>(a.ids)[i] = local;
    else
        static_cast<i32*>(a.ids)[i] = local;
    if (!held) a.weights[i] = 0.0f;
}

}  // namespace weft
