// SPDX-License-Identifier: Apache-2.0
// Grouping on CPUs, with the same rows in the same order as on GPUs. Generated entries include this
// file.
#include <cstring>

#include <weft/alltoall/combine_fp8_cpu.hpp>
#include <weft/device/cpu.hpp>
#include <weft/grouping/layout.cuh>

namespace weft {

constexpr u32 sum_columns = 128;  // of one partial sum: a block of FP8

template <Shape S> const Route<S>& route_of(const GroupArgs& a, u32 source, u32 token) {
    return own_share<S>(a.site).inbox.route[slot_of(a.source_rows, source, token)];
}

// Calls visit(k, group, weight) for every entry of a token that has a group, in top-k order.
template <Shape S, Grouping G, class Visit>
void for_entries(const GroupArgs& a, u32 source, u32 token, Visit visit) {
    const Route<S>& route = route_of<S>(a, source, token);
    for (u32 k = 0; k < S.top_k; ++k) {
        const u32 expert = u32(route.expert[k]);
        if (expert < G.groups) visit(k, expert, route.weight[k]);
    }
}

template <Shape S, class Visit> void for_tokens(const Inbox<S>& inbox, Visit visit) {
    for (u32 source = 0; source < S.ranks; ++source)
        for (u32 token = 0, count = tokens_from<S>(inbox, source); token < count; ++token)
            visit(source, token);
}

// Writes the offset and the number of rows of each group, clamped to the buffer.
template <Shape S, Grouping G>
void compute_offsets(const GroupArgs& a, const u32 (&total)[G.groups]) {
    constexpr bool contiguous = G.packing == Packing::contiguous;
    Header& header = own_share<S>(a.site).header;
    const u32 rows = limit_of(a, G, 0);
    u64 begin = 0;
    bool reported = false;
    for (u32 g = 0; g < G.groups; ++g) {
        if (!contiguous && total[g] > G.rows && !reported) {
            refuse_rows(header, a.site, G.rows, total[g], g);
            reported = true;
        }
        const u32 at = !contiguous ? g * G.rows : begin < rows ? u32(begin) : rows;
        const u32 room = limit_of(a, G, g) - at;
        a.offsets[g] = i32(at);
        a.counts[g] = i32(total[g] < room ? total[g] : room);
        begin += G.padded(total[g]);
    }
    if (contiguous && begin > rows) refuse_rows(header, a.site, rows, begin, 0);
    a.offsets[G.groups] = i32(!contiguous ? G.total() : begin < rows ? begin : rows);
}

template <Shape S, u32 P = 0>
void gather_planes(const GroupArgs& a, u32 source, u32 token, u32 row) {
    if constexpr (P < S.planes) {
        const u32 slot = slot_of(a.source_rows, source, token);
        const u8* from = plane<P>(own_share<S>(a.site).inbox.payload).row[slot];
        std::memcpy(static_cast<u8*>(a.rows[P]) + u64(row) * S.row_bytes[P], from, S.row_bytes[P]);
        gather_planes<S, P + 1>(a, source, token, row);
    }
}

template <Shape S, Grouping G> void pad_groups(const GroupArgs& a) {
    for (u32 g = 0; g < G.groups; ++g) {
        const u32 count = u32(a.counts[g]), from = u32(a.offsets[g]) + count;
        for (u32 plane = 0; plane < S.planes; ++plane)
            std::memset(static_cast<u8*>(a.rows[plane]) + u64(from) * S.row_bytes[plane], 0,
                        u64(G.padded(count) - count) * S.row_bytes[plane]);
    }
}

template <Shape S, Grouping G> void clear_row_metadata(const GroupArgs& a) {
    for (u32 row = 0; row < G.total(); ++row) {
        a.slot[row] = -1;
        a.weight[row] = 0.0f;
        if constexpr (S.combine == Combine::gemm_push) a.dst_addr[row] = 0;
    }
}

// Writes the source of a row, and its weight.
template <Shape S>
void label_row(const GroupArgs& a, u32 source, u32 token, u32 row, float weight) {
    a.slot[row] = i32(source * S.tokens + token);
    a.weight[row] = weight;
}

// Zeroes the slot of an entry without a row: its owner must not read stale data.
template <Shape S> void zero_dropped_row(const GroupArgs& a, u32 source, u32 token, u32 k) {
    if constexpr (S.combine == Combine::gemm_push)
        std::memset(dst_addr_of<S>(a.site, source, token, k), 0, S.out_bytes());
}

template <Shape S, Grouping G> void gather(const GroupArgs& a) {
    const Share<S>& own = own_share<S>(a.site);
    if (own.header.state.failed != 0) return;
    u32 next[G.groups] = {};
    for_tokens<S>(own.inbox, [&](u32 source, u32 token) {
        for_entries<S, G>(a, source, token, [&](u32, u32 group, float) { ++next[group]; });
    });
    compute_offsets<S, G>(a, next);
    clear_row_metadata<S, G>(a);
    for (u32 g = 0; g < G.groups; ++g) next[g] = u32(a.offsets[g]);
    for_tokens<S>(own.inbox, [&](u32 source, u32 token) {
        const u32 slot = source * S.tokens + token;
        i32* position = a.position + u64(slot) * S.top_k;
        for (u32 k = 0; k < S.top_k; ++k) position[k] = -1;
        for_entries<S, G>(a, source, token, [&](u32 k, u32 group, float weight) {
            const u32 row = next[group]++;
            if (row >= limit_of(a, G, group)) return zero_dropped_row<S>(a, source, token, k);
            position[k] = i32(row);
            if constexpr (S.combine == Combine::gemm_push)
                a.dst_addr[row] = i64(dst_addr_of<S>(a.site, source, token, k));
            label_row<S>(a, source, token, row, weight);
            gather_planes<S>(a, source, token, row);
        });
    });
    pad_groups<S, G>(a);
}

// Stores columns `at` .. `at` + count of the sum of one token's rows, in top-k order, in the row
// `to`.
template <Shape S, Grouping G, bool as_fp8, u32 count>
void sum_block(const GroupArgs& a, u32 source, u32 token, u32 at, u8* to) {
    const i32* position = a.position + (u64(source) * S.tokens + token) * S.top_k;
    float sum[count] = {};
    for_entries<S, G>(a, source, token, [&](u32 k, u32, float weight) {
        if (position[k] < 0) return;
        const u64 first = u64(position[k]) * S.hidden + at;
        add_weighted<S.dtype>(sum, weight, static_cast<const Bits<S.dtype>*>(a.y) + first);
    });
    Bits<S.dtype> rounded[count];
    for (u32 i = 0; i < count; ++i) rounded[i] = narrow<S.dtype>(sum[i]);
    if constexpr (as_fp8) {
        for (u32 i = 0; i < count; ++i) sum[i] = widen<S.dtype>(rounded[i]);
        post_block<S>(sum, at / count, to);
    } else {
        std::memcpy(to + u64(at) * S.element_bytes(), rounded, sizeof rounded);
    }
}

// Stores the whole sum.
template <Shape S, Grouping G, bool as_fp8>
void sum_row(const GroupArgs& a, u32 source, u32 token, u8* to) {
    constexpr u32 rest = S.hidden % sum_columns, whole = S.hidden - rest;
    for (u32 at = 0; at < whole; at += sum_columns)
        sum_block<S, G, as_fp8, sum_columns>(a, source, token, at, to);
    if constexpr (rest != 0) sum_block<S, G, as_fp8, rest>(a, source, token, whole, to);
}

// Calls visit(source, token) for every token that has an entry on this rank.
template <Shape S, Grouping G, class Visit>
void for_tokens_with_entries(const GroupArgs& a, Visit visit) {
    for_tokens<S>(own_share<S>(a.site).inbox, [&](u32 source, u32 token) {
        bool has_entry = false;
        for_entries<S, G>(a, source, token, [&](u32, u32, float) { has_entry = true; });
        if (has_entry) visit(source, token);
    });
}

template <Shape S, Grouping G> void scatter(const GroupArgs& a) {
    Share<S>& own = own_share<S>(a.site);
    if (own.header.state.failed != 0) return;
    for_tokens_with_entries<S, G>(a, [&](u32 source, u32 token) {
        u8* to = own.outbox.row[slot_of(a.source_rows, source, token)];
        sum_row<S, G, false>(a, source, token, to);
    });
}

// Copies each row of one token to its entry's slot.
template <Shape S> void copy_rows(const GroupArgs& a, u32 source, u32 token) {
    const i32* position = a.position + (u64(source) * S.tokens + token) * S.top_k;
    for (u32 k = 0; k < S.top_k; ++k) {
        if (position[k] < 0) continue;
        const u8* row = static_cast<const u8*>(a.y) + u64(position[k]) * S.out_bytes();
        std::memcpy(dst_addr_of<S>(a.site, source, token, k), row, S.out_bytes());
    }
}

// Stores every token's rows or sum into its owner's inbox, then publishes the flags.
template <Shape S, Grouping G> void send(const GroupArgs& a) {
    Header& header = own_share<S>(a.site).header;
    const EpochState state = header.state;
    if (state.failed != 0) return;
    const u64 start = now_ns();
    mark_start(Solo{}, header, Phase::combine, state.epoch, start);
    if (fault(header, Point::combine_enter, a.site.rank, state.epoch) == Action::stay_away) return;
    for_tokens_with_entries<S, G>(a, [&](u32 source, u32 token) {
        if constexpr (S.combine == Combine::gemm_push)
            copy_rows<S>(a, source, token);
        else
            sum_row<S, G, S.combine == Combine::push_fp8>(
                a, source, token, share<S>(a.site, source).inbox.returned.row[a.site.rank][token]);
    });
    publish_combine<S>(Solo{}, a.site, header.living, state.epoch);
}

}  // namespace weft
