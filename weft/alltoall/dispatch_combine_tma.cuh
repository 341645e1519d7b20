// Dispatch and combine by TMA: the same protocol and slots, but the bulk copy engine moves the
// rows, so that few SMs suffice. Used when the caller grants few SMs (`num_sms`); bulk.cuh says
// what that costs and saves.
//
// Roles:
// dispatch  every CTA is one warp: lane 0 moves rows through a ring in shared memory, all lanes
//           route. The last CTA publishes the flags and waits for the peers' flags.
// combine   every CTA has eight warps that reduce and then one warp that loads: lane p of it pulls
//           peer p's rows into the ring. The first CTA publishes the flags first.
#pragma once
#include <weft/alltoall/combine.cuh>
#include <weft/alltoall/dispatch.cuh>
#include <weft/device/bulk.cuh>

namespace weft {

constexpr u32 reducer_threads = 256;  // before the one warp that loads
constexpr u32 max_stages = 16;
constexpr u32 stage_vectors = 1792;  // 28 KiB: a piece of a row, of all ranks together

// As many stages as shared memory holds, up to 16. Compared with 8 that gains 4 % of dispatch on 16
// SMs and nothing on 8 (4 x H200, 2048 tokens, 2026-11-21).
constexpr u32 stages_of(u32 bytes) {
    return bulk_shared_bytes / bytes < max_stages ? bulk_shared_bytes / bytes : max_stages;
}

// Rows in flight through shared memory: `ahead` are being loaded, `leaving` are being stored, and
// one is between.
template <Shape S> struct RowRing {
    static constexpr u32 row_bytes = S.pitch(0);
    static constexpr u32 stages = stages_of(row_bytes);
    static_assert(stages >= 3, "one row arrives, one leaves, one is between");
    static constexpr u32 leaving = stages >= 8 ? 3 : 1, ahead = stages - leaving - 1;
    static_assert(S.combine == Combine::pull && S.quant == Quant::none, "rows move as they are");
    alignas(128) u8 row[stages][row_bytes];
    Mbarrier loaded[stages];
};

// Rows of all peers for one piece of one token, and the ring that fits. A piece costs waits and
// issues as well as bytes, so it is wider where fewer ranks contribute.
template <Shape S> struct PieceRing {
    static constexpr u32 vectors = S.out_bytes() / 16;
    static constexpr u32 widest =
        stage_vectors / S.ranks > reducer_threads ? stage_vectors / S.ranks : reducer_threads;
    static constexpr u32 pieces = (vectors + widest - 1) / widest;
    static constexpr u32 piece_vectors = (vectors + pieces - 1) / pieces;
    static constexpr u32 vectors_each =
        (piece_vectors + reducer_threads - 1) / reducer_threads;  // of one reducing thread
    static constexpr u32 stage_bytes = S.ranks * piece_vectors * 16;
    static constexpr u32 stages = stages_of(stage_bytes);
    static_assert(stages >= 2 && S.ranks <= warp_lanes / 2,
                  "a lane for each peer, room to run ahead");
    alignas(128) uint4 piece[stages][S.ranks][piece_vectors];
    Mbarrier loaded[stages], free[stages];
    u32 destinations[stages];
};

// The piece with this index: vectors first .. first + count - 1 of a token's row.
template <Shape S> struct Unit {
    u32 token, first, count;

    WEFT_FN explicit Unit(u32 index)
        : token(index / PieceRing<S>::pieces),
          first(index % PieceRing<S>::pieces * PieceRing<S>::piece_vectors),
          count(min(PieceRing<S>::piece_vectors, PieceRing<S>::vectors - first)) {}
};

template <Shape S>
WEFT_FN void load_row(RowRing<S>& ring, const DispatchArgs& a, u32 iteration, u32 token) {
    constexpr u32 bytes = S.row_bytes[0];
    Mbarrier& loaded = ring.loaded[iteration % RowRing<S>::stages];
    loaded.arrive_expect_tx(bytes);
    bulk_load(ring.row[iteration % RowRing<S>::stages],
              static_cast<const u8*>(a.payload[0]) + u64(token) * bytes, bytes, loaded);
}

template <Shape S>
WEFT_FN void store_row(RowRing<S>& ring, const DispatchArgs& a, u32 iteration, u32 token,
                       u32 destinations) {
    constexpr u32 bytes = S.row_bytes[0];
    const u32 rank = a.site.rank;
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = rank + i < S.ranks ? rank + i : rank + i - S.ranks;
        if (destinations >> peer & 1)
            bulk_store(inbox_row<S, 0, u8>(a, peer, token),
                       ring.row[iteration % RowRing<S>::stages], bytes);
    }
    bulk_commit();
}

