// SPDX-License-Identifier: Apache-2.0
// The fused all-reduce on CPUs, with the protocol of the kernels and one thread per rank. Generated
// entries include this file.
#include <weft/allreduce/rows_cpu.hpp>

namespace weft {

// One call of one rank: its epoch, and whether a wait has failed.
template <Reduction R> struct Call {
    const ReduceArgs& a;
    u64 epoch;
    bool broken = false;

    ReductionInbox<R>& at(u32 rank) const { return share<R>(a.site, rank).inbox; }
    bool sums(u32 rank) const { return is_summed<R>(own_share<R>(a.site).header.living, rank); }
    u32 side() const { return side_of(epoch); }
};

template <Reduction R> void push_row(u8* slot, const u8* row) {
    for (u32 at = 0; at < R.row_bytes(); at += 8) {
        u32 word[2];
        std::memcpy(word, row + at, 8);
        for (u32& w : word) w = without_sentinel<R.dtype>(w);
        store_release(reinterpret_cast<u64*>(slot + at), u64(word[1]) << 32 | word[0]);
    }
}

// Waits for a word of a slot that is ready; false when the wait has failed.
template <Reduction R, class Ready>
bool await_word(Call<R>& call, u64* word, SlotWait wait, u64& seen, const Ready& ready) {
    seen = load_acquire(word);
    for (u32 polls = 1; !ready(seen); ++polls) {
        call.broken = polls % polls_per_check == 0 &&
                      wait_failed<R>(call.a.site, call.epoch, call.a.call.hash, wait);
        if (call.broken) return false;
        relax(polls);
        seen = load_acquire(word);
    }
    return true;
}

// Records a rank's wait for a peer's row, if it was missing: for the first row as skew.
template <Reduction R> void record_row(const Call<R>& call, u32 peer, bool is_first, u64 ns) {
    if (ns == 0) return;
    PeerWaits& waits = waits_for(own_share<R>(call.a.site).header, all_reduce_phase, peer);
    record_duration(is_first ? waits.skew : waits.transfer, ns);
    waits.epoch = call.epoch;
}

// Waits for the row of a slot, copies it and restores the sentinels; false when a wait has failed.
// waited_ns: the time in which a word was missing.
template <Reduction R>
bool receive_row(Call<R>& call, u8* slot, u8* to, Slot kind, u32 peer, u32 token, u64& waited_ns) {
    waited_ns = 0;
    for (u32 at = 0; at < R.row_bytes(); at += 8) {
        u64* word = reinterpret_cast<u64*>(slot + at);
        const SlotWait wait{.slot = kind, .peer = peer, .token = token, .vector = at / 16};
        u64 seen = load_acquire(word);
        if (!is_ready(seen)) {
            const u64 start = now_ns();
            if (!await_word<R>(call, word, wait, seen, [](u64 w) { return is_ready(w); }))
                return false;
            waited_ns += now_ns() - start;
        }
        std::memcpy(to + at, &seen, 8);
        store_release(word, sentinel_pair);
    }
    return true;
}

template <Reduction R> void oneshot(Call<R>& call) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank;
    Row<R> row;
    for (u32 token = 0; token < a.tokens; ++token) {
        load_row<R>(a, token, row.data());
        for (u32 offset = 1; offset < R.ranks; ++offset) {
            const u32 peer = next_rank<R>(me, offset);
            if (!call.sums(peer)) continue;
            push_row<R>(call.at(peer).direct[call.side()][slot_index(peer, me)][token], row.data());
        }
    }
    fault(own_share<R>(a.site).header, Point::after_rows, me, call.epoch);
    std::vector<Row<R>> rows(R.ranks);
    for (u32 peer = 0; peer < R.ranks; ++peer)
        for (u32 at = 0; at < R.row_bytes(); at += 4)
            std::memcpy(rows[peer].data() + at, &neutral_word<R.dtype>, 4);
    for (u32 token = 0; token < a.tokens; ++token) {
        load_row<R>(a, token, rows[me].data());
        for (u32 offset = 1; offset < R.ranks; ++offset) {
            const u32 peer = next_rank<R>(me, offset);
            if (!call.sums(peer)) continue;
            fault(own_share<R>(a.site).header, Point::before_rows, peer, call.epoch);
            u8* slot = call.at(me).direct[call.side()][slot_index(me, peer)][token];
            u64 waited_ns;
            if (!receive_row<R>(call, slot, rows[peer].data(), Slot::direct, peer, token,
                                waited_ns))
                return;
            record_row<R>(call, peer, token == 0, waited_ns);
        }
        sum_rows<R>(rows, row);
        finish_sum<R>(a, token, row);
    }
}

// Pushes the rows of a group of `ranks` neighbouring tokens to the tokens' owners.
template <Reduction R> void push_parts(Call<R>& call, u32 group) {
    const u32 me = call.a.site.rank;
    Row<R> row;
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 owner = next_rank<R>(me, offset), token = group * R.ranks + owner;
        if (token >= call.a.tokens) continue;
        load_row<R>(call.a, token, row.data());
        push_row<R>(call.at(owner).part[call.side()][slot_index(owner, me)][group], row.data());
    }
    fault(own_share<R>(call.a.site).header, Point::after_rows, me, call.epoch);
}

template <Reduction R> void send_row_stats(Call<R>& call, u32 peer, u32 group, const RowStats& m) {
    const u32 me = call.a.site.rank;
    fault(own_share<R>(call.a.site).header, Point::before_moments, peer, call.epoch);
    u64* words = reinterpret_cast<u64*>(&call.at(peer).trailer[slot_index(peer, me)][group]);
    const u64 tag = u64(trailer_tag(call.epoch)) << 32;
    store_release(words, tag | std::bit_cast<u32>(m.rstd));
    store_release(words + 1, tag | m.peak);
}

