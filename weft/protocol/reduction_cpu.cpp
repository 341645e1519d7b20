// The fused all-reduce on a CPU: the protocol of the kernels with a team of one thread. A generated
// entry includes this file behind cpu.cpp, whose numbers it uses.
#include <vector>

#include <weft/protocol/reduction.cuh>
#include <weft/protocol/rmsnorm.cuh>

namespace weft {

// One call of one rank: its epoch, and whether it has been given up.
template <Reduction R> struct Calling {
    const ReduceArgs& a;
    u64 epoch;
    bool broken = false;

    Summands<R>& at(u32 rank) const { return share<R>(a.site, rank).slots; }
    u32 parity() const { return u32(epoch & 1); }
    u32 tokens_owned() const {
        return a.tokens > a.site.rank ? (a.tokens - a.site.rank - 1) / R.ranks + 1 : 0;
    }
};

// Two words, with each that is the sentinel replaced by another NaN.
template <Number N> u64 canonical(u64 words) {
    constexpr u32 other = N == Number::fp32 ? 0x7fffffffu : 0x7fff7fffu;
    const u32 low = u32(words) == sentinel ? other : u32(words);
    const u32 high = u32(words >> 32) == sentinel ? other : u32(words >> 32);
    return u64(high) << 32 | low;
}

template <Reduction R> void push_row(u8* slot, const u8* row) {
    for (u32 at = 0; at < R.row_bytes(); at += 8) {
        u64 words;
        std::memcpy(&words, row + at, 8);
        store_release(reinterpret_cast<u64*>(slot + at), canonical<R.number>(words));
    }
}

// Waits for the row of a slot, takes it and leaves sentinels; false when they did not come.
template <Reduction R>
bool take(Calling<R>& call, u8* slot, u8* to, Slot kind, u32 peer, u32 token) {
    for (u32 at = 0; at < R.row_bytes(); at += 8) {
        u64* word = reinterpret_cast<u64*>(slot + at);
        Wait wait{.slot = kind, .peer = peer, .token = token, .vector = at / 16};
        u64 seen = load_acquire(word);
        for (u32 turns = 1; !is_there(seen); ++turns) {
            call.broken = turns % 1024 == 0 &&
                          gives_up<R>(call.a.site, call.epoch, call.a.signature, wait);
            if (call.broken) return false;
            relax(turns);
            seen = load_acquire(word);
        }
        std::memcpy(to + at, &seen, 8);
        store_release(word, sentinels);
    }
    return true;
}

template <Number N> float factor(const void* from, u64 at, bool is_fp32) {
    return is_fp32 ? static_cast<const float*>(from)[at]
                   : widen<N>(static_cast<const Bits<N>*>(from)[at]);
}

// This rank's row of a token: as it is, or the weighted sum of experts' rows.
template <Reduction R> void load_row(const ReduceArgs& a, u32 token, u8* to) {
    using Element = Bits<R.number>;
    const u64 first = u64(token) * R.hidden;
    if (a.x != nullptr) {
        std::memcpy(to, static_cast<const Element*>(a.x) + first, R.row_bytes());
        return;
    }
    std::vector<float> sum(R.hidden, 0.0f);
    for (u32 k = 0; k < a.top_k; ++k) {
        const u64 entry = u64(token) * a.top_k + k;
        const u32 row = source_row<R>(a, a.index[entry], token, k, true);
        if (row == a.row_limit) continue;
        const float scale = a.scales ? factor<R.number>(a.scales, entry, a.scales_are_fp32) : 1.0f;
        const Element* from = static_cast<const Element*>(a.rows) + u64(row) * R.hidden;
        for (u32 i = 0; i < R.hidden; ++i) sum[i] = sum[i] + widen<R.number>(from[i]) * scale;
    }
    const Element* shared = static_cast<const Element*>(a.shared) + first;
    Element* row = reinterpret_cast<Element*>(to);
    for (u32 i = 0; i < R.hidden; ++i)
        row[i] = narrow<R.number>(a.shared ? sum[i] + widen<R.number>(shared[i]) : sum[i]);
}

// One row on its way through the call.
template <Reduction R> struct Row {
    std::vector<u8> bytes = std::vector<u8>(R.row_bytes());
    u8* data() { return bytes.data(); }
    Bits<R.number>* numbers() { return reinterpret_cast<Bits<R.number>*>(bytes.data()); }
    float operator[](u32 i) const {
        return widen<R.number>(reinterpret_cast<const Bits<R.number>*>(bytes.data())[i]);
    }
};

// The sum of all ranks' rows in rank order, in fp32, rounded once.
template <Reduction R> void sum_rows(const std::vector<Row<R>>& rows, Row<R>& to) {
    for (u32 i = 0; i < R.hidden; ++i) {
        float sum = rows[0][i];
        for (u32 rank = 1; rank < R.ranks; ++rank) sum = sum + rows[rank][i];
        to.numbers()[i] = narrow<R.number>(sum);
    }
}

template <Reduction R> void add_residual(const ReduceArgs& a, u32 token, Row<R>& row) {
    if (a.residual == nullptr) return;
    const auto* from = static_cast<const Bits<R.number>*>(a.residual) + u64(token) * R.hidden;
    for (u32 i = 0; i < R.hidden; ++i)
        row.numbers()[i] = narrow<R.number>(row[i] + widen<R.number>(from[i]));
}

inline float butterfly(float (&lane)[32]) {
    for (u32 step = 16; step != 0; step /= 2)
        for (u32 l = 0; l < step; ++l) lane[l] = lane[l] + lane[l + step];
    return lane[0];
}

template <Reduction R> float weighted(const ReduceArgs& a, const Row<R>& row, u32 i) {
    return row[i] * (a.weight_bias + factor<R.number>(a.weight, i, a.weight_is_fp32));
}

// 1 / rms of a row, and its largest |row * weight|.
struct Moments {
    float rstd;
    u32 peak;
};

template <Reduction R> Moments measure(const ReduceArgs& a, const Row<R>& row) {
    float lane[32], total[32] = {};
    for (u32 w = 0; w < R.partials(); ++w) {
        for (u32 l = 0; l < 32; ++l) {
            float x[R.width()];
            const u32 v = w * 32 + l;
            for (u32 i = 0; i < R.width(); ++i) x[i] = v < R.vectors() ? row[v * R.width() + i] : 0;
            lane[l] = square_sum(x);
        }
        total[w % 32] = total[w % 32] + butterfly(lane);
    }
    u32 peak = 0;
    for (u32 i = 0; i < R.hidden; ++i) {
        const u32 size = std::bit_cast<u32>(weighted<R>(a, row, i)) & 0x7fffffffu;
        peak = size > peak ? size : peak;
    }
    return {inverse_rms(butterfly(total), R.hidden, a.eps), peak};
}

template <Reduction R> void store_row(void* to, u32 token, Row<R>& row) {
    if (to != nullptr)
        std::memcpy(static_cast<u8*>(to) + u64(token) * R.row_bytes(), row.data(), R.row_bytes());
}

// The FP8 of one block of normed numbers, with its scale.
template <Reduction R>
void quantize_group(const ReduceArgs& a, u32 token, u32 group, const float (&x)[scale_columns]) {
    u8* to = static_cast<u8*>(a.quant_out) + u64(token) * R.hidden + group * scale_columns;
    const u32 amax = amax_bits_of(x);
    if (a.coding == Coding::group) {
        const BlockScale scale = block_scale(amax);
        static_cast<float*>(a.scale_out)[u64(token) * (R.hidden / scale_columns) + group] =
            scale.scale;
        return store_block(x, scale.inverse, amax >= infinity_bits, to);
    }
    const u32 exponent = mx_exponent(amax);
    u8* bytes = static_cast<u8*>(a.scale_out) + 4 * (u64(group / 4) * a.scale_stride + token);
    bytes[group % 4] = u8(exponent);
    if (group == R.hidden / scale_columns - 1)
        for (u32 i = group % 4 + 1; i < 4; ++i) bytes[i] = 0;
    store_block(x, mx_inverse(exponent), amax >= infinity_bits, to);
}

template <Reduction R> void quantize_normed(const ReduceArgs& a, u32 token, Row<R>& norm, u32 peak) {
    if (a.coding == Coding::group || a.coding == Coding::group_ue8m0) {
        for (u32 group = 0; group < R.hidden / scale_columns; ++group) {
            float x[scale_columns];
            for (u32 i = 0; i < scale_columns; ++i) x[i] = norm[group * scale_columns + i];
            quantize_group<R>(a, token, group, x);
        }
        return;
    }
    u8* to = static_cast<u8*>(a.quant_out) + u64(token) * R.hidden;
    const BlockScale scale = row_scale(peak);
    if (a.coding == Coding::token) static_cast<float*>(a.scale_out)[token] = scale.scale;
    for (u32 i = 0; i < R.hidden; ++i)
        to[i] = a.coding == Coding::fixed ? to_e4m3(norm[i] / *a.scale)
                : peak >= infinity_bits   ? 0x7f
                                          : to_e4m3(norm[i] * scale.inverse);
}

// Everything that is elementwise once the row's statistics are known.
template <Reduction R> void finish_row(const ReduceArgs& a, u32 token, Row<R>& row, Moments m) {
    if (a.weight == nullptr) return;
    Row<R> norm;
    for (u32 i = 0; i < R.hidden; ++i)
        norm.numbers()[i] = narrow<R.number>(weighted<R>(a, row, i) * m.rstd);
    store_row<R>(a.norm_out, token, norm);
    const float peak = widen<R.number>(narrow<R.number>(std::bit_cast<float>(m.peak) * m.rstd));
    if (a.coding != Coding::none)
        quantize_normed<R>(a, token, norm, std::bit_cast<u32>(peak) & 0x7fffffffu);
}

// From the rounded sum of a token to all of its outputs.
template <Reduction R> void finish_sum(const ReduceArgs& a, u32 token, Row<R>& row) {
    store_row<R>(a.out, token, row);
    add_residual<R>(a, token, row);
    store_row<R>(a.residual_out, token, row);
    if (a.weight != nullptr) finish_row<R>(a, token, row, measure<R>(a, row));
}

template <Reduction R> void oneshot(Calling<R>& call) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank;
    Row<R> row;
    for (u32 token = 0; token < a.tokens; ++token) {
        load_row<R>(a, token, row.data());
        for (u32 turn = 1; turn < R.ranks; ++turn) {
            const u32 peer = next_rank<R>(me, turn);
            push_row<R>(call.at(peer).direct[call.parity()][place_at(peer, me)][token], row.data());
        }
    }
    fault(mine<R>(a.site).header, Point::after_rows, me, call.epoch);
    std::vector<Row<R>> rows(R.ranks);
    for (u32 token = 0; token < a.tokens; ++token) {
        load_row<R>(a, token, rows[me].data());
        for (u32 turn = 1; turn < R.ranks; ++turn) {
            const u32 peer = next_rank<R>(me, turn);
            fault(mine<R>(a.site).header, Point::before_rows, peer, call.epoch);
            u8* slot = call.at(me).direct[call.parity()][place_at(me, peer)][token];
            if (!take<R>(call, slot, rows[peer].data(), Slot::direct, peer, token))
                return;
        }
        sum_rows<R>(rows, row);
        finish_sum<R>(a, token, row);
    }
}