// One warp per CTA: lane 0 keeps loads running ahead and stores running behind, all lanes route.
// The ids of the next token are loaded meanwhile.
template <Shape S>
WEFT_FN bool send_tokens_tma(const Block& team, const DispatchArgs& a, u32 count, u32 stale,
                             RowRing<S>& ring) {
    constexpr u32 stages = RowRing<S>::stages, ahead = RowRing<S>::ahead;
    const u32 lane = team.warp_lane(), stride = gridDim.x;
    if (lane == 0) {
        for (u32 i = 0; i < stages; ++i) ring.loaded[i].init(1);
        fence_for_bulk();
        for (u32 i = 0; i < ahead && blockIdx.x + i * stride < count; ++i)
            load_row<S>(ring, a, i, blockIdx.x + i * stride);
    }
    TokenFragment<S> next{};
    if (blockIdx.x < count) next = load_ids<S>(a, blockIdx.x, lane);
    u32 i = 0;
    for (u32 token = blockIdx.x; token < count; token += stride, ++i) {
        const TokenFragment<S> fragment = next;
        if (token + stride < count) next = load_ids<S>(a, token + stride, lane);
        const Routing r = route_token<S>(a, fragment, token, lane, true);
        if (lane == 0) {
            ring.loaded[i % stages].wait(i / stages & 1);
            store_row<S>(ring, a, i, token, r.destinations);
            bulk_wait_read<RowRing<S>::leaving>();
            if (token + ahead * stride < count)
                load_row<S>(ring, a, i + ahead, token + ahead * stride);
        }
        push_planes<S, 1>(a, token, lane, warp_lanes, r.destinations);
        send_route<S>(a, token, lane, r);
    }
    if (lane == 0) bulk_wait_written();
    clear_rows<S>(team, a, count, stale);
    send_stats<S>(team, a);
    return team.is_last_cta(&own_share<S>(a.site).header.arrived);
}

// The loading warp: lane p pulls peer p's part of each piece, one stage after the other, and runs
// ahead of the reducing warps as far as the ring allows.
template <Shape S, u32 rank>
WEFT_FN void load_pieces(PieceRing<S>& ring, const CombineArgs& a, u32 lane) {
    using Ring = PieceRing<S>;
    const Share<S>& own = own_share<S>(a.site);
    const u32 units = a.tokens * Ring::pieces, stride = gridDim.x;
    u32 next = blockIdx.x < units ? own.destinations[blockIdx.x / Ring::pieces] : 0, iteration = 0;
    fence_for_bulk();  // behind the peers' flags
    for (u32 index = blockIdx.x; index < units; index += stride, ++iteration) {
        const u32 stage = iteration % Ring::stages, destinations = next;
        const Unit<S> unit(index);
        if (index + stride < units) next = own.destinations[(index + stride) / Ring::pieces];
        if (iteration >= Ring::stages) {
            ring.free[stage].wait((iteration / Ring::stages - 1) & 1);
            fence_shared_for_bulk();  // behind the reducing warps' reads of this stage
        }
        if (lane == 0) {
            ring.destinations[stage] = destinations;
            ring.loaded[stage].arrive_expect_tx(__popc(destinations) * unit.count * 16);
        }
        __syncwarp();
        const RowPointers rows = rows_of<S, rank>(a, unit.token);
        if (lane < S.ranks && (destinations >> lane & 1))
            bulk_load(ring.piece[stage][lane],
                      reinterpret_cast<const uint4*>(rows.first + lane * rows.step) + unit.first,
                      unit.count * 16, ring.loaded[stage]);
    }
}

