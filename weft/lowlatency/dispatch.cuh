// Low-latency dispatch: tokens quantised in registers go straight to every rank that has an expert
// of theirs, once each, and the receiver lays them out by expert as they come. One launch, or two
// halves. A warp is the unit of work: it sends 512 columns of a token, or takes 2 KiB of a row.
#pragma once
#include <weft/lowlatency/metadata.cuh>
#include <weft/lowlatency/receive.cuh>

namespace weft {

// What a warp holds of a token before it may send: 16 columns and, in lane k, the k-th id. All is
// asked for at once, and looked at when the grants have come.
template <LowShape S> struct Load {
    Columns<S.number> columns;
    u32 token, part;
    u32 id_low, id_high;

    static constexpr u32 turns = S.hidden / lane_columns;
    static constexpr u32 units = (turns + warp_lanes - 1) / warp_lanes;  // of a token

    WEFT_FN static Load of(const LowDispatchArgs& a, u32 unit) {
        const u32 lane = threadIdx.x % warp_lanes;
        Load load{.columns = {},
                  .token = unit / units,
                  .part = unit % units,
                  .id_low = ~0u,
                  .id_high = ~0u};
        if (load.token >= a.tokens) return load;
        constexpr u32 vectors = S.out_bytes() / 16;
        const uint4* row = static_cast<const uint4*>(a.x) + u64(load.token) * vectors;
#pragma unroll
        for (u32 i = 0; i < Columns<S.number>::vectors; ++i) {
            const u32 at = vector_of<S.number, S.group != 0>(load.part, i);
            if (at < vectors) load.columns.v[i] = load_input(row + at);
        }
        if (lane < S.top_k) {
            const u8* id =
                static_cast<const u8*>(a.ids) + (u64(load.token) * S.top_k + lane) * a.ids_bytes;
            load.id_low = load_early(id);
            if (a.ids_bytes == 8) load.id_high = load_early(id + 4);
        }
        return load;
    }
    // The id as an index; -1 for none, and for what is no expert.
    WEFT_FN i32 id(const LowDispatchArgs& a) const {
        const bool known = (a.ids_bytes != 8 || id_high == 0) && id_low < S.experts;
        return known ? i32(id_low) : -1;
    }
};

// Calls visit(row of the token in the inbox of each destination), own rank first, then upwards.
template <LowShape S, class Visit>
WEFT_FN void for_destinations(const Site& site, u32 token, u32 destinations, const Visit& visit) {
#pragma unroll
    for (u32 i = 0; i < S.ranks; ++i) {
        const u32 peer = site.rank + i < S.ranks ? site.rank + i : site.rank + i - S.ranks;
        if (destinations >> peer & 1)
            visit(low_share<S>(site, peer).inbox.sent_row(site.rank, token));
    }
}

// The columns of one warp, quantised or as they are.
template <LowShape S>
WEFT_FN void send_columns(const Site& site, const Load<S>& load, u32 destinations) {
    if constexpr (S.group == 0) {
        for_destinations<S>(site, load.token, destinations, [&](u8* row) {
#pragma unroll
            for (u32 i = 0; i < Columns<S.number>::vectors; ++i) {
                const u32 at = vector_of<S.number, false>(load.part, i);
                if (at < S.number_vectors())
                    post_vector(reinterpret_cast<uint4*>(row) + at,
                                canonical<S.number>(load.columns.v[i]));
            }
        });
    } else {
        float x[lane_columns];
        load.columns.widen(x);
        const u32 amax = block_amax_bits<S.group>(x);
        const u32 v = load.part * warp_lanes + threadIdx.x % warp_lanes;
        if (v >= Load<S>::turns) return;
        const BlockScale scale = scale_for<S>(amax);
        const uint4 numbers = quantize(x, scale.inverse, amax >= infinity_bits);
        constexpr u32 lanes = S.group / lane_columns;
        const bool leads = v % lanes == 0;
        for_destinations<S>(site, load.token, destinations, [&](u8* row) {
            post_vector(reinterpret_cast<uint4*>(row) + v, numbers);
            if (leads) send_scale<S.blocks()>(row + S.hidden, v / lanes, scale.scale);
        });
    }
}

// The weights of one token, where experts' ranks reduce.
template <LowShape S>
WEFT_FN void send_weights(const LowDispatchArgs& a, u32 token, u32 destinations) {
    const u32 lane = threadIdx.x % warp_lanes;
    if (lane >= S.weight_vectors() * 4) return;
    u32 bits = 0;
    if (lane < S.top_k)
        bits = a.weights == nullptr ? 0x3f800000u
                                    : __float_as_uint(a.weights[u64(token) * S.top_k + lane]);
    bits = canonical<Number::fp32>(bits);
    for_destinations<S>(a.site, token, destinations, [&](u8* row) {
        u32* words = reinterpret_cast<u32*>(row + (S.number_vectors() + S.scale_vectors()) * 16);
        store_relaxed(words + lane, bits);
    });
}

template <LowShape S>
WEFT_FN void send_tokens(const LowDispatchArgs& a, u64 wanted, Turns turns, Load<S> load,
                         Diary& diary) {
    constexpr u32 units = Load<S>::units;
    for (u32 unit = turns.first; unit < a.tokens * units; unit += turns.step) {
        const Load<S> next = Load<S>::of(a, unit + turns.step);
        const i32 id = load.id(a);
        u32 mine = 0;
        if (id >= 0) mine = 1u << place_in<S>(a.placement, u32(id)).rank;
        const u32 destinations = __reduce_or_sync(all_lanes, mine);
        if (unit % units == 0) send_choices<S>(a, wanted, load.token, id);
        send_columns<S>(a.site, load, destinations);
        if constexpr (S.reduce == Reduce::sender)
            if (unit % units == 0) send_weights<S>(a, load.token, destinations);
        load = next;
        diary.worked();
    }
}

template <LowShape S, Part part> WEFT_FN Crew dispatch_crew(const LowDispatchArgs& a) {
    if constexpr (part == Part::receive) return {0, 0};
    return {a.tokens == 0 ? 1 : chunks_of(a.tokens), a.senders};
}

// Notices peers whose dispatch is not this one's; nobody waits for it.
template <LowShape S>
WEFT_FN void hear_hello(const Block& team, const LowDispatchArgs& a, u64 wanted) {
    LowShare<S>& own = own_share<S>(a.site);
    const u32 peer = team.lane();
    if (peer < S.ranks &&
        await_flag(own.header, a.site, &own.inbox.hello[peer], peer, Phase::dispatch, wanted))
        mark_arrived(team, own.header, Phase::dispatch, wanted, peer);
}

// Where experts' kernels store their rows at home, the dispatch waits in their stead until the
// peers' places are blank. Order: the kernel's end puts their stores behind the blanks.
template <LowShape S>
WEFT_FN void clear_way_home(const Block& team, const LowDispatchArgs& a, const Progress& progress) {
    const u32 lane = team.lane() - warp_lanes;  // the second warp: the first one hears peers
    if (lane < S.ranks) await_grant<S>(a.site, progress, Phase::combine, lane);
}

// Takers are as many as ranks of many tokens would need. Those whose first unit lies behind this
// rank's own tokens ask first whether any rank has so many, with a word for each: or at one token
// all of them would read every word of every source, again and again, for nothing. `idle`: nobody
// has.
template <LowShape S>
WEFT_FN bool ask_for_work(const Block& team, const LowDispatchArgs& a, u64 wanted, u32 first,
                          bool& idle) {
    LowShare<S>& own = own_share<S>(a.site);
    const u32 token = Stand<S>::of(first, a.site.rank).token, peer = team.lane();
    if (token < a.tokens) return true;
    u32 tokens = 0;
    bool came = true;
    if (peer < S.ranks)
        came = await_tagged(own.header, a.site, Phase::dispatch, &own.inbox.tokens[peer], peer,
                            wanted, tokens);
    idle = !team.any(token < believed<S>(tokens));
    return team.all(came);
}

// What those do who take.
template <LowShape S>
WEFT_FN bool take(const Block& team, const LowDispatchArgs& a, u64 wanted, const Crew& crew,
                  TakeScratch<S>& scratch, Diary& diary) {
    const Turns turns = crew.of_takers();
    bool idle = false;
    const u32 first = turns.first - team.warp();  // of this CTA
    if (!crew.takes_first() && !ask_for_work<S>(team, a, wanted, first, idle)) return false;
    if (idle) {
        diary.learned();
        return true;
    }
    const bool came = hear_all<S>(team, a, wanted, crew.takes_first(), scratch);
    const Taken<S> taken = look_first<S>(a, turns.first);
    if (!team.all(came)) return false;
    lay_out<S>(team, a, crew.takes_first(), scratch);
    diary.learned();
    return take_rows<S>(a, wanted, turns, scratch, taken, diary);
}

template <LowShape S, Part part = Part::whole> WEFT_FN void low_dispatch(const LowDispatchArgs& a) {
    __shared__ Track page;
    __shared__ __align__(16) u8 scratch[largest(sizeof(TellScratch<S>), sizeof(TakeScratch<S>))];
    TellScratch<S>& telling = *reinterpret_cast<TellScratch<S>*>(scratch);
    TakeScratch<S>& taking = *reinterpret_cast<TakeScratch<S>*>(scratch);
    const Block team;
    LowShare<S>& own = own_share<S>(a.site);
    const Crew crew = dispatch_crew<S, part>(a);
    if (crew.tells()) clear_chosen<S>(team, telling);
    wait_for_predecessor();
    admit_successor();
    const Standing standing = Standing::read<S>(own);
    Load<S> load{};
    if (crew.sends()) load = Load<S>::of(a, crew.of_senders().first);
    if (crew.tells()) tally<S>(team, a, blockIdx.x - 1, telling);
    const u64 start = start_of(team, crew);
    const u64 done = part == Part::receive ? standing.progress.received : standing.progress.sent;
    const u64 wanted = (done + 1) & epoch_mask;
    Diary diary(team, page, !crew.heralds(), start);
    u64 end = 0;

    if constexpr (part != Part::receive) {
        const Action planned = fault(own.header, Point::dispatch_enter, a.site.rank, wanted);
        if (planned == Action::stay_away) return;
    }
    const bool stores = crew.tells() || crew.sends();
    if (!standing.admitted<S>(team, a.site, Phase::dispatch, stores)) return;
    diary.granted();
    // Whoever sends counts itself behind that.
    const auto count = [&] {
        if (team.lane() != team.lanes() - 1 || !counts_last(own.header)) return;
        if constexpr (part != Part::receive) own.progress.sent = wanted;
        if constexpr (part != Part::send) own.progress.received = wanted;
    };
    if (!stores) count();
    if (crew.heralds()) {
        grant_all<S>(team, a.site, standing.progress);
        if constexpr (part != Part::receive)
            mark_start(team, own.header, Phase::dispatch, wanted, start);
        if constexpr (part != Part::send) hear_hello<S>(team, a, wanted);
        if constexpr (S.homes) clear_way_home<S>(team, a, standing.progress);
    } else if (stores) {
        if (crew.tells())
            tell<S>(team, a, wanted, blockIdx.x - 1, telling);
        else
            send_tokens<S>(a, wanted, crew.of_senders(), load, diary);
        count();
        fault(own.header, Point::after_payload, a.site.rank, wanted);
    } else {
        if (!take<S>(team, a, wanted, crew, taking, diary)) return;
        if (crew.takes_first() && team.lane() == 0) {
            end = keep_record(own.header, Phase::dispatch, wanted, start, a.tokens);
            mark_end(own.header, Phase::dispatch, wanted, end);
        }
    }
    diary.ended(team, a.tracks, Phase::dispatch, wanted, crew.role(), blockIdx.x, end);
}

}  // namespace weft
