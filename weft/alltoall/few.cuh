// Dispatch and combine on a budget of SMs: the same protocol and slots, moved by the bulk engine.
// Used when the caller grants few SMs (`num_sms`); see bulk.cuh for what that costs and saves.
#pragma once
#include <weft/alltoall/combine.cuh>
#include <weft/alltoall/dispatch.cuh>
#include <weft/device/bulk.cuh>

namespace weft {

constexpr u32 adders = 256;  // threads that sum, before one warp that loads
constexpr u32 most_stages = 16;
constexpr u32 stage_vectors = 1792;  // 28 KiB of a piece, from all ranks together

// As many stages as shared memory holds, up to 16. Against 8 that gains 4 % of dispatch on 16 SMs
// and nothing on 8 (4 x H200, 2048 tokens, 2026-11-21).
constexpr u32 stages_of(u32 bytes) {
    return bulk_shared_bytes / bytes < most_stages ? bulk_shared_bytes / bytes : most_stages;
}

// Rows in flight through shared memory: `ahead` arrive, `leaving` leave, one is between.
template <Shape S> struct RowRing {
    static constexpr u32 row_bytes = S.pitch(0);
    static constexpr u32 stages = stages_of(row_bytes);
    static_assert(stages >= 3, "one row arrives, one leaves, one is between");
    static constexpr u32 leaving = stages >= 8 ? 3 : 1, ahead = stages - leaving - 1;
    static_assert(S.way == Way::pull && S.quant == Quant::none, "rows move as they are");
    alignas(128) u8 row[stages][row_bytes];
    Mbarrier loaded[stages];
};

// Rows of all peers for one piece of one token, and the ring that fits. A piece costs waits and
// issues as well as bytes, so it is wider where fewer ranks have a part in it.
template <Shape S> struct PieceRing {
    static constexpr u32 vectors = S.out_bytes() / 16;
    static constexpr u32 widest =
        stage_vectors / S.ranks > adders ? stage_vectors / S.ranks : adders;
    static constexpr u32 pieces = (vectors + widest - 1) / widest;
    static constexpr u32 piece_vectors = (vectors + pieces - 1) / pieces;
    static constexpr u32 turns = (piece_vectors + adders - 1) / adders;  // vectors of one adder
    static constexpr u32 stage_bytes = S.ranks * piece_vectors * 16;
    static constexpr u32 stages = stages_of(stage_bytes);
    static_assert(stages >= 2 && S.ranks <= warp_lanes / 2,
                  "a lane for each peer, room to run ahead");
    alignas(128) uint4 piece[stages][S.ranks][piece_vectors];
    Mbarrier loaded[stages], free[stages];
    u32 destinations[stages];
};

// A piece's place: vectors first .. first + count - 1 of a token's row.
template <Shape S> struct Unit {
    u32 token, first, count;

    WEFT_FN explicit Unit(u32 index)
        : token(index / PieceRing<S>::pieces),
          first(index % PieceRing<S>::pieces * PieceRing<S>::piece_vectors),
          count(min(PieceRing<S>::piece_vectors, PieceRing<S>::vectors - first)) {}
};

template <Shape S>
WEFT_FN void load_row(RowRing<S>& ring, const DispatchArgs& a, u32 turn, u32 token) {
    constexpr u32 bytes = S.row_bytes[0];
    Mbarrier& loaded = ring.loaded[turn % RowRing<S>::stages];
    loaded.arrive_expect_tx(bytes);
    bulk_load(ring.row[turn % RowRing<S>::stages],
              static_cast<const u8*>(a.payload[0]) + u64(token) * bytes, bytes, loaded);
}

template <Shape S>
WEFT_FN void store_row(RowRing<S>& ring, const Site& site, u32 turn, u32 token, u32 destinations) {
    constexpr u32 bytes = S.row_bytes[0];
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = site.rank + i < S.ranks ? site.rank + i : site.rank + i - S.ranks;
        if (destinations >> peer & 1)
            bulk_store(slot_in<S, 0, u8>(site, peer, token), ring.row[turn % RowRing<S>::stages],
                       bytes);
    }
    bulk_commit();
}