// Every peer's tokens of a group of `ranks` neighbouring ones, to their owners.
template <Reduction R> void push_parts(Calling<R>& call, u32 group) {
    const u32 me = call.a.site.rank;
    Row<R> row;
    for (u32 turn = 1; turn < R.ranks; ++turn) {
        const u32 owner = next_rank<R>(me, turn), token = group * R.ranks + owner;
        if (token >= call.a.tokens) continue;
        load_row<R>(call.a, token, row.data());
        push_row<R>(call.at(owner).part[call.parity()][place_at(owner, me)][group], row.data());
    }
    fault(mine<R>(call.a.site).header, Point::after_rows, me, call.epoch);
}

// Sums this rank's token of a group and tells its peers. They get the row that they cannot make
// themselves: the sum where somebody wants it, else the sum plus residual.
template <Reduction R> void reduce_part(Calling<R>& call, u32 group) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank, token = group * R.ranks + me;
    if (token >= a.tokens) return;
    std::vector<Row<R>> rows(R.ranks);
    load_row<R>(a, token, rows[me].data());
    for (u32 turn = 1; turn < R.ranks; ++turn) {
        const u32 peer = next_rank<R>(me, turn);
        fault(mine<R>(a.site).header, Point::before_rows, peer, call.epoch);
        u8* slot = call.at(me).part[call.parity()][place_at(me, peer)][group];
        if (!take<R>(call, slot, rows[peer].data(), Slot::part, peer, token)) return;
    }
    Row<R> row;
    sum_rows<R>(rows, row);
    Row<R> sum = row;
    store_row<R>(a.out, token, row);
    add_residual<R>(a, token, row);
    store_row<R>(a.residual_out, token, row);
    const Moments m = a.weight ? measure<R>(a, row) : Moments{};
    for (u32 turn = 1; turn < R.ranks; ++turn) {
        const u32 peer = next_rank<R>(me, turn), place = place_at(peer, me);
        push_row<R>(call.at(peer).whole[place][group], (a.out ? sum : row).data());
        if (a.weight == nullptr) continue;
        u64* words = reinterpret_cast<u64*>(&call.at(peer).trailer[place][group]);
        const u64 tag = u64(trailer_tag(call.epoch)) << 32;
        store_release(words, tag | std::bit_cast<u32>(m.rstd));
        store_release(words + 1, tag | m.peak);
    }
    finish_row<R>(a, token, row, m);
}

