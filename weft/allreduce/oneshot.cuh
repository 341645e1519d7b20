// SPDX-License-Identifier: Apache-2.0
// The one-shot all-reduce: every rank stores its rows at every peer and sums all rows itself. Rows
// cross NVLink once, without flags and without a barrier between ranks.
//
// Roles: all CTAs have the same role. A cluster processes one token and a thread one vector of it,
// so that a few tokens use many SMs, because one SM pushes about 36 GB/s and a GPU 334. The first
// CTA also exchanges call words. A resident cluster loops over tokens.
#pragma once
#include <weft/allreduce/epilogue.cuh>
#include <weft/allreduce/wait.cuh>

namespace weft {

template <Reduction R> WEFT_FN void push_direct(const Call<R>& call, u32 token, u32 v, uint4 own) {
    const u32 me = call.me();
    const uint4 row = without_sentinel<R.dtype>(own);
#pragma unroll
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 peer = next_rank<R>(me, offset);
        if (!is_summed<R>(call.summed, peer)) continue;
        auto& slots = call.at(peer).direct[call.side()][slot_index(peer, me)];
        post_vector(reinterpret_cast<uint4*>(slots[token]) + v, row);
    }
}

template <Reduction R> WEFT_FN PeerSlots direct_slots(const Call<R>& call, u32 token, u32 v) {
    auto& slots = call.at(call.me()).direct[call.side()];
    return {reinterpret_cast<uint4*>(slots[0][token]) + v, sizeof(slots[0]), Slot::direct};
}

// The sum and residual of this thread's vector; false when a wait has failed.
template <Reduction R>
WEFT_FN bool sum_direct(const Call<R>& call, u32 token, u32 v, uint4 own, uint4& row) {
    const ReduceArgs& a = call.a;
    const PeerSlots slots = direct_slots<R>(call, token, v);
    uint4 rows[R.ranks];
#pragma unroll
    for (u32 i = 0; i < R.ranks; ++i)
        rows[i] = i == call.me()                 ? own
                  : is_summed<R>(call.summed, i) ? sentinel_vector()
                                                 : neutral_vector<R.dtype>();
    const uint4 residual = a.residual ? load_input(vector_of<R>(a.residual, token, v)) : uint4{};
    fault(call.header, Point::before_rows, call.me(), call.epoch);
    if (!await_vectors<R, false>(call, slots, token, v, rows)) return false;
    // This rank's own vector may be a NaN that looks like an empty slot; it was never waited for.
    const uint4 sum = sum_in_order<R>(rows);
    row = a.residual ? add_rounded<R>(sum, residual) : sum;
    clear_slots<R>(call, slots);
    if (a.out != nullptr) store(vector_of<R>(a.out, token, v), sum);
    if (a.residual_out != nullptr) store(vector_of<R>(a.residual_out, token, v), row);
    return true;
}

template <Reduction R, bool moe> WEFT_FN void oneshot(const ReduceArgs& a) {
    __shared__ PartialBuffer<R> buffer;
    const Block team;
    const Cluster cluster;
    griddep_wait();
    launch_dependents();
    const u32 neighbours = cluster.size();
    if (neighbours != 1) cluster.arrive();
    const u32 token = blockIdx.x / neighbours, v = cluster.rank() * team.lanes() + team.lane();
    const bool inside = v < R.vectors();
    Call<R> call(a);
    const uint4 own = inside ? load_own<R, moe>(a, token, v) : uint4{};
    call.send_call_words(team);
    if (call.live && inside) push_direct<R>(call, token, v, own);
    fault(call.header, Point::after_rows, call.me(), call.epoch);
    const u32 before = call.arrive(team);
    const NormWeight norm_weight = inside ? load_norm_weight<R>(a, v) : NormWeight{};

    uint4 row{};
    const bool valid = call.live && inside && sum_direct<R>(call, token, v, own, row);
    const u64 seen = call.load_call_word(team);
    if (neighbours != 1) cluster.wait();
    if (a.weight != nullptr) {
        const u64 partial = partial_of<R>(a, row, norm_weight);
        if (v / warp_lanes < R.partials())
            send_partial<R>(team, cluster, &buffer.partial[0][v / warp_lanes], partial);
        sync_cluster(cluster, neighbours);
        const RowStats m = gather_row_stats<R>(team, a, buffer.partial[0]);
        finish_vector<R>(a, token, v, valid, row, norm_weight, m);
    }
    call.advance(team, before);
    call.check_call_word(team, seen);
}