// One reducing thread's vectors of a piece, and of `add`.
template <Shape S> struct ReducerFragment {
    using Ring = PieceRing<S>;
    uint4 extra[Ring::vectors_each], row[Ring::vectors_each][S.ranks];

    // The caller's own rows, loaded before the peers' have come.
    WEFT_FN void load_extra(const CombineArgs& a, const Unit<S>& unit, u32 lane) {
        if (a.add == nullptr) return;
        const uint4* add =
            static_cast<const uint4*>(a.add) + u64(unit.token) * Ring::vectors + unit.first;
#pragma unroll
        for (u32 i = 0; i < Ring::vectors_each; ++i)
            if (i * reducer_threads + lane < unit.count)
                extra[i] = load_input(add + i * reducer_threads + lane);
    }

    // Loads all rows before the first is added: one round trip to shared memory per piece.
    WEFT_FN void load_rows(const Ring& ring, u32 stage, u32 count, u32 lane) {
        const u32 destinations = ring.destinations[stage];
#pragma unroll
        for (u32 i = 0; i < Ring::vectors_each; ++i)
#pragma unroll
            for (u32 peer = 0; peer < S.ranks; ++peer) {
                row[i][peer] = make_uint4(0, 0, 0, 0);
                if ((destinations >> peer & 1) && i * reducer_threads + lane < count)
                    row[i][peer] = ring.piece[stage][peer][i * reducer_threads + lane];
            }
    }

    // The zeros of ranks without a row change no bit: a sum that begins at +0 is never -0.
    WEFT_FN void store_sums(const CombineArgs& a, const Unit<S>& unit, u32 lane) const {
        uint4* out = static_cast<uint4*>(a.out) + u64(unit.token) * Ring::vectors + unit.first;
#pragma unroll
        for (u32 i = 0; i < Ring::vectors_each; ++i) {
            float sum[elements_in_vector(S.dtype)] = {};
#pragma unroll
            for (u32 peer = 0; peer < S.ranks; ++peer) add_vector<S.dtype>(sum, row[i][peer]);
            if (a.add) add_vector<S.dtype>(sum, extra[i]);
            if (i * reducer_threads + lane < unit.count)
                out[i * reducer_threads + lane] = round_vector<S.dtype>(sum);
        }
    }
};

// The reducing warps: a stage is free again when each of them has read it.
template <Shape S> WEFT_FN void add_pieces(PieceRing<S>& ring, const CombineArgs& a, u32 lane) {
    using Ring = PieceRing<S>;
    u32 iteration = 0;
    for (u32 index = blockIdx.x; index < a.tokens * Ring::pieces; index += gridDim.x, ++iteration) {
        const u32 stage = iteration % Ring::stages;
        const Unit<S> unit(index);
        ReducerFragment<S> fragment;
        fragment.load_extra(a, unit, lane);
        ring.loaded[stage].wait(iteration / Ring::stages & 1);
        fragment.load_rows(ring, stage, unit.count, lane);
        __syncwarp();
        if (lane % warp_lanes == 0) ring.free[stage].arrive();
        fragment.store_sums(a, unit, lane);
    }
}

template <Shape S, u32 rank>
WEFT_FN bool receive_rows_tma(const Block& team, const CombineArgs& a, const EpochState& state,
                              PieceRing<S>& ring) {
    if (team.lane() == 0)
        for (u32 i = 0; i < PieceRing<S>::stages; ++i) {
            ring.loaded[i].init(1);
            ring.free[i].init(reducer_threads / warp_lanes);
        }
    if (!await_all<S>(team, a.site, Phase::combine, state.epoch)) return false;
    if (team.lane() >= reducer_threads)
        load_pieces<S, rank>(ring, a, team.warp_lane());
    else
        add_pieces<S>(ring, a, team.lane());
    return true;
}

template <Shape S> WEFT_FN void dispatch_tma(const DispatchArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    RowRing<S>& ring = *reinterpret_cast<RowRing<S>*>(shared);
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    const bool slot_stride_changed = header.source_rows != a.source_rows;  // loaded with the state
    if (state.failed != 0) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0, wanted = (state.epoch + 1) & epoch_mask;
    mark_start(team, header, Phase::dispatch, wanted, start);
    const u32 count = token_count<S>(a, team.first() && team.lane() == 0);
    if (!send_tokens_tma<S>(team, a, count, slot_stride_changed ? a.source_rows : state.rows, ring))
        return;
    publish<S>(team, a.site, Phase::dispatch, wanted, count,
               slot_stride_changed ? a.source_rows : 0);
    if (team.lane() == 0) header.source_rows = a.source_rows;
    if (!await_tokens<S>(team, a, wanted) || team.lane() != 0) return;
    header.state = {wanted, 0, count};
    keep_record(header, Phase::dispatch, wanted, start, count);
    mark_end(header, Phase::dispatch, wanted);
}

template <Shape S, u32 rank> WEFT_FN void combine_tma(const CombineArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    PieceRing<S>& ring = *reinterpret_cast<PieceRing<S>*>(shared);
    const Block team;
    Header& header = own_share<S>(a.site).header;
    griddep_wait();
    launch_dependents();
    const EpochState state = header.state;
    // All warps return, or none: they wait for each other below.
    if (__syncthreads_or(state.failed != 0)) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0;
    mark_start(team, header, Phase::combine, state.epoch, start);
    if (team.first()) publish<S>(team, a.site, Phase::combine, state.epoch, 0);
    const bool received = receive_rows_tma<S, rank>(team, a, state, ring);
    if (received && team.lane() == 0) mark_end(header, Phase::combine, state.epoch);
    if (received && team.first() && team.lane() == 0)
        keep_record(header, Phase::combine, state.epoch, start, a.tokens);
}

}  // namespace weft
