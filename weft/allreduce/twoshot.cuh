// SPDX-License-Identifier: Apache-2.0
// The two-shot all-reduce: rank t % ranks sums token t. Rows cross NVLink twice, with 2 / ranks of
// the bytes of oneshot. A build has the epilogue at one of two places:
// owner     the rank that sums a row adds the residual, computes the row's statistics and sends the
//           row and its statistics to its peers, which apply the elementwise part
// receiver  the rank that sums a row sends the sum; every rank adds its own residual and computes
//           the statistics, so that residuals, weights and scales may differ by rank. Each rank
//           reads the residual of all tokens instead of 1 / ranks of them, and no statistics are
//           sent.
//
// Roles, in grid order:
// pushers   store this rank's rows at their tokens' owners, and then compute the outputs of the
//           other ranks' summed rows: warps process individual vectors or, with the epilogue at the
//           receiver, clusters process whole rows, as the reducers do
// reducers  sum the rows that this rank owns
//
// Pushing does not wait, reducing waits only for pushes, and finishing only for reductions. All
// CTAs of a launch are co-resident and process the tokens in order, so that both shots share the
// links and the latencies of tokens overlap.
#pragma once
#include <weft/allreduce/epilogue.cuh>
#include <weft/allreduce/wait.cuh>

namespace weft {

// One vector of a token that a peer owns. `f` counts vectors, then peers, then groups of `ranks`
// tokens. Each rank starts with its right neighbour, so that ranks do not store to the same peer at
// once.
template <Reduction R> struct PeerVector {
    u32 v, group, owner, token;

    WEFT_FN PeerVector(u32 me, u32 f) {
        const u32 row = f / R.vectors();
        v = f % R.vectors();
        group = row / R.peers();
        owner = next_rank<R>(me, row % R.peers() + 1);
        token = group * R.ranks + owner;
    }
    WEFT_FN static u32 total(u32 tokens) {
        return (tokens + R.ranks - 1) / R.ranks * R.peers() * R.vectors();
    }
};

template <Reduction R, bool moe> WEFT_FN void push_parts(const Block& team, const Call<R>& call) {
    const ReduceArgs& a = call.a;
    const u32 me = call.me(), step = a.pushers * team.lanes(),
              total = PeerVector<R>::total(a.tokens);
    for (u32 first = blockIdx.x * team.lanes() + team.lane(); first < total;
         first += step * pushes_in_flight) {
        uint4 row[pushes_in_flight];
#pragma unroll
        for (u32 i = 0; i < pushes_in_flight; ++i) {
            const PeerVector<R> at(me, first + i * step);
            if (at.token < a.tokens) row[i] = load_own<R, moe>(a, at.token, at.v);
        }
        if (!call.live) break;  // after the loads, which share latency with the state
#pragma unroll
        for (u32 i = 0; i < pushes_in_flight; ++i) {
            const PeerVector<R> at(me, first + i * step);
            auto& slots = call.at(at.owner).part[call.side()][slot_index(at.owner, me)];
            if (at.token < a.tokens)
                post_vector(reinterpret_cast<uint4*>(slots[at.group]) + at.v,
                            without_sentinel<R.dtype>(row[i]));
        }
    }
    fault(call.header, Point::after_rows, me, call.epoch);
}

template <Reduction R> WEFT_FN PeerSlots part_slots(const Call<R>& call, u32 group, u32 v) {
    auto& slots = call.at(call.me()).part[call.side()];
    return {reinterpret_cast<uint4*>(slots[0][group]) + v, sizeof(slots[0]), Slot::part};
}

// Rounded rows hold no sentinel, because conversions produce another NaN.
template <Reduction R> WEFT_FN void push_whole(const Call<R>& call, u32 group, u32 v, uint4 row) {
#pragma unroll
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 peer = next_rank<R>(call.me(), offset);
        auto& slots = call.at(peer).whole[slot_index(peer, call.me())];
        post_vector(reinterpret_cast<uint4*>(slots[group]) + v, row);
    }
}

// Sums this thread's vector of a token that this rank owns, and sends it; false when a wait has
// failed.
template <Reduction R, bool moe, bool polls_one>
WEFT_FN bool sum_part(const Call<R>& call, u32 token, u32 group, u32 v, uint4& row) {
    const ReduceArgs& a = call.a;
    const PeerSlots slots = part_slots<R>(call, group, v);
    const uint4 own = load_own<R, moe>(a, token, v);
    const uint4 residual = a.residual ? load_input(vector_of<R>(a.residual, token, v)) : uint4{};
    uint4 rows[R.ranks];
#pragma unroll
    for (u32 i = 0; i < R.ranks; ++i) rows[i] = i == call.me() ? own : sentinel_vector();
    fault(call.header, Point::before_rows, call.me(), call.epoch);
    if (!await_vectors<R, polls_one>(call, slots, token, v, rows)) return false;
    const uint4 sum = sum_in_order<R>(rows);
    row = a.residual ? add_rounded<R>(sum, residual) : sum;
    push_whole<R>(call, group, v, sends_sum<R>(a) ? sum : row);
    clear_slots<R>(call, slots);
    if (a.out != nullptr) store(vector_of<R>(a.out, token, v), sum);
    if (a.residual_out != nullptr) store(vector_of<R>(a.residual_out, token, v), row);
    return true;
}