// Sums this rank's token of a group and sends it to the peers.
template <Reduction R> void reduce_part(Call<R>& call, u32 group) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank, token = group * R.ranks + me;
    if (token >= a.tokens) return;
    std::vector<Row<R>> rows(R.ranks);
    load_row<R>(a, token, rows[me].data());
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 peer = next_rank<R>(me, offset);
        fault(own_share<R>(a.site).header, Point::before_rows, peer, call.epoch);
        u8* slot = call.at(me).part[call.side()][slot_index(me, peer)][group];
        u64 waited_ns;
        if (!receive_row<R>(call, slot, rows[peer].data(), Slot::part, peer, token, waited_ns))
            return;
        record_row<R>(call, peer, group == 0, waited_ns);
    }
    Row<R> row;
    sum_rows<R>(rows, row);
    Row<R> sum = row;
    store_row<R>(a.out, token, row);
    add_residual<R>(a, token, row);
    store_row<R>(a.residual_out, token, row);
    const RowStats m = a.weight ? measure<R>(a, row) : RowStats{};
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 peer = next_rank<R>(me, offset), slot_idx = slot_index(peer, me);
        push_row<R>(call.at(peer).whole[slot_idx][group], (sends_sum<R>(a) ? sum : row).data());
        if constexpr (R.epilogue_at == EpilogueAt::owner)
            if (a.weight != nullptr) send_row_stats<R>(call, peer, group, m);
    }
    finish_row<R>(a, token, row, m);
}

// Waits until both words of a trailer have the call's tag.
template <Reduction R>
bool read_row_stats(Call<R>& call, Trailer& trailer, RowStats& m, u32 peer, u32 token) {
    u64 *word = reinterpret_cast<u64*>(&trailer), rstd, peak;
    const auto tagged = [&](u64 w) { return u32(w >> 32) == trailer_tag(call.epoch); };
    const SlotWait wait{.slot = Slot::trailer, .peer = peer, .token = token, .vector = 0};
    if (!await_word<R>(call, word, wait, rstd, tagged) ||
        !await_word<R>(call, word + 1, wait, peak, tagged))
        return false;
    m = {std::bit_cast<float>(u32(rstd)), u32(peak)};
    return true;
}

// Receives the summed rows of a group's other tokens and computes their outputs.
template <Reduction R> void finish_parts(Call<R>& call, u32 group) {
    const ReduceArgs& a = call.a;
    const u32 me = a.site.rank;
    Row<R> row;
    for (u32 offset = 1; offset < R.ranks; ++offset) {
        const u32 owner = next_rank<R>(me, offset), token = group * R.ranks + owner;
        if (token >= a.tokens) continue;
        const u32 slot_idx = slot_index(me, owner);
        u8* slot = call.at(me).whole[slot_idx][group];
        u64 waited_ns;
        if (!receive_row<R>(call, slot, row.data(), Slot::whole, owner, token, waited_ns)) return;
        if constexpr (R.epilogue_at == EpilogueAt::receiver) {
            finish_sum<R>(a, token, row);
        } else {
            if (a.out != nullptr) {
                store_row<R>(a.out, token, row);
                add_residual<R>(a, token, row);
            }
            store_row<R>(a.residual_out, token, row);
            if (a.weight == nullptr) continue;
            RowStats m;
            Trailer& trailer = call.at(me).trailer[slot_idx][group];
            if (!read_row_stats<R>(call, trailer, m, owner, token)) return;
            finish_row<R>(a, token, row, m);
        }
    }
}

// `ahead`: number of groups that are pushed before the first one is summed. A rank waits for a
// group only after it has pushed its own rows of that group, so no order of ranks can deadlock.
template <Reduction R> void twoshot(Call<R>& call, u32 ahead) {
    const u32 groups = (call.a.tokens + R.ranks - 1) / R.ranks;
    for (u32 step = 0; step < groups + ahead + 1 && !call.broken; ++step) {
        if (step < groups) push_parts<R>(call, step);
        if (step >= ahead && step - ahead < groups) reduce_part<R>(call, step - ahead);
        if (step > ahead && !call.broken) finish_parts<R>(call, step - ahead - 1);
    }
}

template <Reduction R, Backend backend> void reduce(const ReduceArgs& a) {
    Header& header = own_share<R>(a.site).header;
    const EpochState state = header.state;
    if (state.failed != 0) return;
    const u64 start = now_ns();
    const u32 me = a.site.rank;
    Call<R> call{a, (state.epoch + 1) & epoch_mask};
    if (fault(header, Point::reduce_enter, me, call.epoch) == Action::stay_away) return;
    header.call = a.call;
    for (u32 i = 1; i < R.ranks; ++i)
        if (const u32 peer = next_rank<R>(me, i); call.sums(peer))
            send_call_word<R>(a.site, call.epoch, a.call.hash, peer);
    if constexpr (backend == Backend::oneshot)
        oneshot<R>(call);
    else
        twoshot<R>(call, backend == Backend::bulk ? 2 : (a.tokens + R.ranks - 1) / R.ranks);
    for (u32 peer = 0; peer < R.ranks && !call.broken; ++peer)
        call.broken = peer != me && call.sums(peer) &&
                      !same_call<R>(a.site, call.epoch, a.call.hash, peer, 0);
    if (call.broken) return;
    header.state.epoch = call.epoch;
    keep_record(header, all_reduce_phase, call.epoch, start, a.tokens);
}

}  // namespace weft