// Waits for one half of a trailer.
template <Reduction R> bool await_half(Calling<R>& call, u64* half, Wait wait, u32& value) {
    u64 seen = load_acquire(half);
    for (u32 turns = 1; u32(seen >> 32) != trailer_tag(call.epoch); ++turns) {
        call.broken =
            turns % 1024 == 0 && gives_up<R>(call.a.site, call.epoch, call.a.signature, wait);
        if (call.broken) return false;
        relax(turns);
        seen = load_acquire(half);
    }
    value = u32(seen);
    return true;
}

template <Reduction R>
bool read_moments(Calling<R>& call, Trailer& trailer, Moments& m, u32 peer, u32 token) {
    u64* half = reinterpret_cast<u64*>(&trailer);
    const Wait wait{.slot = Slot::trailer, .peer = peer, .token = token, .vector = 0};
    u32 rstd = 0;
    if (!await_half<R>(call, half, wait, rstd)) return false;
    m.rstd = std::bit_cast<float>(rstd);
    return await_half<R>(call, half + 1, wait, m.peak);
}

// Takes the summed rows of a group's other tokens and makes their outputs.
template <Reduction R> void finish_parts(Calling<R>& call, u32 group) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank;
    Row<R> row;
    for (u32 turn = 1; turn < R.ranks; ++turn) {
        const u32 owner = next_rank<R>(me, turn), token = group * R.ranks + owner;
        if (token >= a.tokens) continue;
        const u32 place = place_at(me, owner);
        u8* slot = call.at(me).whole[place][group];
        if (!take<R>(call, slot, row.data(), Slot::whole, owner, token)) return;
        if (a.out != nullptr) {
            store_row<R>(a.out, token, row);
            add_residual<R>(a, token, row);
        }
        store_row<R>(a.residual_out, token, row);
        if (a.weight == nullptr) continue;
        Moments m;
        if (!read_moments<R>(call, call.at(me).trailer[place][group], m, owner, token)) return;
        finish_row<R>(a, token, row, m);
    }
}