template <Reduction R>
WEFT_FN void send_row_stats(const Block& team, const Call<R>& call, u32 group, const RowStats& m) {
    const u32 offset = team.lane() + 1, tag = trailer_tag(call.epoch);
    if (offset >= R.ranks) return;
    const u32 peer = next_rank<R>(call.me(), offset);
    fault(call.header, Point::before_moments, peer, call.epoch);
    post_u64_pair(
        reinterpret_cast<uint4*>(&call.at(peer).trailer[slot_index(peer, call.me())][group]),
        make_uint4(__float_as_uint(m.rstd), tag, m.peak, tag));
}

// Each cluster loops over its tokens; a thread has `pieces` vectors of a row.
template <Reduction R, bool moe, u32 pieces, bool polls_one>
WEFT_FN void reduce_parts(const Block& team, const Cluster& cluster, const Call<R>& call,
                          PartialBuffer<R>& buffer) {
    const ReduceArgs& a = call.a;
    const u32 neighbours = cluster.size(), rank = cluster.rank();
    u32 side = 0;
    for (u32 group = (blockIdx.x - a.pushers) / neighbours; group * R.ranks + call.me() < a.tokens;
         group += (gridDim.x - a.pushers) / neighbours, side ^= 1) {
        const u32 token = group * R.ranks + call.me();
        uint4 row[pieces];
        NormWeight norm_weight[pieces];
        bool valid[pieces];
#pragma unroll
        for (u32 i = 0; i < pieces; ++i) {
            const u32 v = (i * neighbours + rank) * team.lanes() + team.lane();
            valid[i] = call.live && v < R.vectors();
            norm_weight[i] = valid[i] ? load_norm_weight<R>(a, v) : NormWeight{};
            row[i] = uint4{};
            valid[i] = valid[i] && sum_part<R, moe, polls_one>(call, token, group, v, row[i]);
            if (a.weight == nullptr) continue;
            const u64 partial = partial_of<R>(a, row[i], norm_weight[i]);
            if (v / warp_lanes < R.partials())
                send_partial<R>(team, cluster, &buffer.partial[side][v / warp_lanes], partial);
        }
        if (a.weight == nullptr) continue;
        sync_cluster(cluster, neighbours);
        const RowStats m = gather_row_stats<R>(team, a, buffer.partial[side]);
        if (R.epilogue_at == EpilogueAt::owner && rank == 0 && call.live)
            send_row_stats<R>(team, call, group, m);
#pragma unroll
        for (u32 i = 0; i < pieces; ++i)
            finish_vector<R>(a, token, (i * neighbours + rank) * team.lanes() + team.lane(),
                             valid[i], row[i], norm_weight[i], m);
    }
}

// Receives one vector of a summed row and computes this rank's outputs, with the statistics from
// the row's owner.
template <Reduction R>
WEFT_FN void finish_part(const Call<R>& call, const PeerVector<R>& at, bool valid) {
    const ReduceArgs& a = call.a;
    const bool adds = a.out != nullptr && a.residual != nullptr;
    const NormWeight norm_weight = valid ? load_norm_weight<R>(a, at.v) : NormWeight{};
    uint4 residual{}, row{};
    if (valid && adds) residual = load_input(vector_of<R>(a.residual, at.token, at.v));
    const u32 slot_idx = slot_index(call.me(), at.owner);
    ReductionInbox<R>& own = call.at(call.me());
    uint4* slot = reinterpret_cast<uint4*>(own.whole[slot_idx][at.group]) + at.v;
    valid = valid && await_vector<R>(call, slot, at.owner, at.token, at.v, row);
    if (valid) {
        restore_sentinel(slot);
        if (a.out != nullptr) store(vector_of<R>(a.out, at.token, at.v), row);
        if (adds) row = add_rounded<R>(row, residual);
        if (a.residual_out != nullptr) store(vector_of<R>(a.residual_out, at.token, at.v), row);
    }
    if (a.weight == nullptr) return;
    RowStats m{};
    valid =
        valid && await_trailer<R>(call, &own.trailer[slot_idx][at.group], at.owner, at.token, m);
    __syncwarp();
    finish_vector<R>(a, at.token, at.v, valid, row, norm_weight, m);
}

// The pushers finish the rows that peers sum.
template <Reduction R> WEFT_FN void finish_parts(const Block& team, const Call<R>& call) {
    const u32 total = PeerVector<R>::total(call.a.tokens);
    for (u32 first = blockIdx.x * team.lanes() + team.warp() * warp_lanes; first < total;
         first += call.a.pushers * team.lanes()) {
        const u32 f = first + team.warp_lane();
        const PeerVector<R> at(call.me(), f);
        finish_part<R>(call, at, call.live && f < total && at.token < call.a.tokens);
    }
}