// The tokens of a resident cluster, `first` and every `step`-th after it, and a thread's vectors of
// each.
struct GridStride {
    u32 first, step, lane, lanes;

    WEFT_FN GridStride(const Block& team, const Cluster& cluster)
        : first(blockIdx.x / cluster.size()),
          step(gridDim.x / cluster.size()),
          lane(cluster.rank() * team.lanes() + team.lane()),
          lanes(cluster.size() * team.lanes()) {}
    WEFT_FN u32 vector(u32 piece) const { return piece * lanes + lane; }
};

template <Reduction R, bool moe, u32 pieces>
WEFT_FN void push_tokens(const Call<R>& call, const GridStride& grid) {
    constexpr u32 tokens_in_flight = pushes_in_flight / pieces;
    const u32 tokens = call.a.tokens;
    for (u32 first = grid.first; first < tokens; first += grid.step * tokens_in_flight) {
        uint4 own[pushes_in_flight];
#pragma unroll
        for (u32 i = 0; i < pushes_in_flight; ++i) {
            const u32 token = first + i / pieces * grid.step, v = grid.vector(i % pieces);
            if (token < tokens && v < R.vectors()) own[i] = load_own<R, moe>(call.a, token, v);
        }
        if (!call.live) return;  // after the loads, which share latency with the state
#pragma unroll
        for (u32 i = 0; i < pushes_in_flight; ++i) {
            const u32 token = first + i / pieces * grid.step, v = grid.vector(i % pieces);
            if (token < tokens && v < R.vectors()) push_direct<R>(call, token, v, own[i]);
        }
    }
}

// The same with a resident grid: a cluster stores the rows of all its tokens before its first wait,
// so that no store is delayed by a wait. All CTAs are co-resident. This rank's own row is loaded
// again for the sum, which is safe because one thread reads and overwrites each vector. With two
// pieces most rows fit one CTA, which avoids cluster barriers, which wait for every store in
// flight.
template <Reduction R, bool moe, u32 pieces> WEFT_FN void oneshot_resident(const ReduceArgs& a) {
    __shared__ PartialBuffer<R> buffer;
    const Block team;
    const Cluster cluster;
    griddep_wait();
    launch_dependents();
    const u32 neighbours = cluster.size();
    if (neighbours != 1) cluster.arrive();
    const GridStride grid(team, cluster);
    Call<R> call(a);
    call.send_call_words(team);
    push_tokens<R, moe, pieces>(call, grid);
    fault(call.header, Point::after_rows, call.me(), call.epoch);
    const u32 before = call.arrive(team);
    NormWeight norm_weight[pieces];
    bool valid[pieces];  // until a wait fails
#pragma unroll
    for (u32 p = 0; p < pieces; ++p) {
        const bool inside = grid.vector(p) < R.vectors();
        norm_weight[p] = inside ? load_norm_weight<R>(a, grid.vector(p)) : NormWeight{};
        valid[p] = call.live && inside;
    }
    if (neighbours != 1) cluster.wait();

    u32 side = 0;
    for (u32 token = grid.first; token < a.tokens; token += grid.step, side ^= 1) {
        uint4 row[pieces];
#pragma unroll
        for (u32 p = 0; p < pieces; ++p) {
            const u32 v = grid.vector(p);
            row[p] = uint4{};
            if (valid[p]) {
                const uint4 own = load_own<R, moe>(a, token, v, false);
                valid[p] = sum_direct<R>(call, token, v, own, row[p]);
            }
            if (a.weight == nullptr) continue;
            const u64 partial = partial_of<R>(a, row[p], norm_weight[p]);
            if (v / warp_lanes < R.partials())
                send_partial<R>(team, cluster, &buffer.partial[side][v / warp_lanes], partial);
        }
        if (a.weight == nullptr) continue;
        sync_cluster(cluster, neighbours);
        const RowStats m = gather_row_stats<R>(team, a, buffer.partial[side]);
#pragma unroll
        for (u32 p = 0; p < pieces; ++p)
            finish_vector<R>(a, token, grid.vector(p), valid[p], row[p], norm_weight[p], m);
    }
    call.advance(team, before);
    call.check_call_word(team, call.load_call_word(team));
}

}  // namespace weft
