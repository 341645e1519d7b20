// When each operation did what, compiled in only with -DWEFT_PROFILE=1: the first CTA's start, the
// end of sending, the flags going out, each peer's flag coming in, the end. An operation writes one
// Timeline of its own header and nothing else, so a replayed graph leaves one for each replay.
//
// A stamp is of this round when it is not older than `start_ns`; others are what an earlier round
// left there, because this one has not come to that point.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

WEFT_FN Timeline& timeline(Header& header, Phase phase, u64 epoch) {
    return header.timelines[(u32(epoch) * 2 + (phase == Phase::combine)) % ring_timelines];
}

// A GPU starts its CTAs in order, so the first one's start is the operation's.
template <class Team>
WEFT_FN void mark_start(const Team& team, Header& header, Phase phase, u64 epoch, u64 start_ns) {
    if constexpr (WEFT_PROFILE) {
        if (!team.first() || team.lane() != 0) return;
        Timeline& line = timeline(header, phase, epoch);
        line.epoch = epoch;
        line.start_ns = start_ns;
        line.phase = u32(phase);
        line.ctas = team.teams();
    }
}

// Before any flag of this team goes out.
template <class Team>
WEFT_FN void mark_sent(const Team& team, Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) {
        if (team.lane() == 0) timeline(header, phase, epoch).sent_ns = now_ns();
        team.meet_publishers();
    }
}

// After all flags of this team have gone out.
template <class Team>
WEFT_FN void mark_published(const Team& team, Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) {
        team.meet_publishers();
        if (team.lane() == 0) timeline(header, phase, epoch).published_ns = now_ns();
        team.meet_publishers();
    }
}

// The lane that waits has seen the peer's flag. Of teams that all wait, the first one tells.
template <class Team>
WEFT_FN void mark_arrived(const Team& team, Header& header, Phase phase, u64 epoch, u32 peer) {
    if constexpr (WEFT_PROFILE)
        if (phase == Phase::dispatch || team.first())
            timeline(header, phase, epoch).arrived_ns[peer] = now_ns();
}

// By one lane of each team that ends; the latest one counts.
WEFT_FN void mark_end(Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) raise_to(&timeline(header, phase, epoch).end_ns, now_ns());
}

// The same by a lane that has just read the clock.
WEFT_FN void mark_end(Header& header, Phase phase, u64 epoch, u64 end_ns) {
    if constexpr (WEFT_PROFILE) raise_to(&timeline(header, phase, epoch).end_ns, end_ns);
}

}  // namespace weft