// A pending vector of a row that a peer sums: the first poll of its slot, and this rank's residual.
// Loads of several vectors are in flight together.
struct Pending {
    uint4* slot;
    uint4 sum, residual;
};

template <Reduction R> WEFT_FN Pending expect_sum(const Call<R>& call, const PeerVector<R>& at) {
    const ReduceArgs& a = call.a;
    auto& slots = call.at(call.me()).whole[slot_index(call.me(), at.owner)];
    uint4* slot = reinterpret_cast<uint4*>(slots[at.group]) + at.v;
    const uint4 residual =
        a.residual ? load_input(vector_of<R>(a.residual, at.token, at.v)) : uint4{};
    return {slot, poll_vector(slot), residual};
}

// Waits for a pending vector, and stores the sum and the sum plus residual; false when the wait has
// failed.
template <Reduction R>
WEFT_FN bool receive_sum(const Call<R>& call, const PeerVector<R>& at, Pending& vector,
                         uint4& row) {
    const ReduceArgs& a = call.a;
    if (!is_ready(vector.sum) &&
        !await_vector<R>(call, vector.slot, at.owner, at.token, at.v, vector.sum))
        return false;
    restore_sentinel(vector.slot);
    row = a.residual ? add_rounded<R>(vector.sum, vector.residual) : vector.sum;
    if (a.out != nullptr) store(vector_of<R>(a.out, at.token, at.v), vector.sum);
    if (a.residual_out != nullptr) store(vector_of<R>(a.residual_out, at.token, at.v), row);
    return true;
}

// The same with the epilogue at the receiver: each cluster loops over rows. The buffer alternates
// only for existing rows, because the last group may lack tokens. The code that repeats
// reduce_parts is not shared, because a common function changed the code that NVRTC 13.5 generates
// for reduce_parts (2026-11-23).
template <Reduction R, u32 pieces>
WEFT_FN void finish_rows(const Block& team, const Cluster& cluster, const Call<R>& call,
                         PartialBuffer<R>& buffer) {
    const ReduceArgs& a = call.a;
    const u32 neighbours = cluster.size(), rank = cluster.rank();
    u32 side = 0;
    const u32 rows = PeerVector<R>::total(a.tokens) / R.vectors();
    for (u32 i = blockIdx.x / neighbours; i < rows; i += a.pushers / neighbours) {
        PeerVector<R> at(call.me(), i * R.vectors());
        if (at.token >= a.tokens) continue;
        uint4 row[pieces];
        NormWeight norm_weight[pieces];
        bool valid[pieces];
        Pending vector[pieces];
#pragma unroll
        for (u32 p = 0; p < pieces; ++p) {
            at.v = (p * neighbours + rank) * team.lanes() + team.lane();
            valid[p] = call.live && at.v < R.vectors();
            norm_weight[p] = valid[p] ? load_norm_weight<R>(a, at.v) : NormWeight{};
            vector[p] = valid[p] ? expect_sum<R>(call, at) : Pending{};
        }
#pragma unroll
        for (u32 p = 0; p < pieces; ++p) {
            at.v = (p * neighbours + rank) * team.lanes() + team.lane();
            row[p] = uint4{};
            valid[p] = valid[p] && receive_sum<R>(call, at, vector[p], row[p]);
            if (a.weight == nullptr) continue;
            const u64 partial = partial_of<R>(a, row[p], norm_weight[p]);
            if (at.v / warp_lanes < R.partials())
                send_partial<R>(team, cluster, &buffer.partial[side][at.v / warp_lanes], partial);
        }
        if (a.weight == nullptr) continue;
        sync_cluster(cluster, neighbours);
        const RowStats m = gather_row_stats<R>(team, a, buffer.partial[side]);
#pragma unroll
        for (u32 p = 0; p < pieces; ++p)
            finish_vector<R>(a, at.token, (p * neighbours + rank) * team.lanes() + team.lane(),
                             valid[p], row[p], norm_weight[p], m);
        side ^= 1;
    }
}

template <Reduction R, bool moe, u32 pieces, bool polls_one>
WEFT_FN void twoshot(const ReduceArgs& a) {
    __shared__ PartialBuffer<R> buffer;
    const Block team;
    const Cluster cluster;
    griddep_wait();
    launch_dependents();
    if (cluster.size() != 1) cluster.arrive();
    Call<R> call(a);
    call.send_call_words(team);
    const bool pushes = blockIdx.x < a.pushers;
    if (pushes) push_parts<R, moe>(team, call);
    const u32 before = call.arrive(team);
    if constexpr (R.epilogue_at == EpilogueAt::owner)
        if (pushes) finish_parts<R>(team, call);
    if (cluster.size() != 1) cluster.wait();
    if (!pushes) reduce_parts<R, moe, pieces, polls_one>(team, cluster, call, buffer);
    if constexpr (R.epilogue_at == EpilogueAt::receiver)
        if (pushes) finish_rows<R, pieces>(team, cluster, call, buffer);
    call.advance(team, before);
    call.check_call_word(team, call.load_call_word(team));
}

}  // namespace weft