// One warp a CTA: lane 0 keeps loads running ahead and stores running behind, all lanes route. The
// ids of the next token are on their way meanwhile.
template <Shape S>
WEFT_FN bool send_tokens_in_bulk(const Block& team, const DispatchArgs& a, const Turn& turn,
                                 u32 count, RowRing<S>& ring) {
    constexpr u32 stages = RowRing<S>::stages, ahead = RowRing<S>::ahead;
    const u32 lane = team.warp_lane(), stride = gridDim.x;
    if (lane == 0) {
        for (u32 i = 0; i < stages; ++i) ring.loaded[i].init(1);
        fence_for_bulk();
        for (u32 i = 0; i < ahead && blockIdx.x + i * stride < count; ++i)
            load_row<S>(ring, a, i, blockIdx.x + i * stride);
    }
    Parcel<S> next{};
    if (blockIdx.x < count) next = load_ids<S>(a, blockIdx.x, lane);
    u32 i = 0;
    for (u32 token = blockIdx.x; token < count; token += stride, ++i) {
        const Parcel<S> parcel = next;
        if (token + stride < count) next = load_ids<S>(a, token + stride, lane);
        const Routing r = route_token<S>(a, parcel, token, lane, true);
        if (lane == 0) {
            ring.loaded[i % stages].wait(i / stages & 1);
            store_row<S>(ring, a.site, i, token, r.destinations);
            bulk_wait_read<RowRing<S>::leaving>();
            if (token + ahead * stride < count)
                load_row<S>(ring, a, i + ahead, token + ahead * stride);
        }
        push_planes<S, 1>(a, token, lane, warp_lanes, r.destinations);
        send_route<S>(a, token, lane, r);
    }
    if (lane == 0) bulk_wait_written();
    clear_rows<S>(team, a, count, turn.rows);
    send_stats<S>(team, a);
    return team.last_of(&mine<S>(a.site).header.arrived);
}

// The loading warp: lane p pulls peer p's part of each piece, one stage after the other, and runs
// ahead of the adders as far as the ring allows.
template <Shape S, u32 rank>
WEFT_FN void load_pieces(PieceRing<S>& ring, const CombineArgs& a, u32 lane) {
    using Ring = PieceRing<S>;
    const Share<S>& own = mine<S>(a.site);
    const u32 units = a.tokens * Ring::pieces, stride = gridDim.x;
    u32 next = blockIdx.x < units ? own.destinations[blockIdx.x / Ring::pieces] : 0, turn = 0;
    fence_for_bulk();  // behind the peers' flags
    for (u32 index = blockIdx.x; index < units; index += stride, ++turn) {
        const u32 stage = turn % Ring::stages, destinations = next;
        const Unit<S> unit(index);
        if (index + stride < units) next = own.destinations[(index + stride) / Ring::pieces];
        if (turn >= Ring::stages) {
            ring.free[stage].wait((turn / Ring::stages - 1) & 1);
            fence_shared_for_bulk();  // behind the adders' reads of this stage
        }
        if (lane == 0) {
            ring.destinations[stage] = destinations;
            ring.loaded[stage].arrive_expect_tx(__popc(destinations) * unit.count * 16);
        }
        __syncwarp();
        const Rows rows = rows_of<S, rank>(a, unit.token);
        if (lane < S.ranks && (destinations >> lane & 1))
            bulk_load(ring.piece[stage][lane],
                      reinterpret_cast<const uint4*>(rows.first + lane * rows.step) + unit.first,
                      unit.count * 16, ring.loaded[stage]);
    }
}

// One adder's vectors of a piece, and of what is added to the sums.
template <Shape S> struct Addends {
    using Ring = PieceRing<S>;
    uint4 extra[Ring::turns], row[Ring::turns][S.ranks];

    // The caller's own rows: asked for before the peers' have come.
    WEFT_FN void load_extra(const CombineArgs& a, const Unit<S>& unit, u32 lane) {
        if (a.add == nullptr) return;
        const uint4* add =
            static_cast<const uint4*>(a.add) + u64(unit.token) * Ring::vectors + unit.first;
#pragma unroll
        for (u32 i = 0; i < Ring::turns; ++i)
            if (i * adders + lane < unit.count) extra[i] = load_input(add + i * adders + lane);
    }

    // All of them before the first is added: one round trip to shared memory for a piece.
    WEFT_FN void load_rows(const Ring& ring, u32 stage, u32 count, u32 lane) {
        const u32 destinations = ring.destinations[stage];
#pragma unroll
        for (u32 i = 0; i < Ring::turns; ++i)
#pragma unroll
            for (u32 peer = 0; peer < S.ranks; ++peer) {
                row[i][peer] = make_uint4(0, 0, 0, 0);
                if ((destinations >> peer & 1) && i * adders + lane < count)
                    row[i][peer] = ring.piece[stage][peer][i * adders + lane];
            }
    }

    // Zeros of ranks without a part change no bit: a sum that begins at +0 is never -0.
    WEFT_FN void store_sums(const CombineArgs& a, const Unit<S>& unit, u32 lane) const {
        uint4* out = static_cast<uint4*>(a.out) + u64(unit.token) * Ring::vectors + unit.first;
#pragma unroll
        for (u32 i = 0; i < Ring::turns; ++i) {
            float sum[numbers_in_vector(S.number)] = {};
#pragma unroll
            for (u32 peer = 0; peer < S.ranks; ++peer) add_vector<S.number>(sum, row[i][peer]);
            if (a.add) add_vector<S.number>(sum, extra[i]);
            if (i * adders + lane < unit.count)
                out[i * adders + lane] = round_vector<S.number>(sum);
        }
    }
};

