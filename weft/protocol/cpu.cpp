// The CPU backend: the same protocol with a team of one thread, memcpy for the data mover, and
// plain C++ numbers. A generated entry includes this file and opens it through extern "C" doors.
#include <cmath>
#include <cstring>

#include <weft/protocol/exports.cuh>
#include <weft/protocol/phases.cuh>

namespace weft {

struct Solo {
    u32 lane() const { return 0; }
    u32 lanes() const { return 1; }
    bool all(bool mine) const { return mine; }
};

inline float read_number(Number number, const u8* row, u32 i) {
    if (number == Number::bf16) {
        u16 bits;
        std::memcpy(&bits, row + 2 * i, 2);
        const u32 wide = u32(bits) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        return value;
    }
    if (number == Number::fp16) {
        _Float16 value;
        std::memcpy(&value, row + 2 * i, 2);
        return float(value);
    }
    float value;
    std::memcpy(&value, row + 4 * i, 4);
    return value;
}

// Rounds to nearest even, as the GPU's cvt.rn does; every NaN becomes the quiet NaN that the GPU
// writes.
inline void write_number(Number number, u8* row, u32 i, float value) {
    if (number == Number::bf16) {
        u32 wide;
        std::memcpy(&wide, &value, 4);
        const u16 bits =
            std::isnan(value) ? u16(0x7fff) : u16((wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
        std::memcpy(row + 2 * i, &bits, 2);
    } else if (number == Number::fp16) {
        const _Float16 half = _Float16(value);
        std::memcpy(row + 2 * i, &half, 2);
    } else {
        std::memcpy(row + 4 * i, &value, 4);
    }
}

template <Shape S, u32 P = 0> void copy_planes(const DispatchArgs& a, Inbox<S>& to, u32 token) {
    if constexpr (P < S.planes) {
        const u8* from = static_cast<const u8*>(a.payload[P]) + u64(token) * S.row_bytes[P];
        std::memcpy(plane<P>(to.payload).row[a.site.rank][token], from, S.row_bytes[P]);
        copy_planes<S, P + 1>(a, to, token);
    }
}

// One token to every rank that owns one of its experts; its route to every rank. Returns those
// ranks as bits.
template <Shape S> u32 send_token(const DispatchArgs& a, u32 token) {
    Share<S>& own = mine<S>(a.site);
    u32 destinations = 0;
    Place places[S.top_k];
    i32 ids[S.top_k];
    for (u32 k = 0; k < S.top_k; ++k) {
        ids[k] = expert_id<S>(a, token, k, true);
        if (ids[k] < 0) continue;
        for (u32 j = 0; j < k; ++j)
            if (ids[j] == ids[k]) refuse_duplicate(own.header, a.site, token, k, ids[k]);
        places[k] = place_of<S>(a, u32(ids[k]));
        destinations |= 1u << places[k].rank;
    }
    for (u32 peer = 0; peer < S.ranks; ++peer) {
        Inbox<S>& to = share<S>(a.site, peer).inbox;
        Route<S>& route = to.route[a.site.rank][token];
        for (u32 k = 0; k < S.top_k; ++k) {
            const bool here = ids[k] >= 0 && places[k].rank == peer;
            route.expert[k] = here ? i32(places[k].local) : -1;
            route.weight[k] = !here ? 0.0f : a.weights ? a.weights[u64(token) * S.top_k + k] : 1.0f;
        }
        if (destinations >> peer & 1) copy_planes<S>(a, to, token);
    }
    return destinations;
}

template <Shape S> void clear_rows(const DispatchArgs& a, u32 from, u32 until) {
    for (u32 peer = 0; peer < S.ranks; ++peer)
        for (u32 token = from; token < until; ++token)
            for (u32 k = 0; k < S.top_k; ++k)
                share<S>(a.site, peer).inbox.route[a.site.rank][token].expert[k] = -1;
}

template <Shape S> void dispatch(const DispatchArgs& a) {
    Share<S>& own = mine<S>(a.site);
    const Turn turn = own.header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns(), wanted = (turn.epoch + 1) & epoch_mask;
    if (fault(own.header, Point::dispatch_enter, a.site.rank, wanted) == Action::stay_away) return;
    const u32 count = token_count<S>(a, true);
    for (u32 token = 0; token < a.tokens; ++token)
        own.destinations[token] = token < count ? send_token<S>(a, token) : 0;
    clear_rows<S>(a, count, turn.rows);
    fault(own.header, Point::after_payload, a.site.rank, wanted);
    publish<S>(Solo{}, a.site, Phase::dispatch, wanted, count);
    if (!await_all<S>(Solo{}, a.site, Phase::dispatch, wanted)) return;
    own.header.turn = {wanted, 0, count};
    keep_record(own.header, Phase::dispatch, wanted, start, count);
}

// out[token] = the sum of its ranks' rows in rank order, in fp32, then `add`, rounded once.
template <Shape S> void reduce_token(const CombineArgs& a, u32 token) {
    const u32 destinations = mine<S>(a.site).destinations[token];
    u8* out = static_cast<u8*>(a.out) + u64(token) * S.out_bytes();
    const u8* add = a.add ? static_cast<const u8*>(a.add) + u64(token) * S.out_bytes() : nullptr;
    for (u32 i = 0; i < S.hidden; ++i) {
        float sum = 0.0f;
        for (u32 peer = 0; peer < S.ranks; ++peer)
            if (destinations >> peer & 1)
                sum +=
                    read_number(S.number, share<S>(a.site, peer).outbox.row[a.site.rank][token], i);
        if (add) sum += read_number(S.number, add, i);
        write_number(S.number, out, i, sum);
    }
}

template <Shape S> void combine(const CombineArgs& a) {
    Share<S>& own = mine<S>(a.site);
    const Turn turn = own.header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns();
    if (fault(own.header, Point::combine_enter, a.site.rank, turn.epoch) == Action::stay_away)
        return;
    publish<S>(Solo{}, a.site, Phase::combine, turn.epoch, 0);
    if (!await_all<S>(Solo{}, a.site, Phase::combine, turn.epoch)) return;
    for (u32 token = 0; token < a.tokens; ++token) reduce_token<S>(a, token);
    keep_record(own.header, Phase::combine, turn.epoch, start, a.tokens);
}

}  // namespace weft