// `ahead`: groups that are pushed before the first one is summed. Nothing waits for what its rank
// has not pushed earlier, so no order of ranks can lock.
template <Reduction R> void twoshot(Calling<R>& call, u32 ahead) {
    const u32 groups = (call.a.tokens + R.ranks - 1) / R.ranks;
    for (u32 step = 0; step < groups + ahead + 1 && !call.broken; ++step) {
        if (step < groups) push_parts<R>(call, step);
        if (step >= ahead && step - ahead < groups) reduce_part<R>(call, step - ahead);
        if (step > ahead && !call.broken) finish_parts<R>(call, step - ahead - 1);
    }
}

template <Reduction R, Backend backend> void reduce(const ReduceArgs& a) {
    Header& header = mine<R>(a.site).header;
    const Turn turn = header.turn;
    if (turn.failed != 0) return;
    const u64 start = now_ns();
    const u32 me = a.site.rank;
    Calling<R> call{a, (turn.epoch + 1) & epoch_mask};
    if (fault(header, Point::reduce_enter, me, call.epoch) == Action::stay_away) return;
    for (u32 i = 1; i < R.ranks; ++i)
        tell_call<R>(a.site, call.epoch, a.signature, next_rank<R>(me, i));
    if constexpr (backend == Backend::oneshot)
        oneshot<R>(call);
    else
        twoshot<R>(call, backend == Backend::bulk ? 2 : (a.tokens + R.ranks - 1) / R.ranks);
    for (u32 peer = 0; peer < R.ranks && !call.broken; ++peer)
        call.broken = peer != me && !same_call<R>(a.site, call.epoch, a.signature, peer, 0);
    if (call.broken) return;
    header.turn.epoch = call.epoch;
    keep_record(header, all_reduce_phase, call.epoch, start, a.tokens);
}

}  // namespace weft