// The adding warps: a stage is free again when each of them has read it.
template <Shape S> WEFT_FN void add_pieces(PieceRing<S>& ring, const CombineArgs& a, u32 lane) {
    using Ring = PieceRing<S>;
    u32 turn = 0;
    for (u32 index = blockIdx.x; index < a.tokens * Ring::pieces; index += gridDim.x, ++turn) {
        const u32 stage = turn % Ring::stages;
        const Unit<S> unit(index);
        Addends<S> addends;
        addends.load_extra(a, unit, lane);
        ring.loaded[stage].wait(turn / Ring::stages & 1);
        addends.load_rows(ring, stage, unit.count, lane);
        __syncwarp();
        if (lane % warp_lanes == 0) ring.free[stage].arrive();
        addends.store_sums(a, unit, lane);
    }
}

template <Shape S, u32 rank>
WEFT_FN bool receive_rows_in_bulk(const Block& team, const CombineArgs& a, const Turn& turn,
                                  PieceRing<S>& ring) {
    if (team.lane() == 0)
        for (u32 i = 0; i < PieceRing<S>::stages; ++i) {
            ring.loaded[i].init(1);
            ring.free[i].init(adders / warp_lanes);
        }
    if (!await_all<S>(team, a.site, Phase::combine, turn.epoch)) return false;
    if (team.lane() >= adders)
        load_pieces<S, rank>(ring, a, team.warp_lane());
    else
        add_pieces<S>(ring, a, team.lane());
    return true;
}

template <Shape S> WEFT_FN void dispatch_on_few(const DispatchArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    RowRing<S>& ring = *reinterpret_cast<RowRing<S>*>(shared);
    const Block team;
    Header& header = mine<S>(a.site).header;
    wait_for_predecessor();
    admit_successor();
    const Turn turn = header.turn;
    if (turn.failed != 0) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0, wanted = (turn.epoch + 1) & epoch_mask;
    mark_start(team, header, Phase::dispatch, wanted, start);
    const u32 count = token_count<S>(a, team.first() && team.lane() == 0);
    if (!send_tokens_in_bulk<S>(team, a, turn, count, ring)) return;
    publish<S>(team, a.site, Phase::dispatch, wanted, count);
    if (!await_all<S>(team, a.site, Phase::dispatch, wanted) || team.lane() != 0) return;
    header.turn = {wanted, 0, count};
    keep_record(header, Phase::dispatch, wanted, start, count);
    mark_end(header, Phase::dispatch, wanted);
}

template <Shape S, u32 rank> WEFT_FN void combine_on_few(const CombineArgs& a) {
    extern __shared__ __align__(128) u8 shared[];
    PieceRing<S>& ring = *reinterpret_cast<PieceRing<S>*>(shared);
    const Block team;
    Header& header = mine<S>(a.site).header;
    wait_for_predecessor();
    admit_successor();
    const Turn turn = header.turn;
    // All warps or none: they wait for each other below.
    if (__syncthreads_or(turn.failed != 0)) return;
    const u64 start = team.lane() == 0 ? now_ns() : 0;
    mark_start(team, header, Phase::combine, turn.epoch, start);
    if (team.first()) publish<S>(team, a.site, Phase::combine, turn.epoch, 0);
    const bool received = receive_rows_in_bulk<S, rank>(team, a, turn, ring);
    if (received && team.lane() == 0) mark_end(header, Phase::combine, turn.epoch);
    if (received && team.first() && team.lane() == 0)
        keep_record(header, Phase::combine, turn.epoch, start, a.tokens);
}

}  // namespace weft
