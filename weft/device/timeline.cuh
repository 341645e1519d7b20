// SPDX-License-Identifier: Apache-2.0
// Time stamps of each operation, compiled in only with -DWEFT_PROFILE=1: the start of the first
// CTA, the end of sending, the release of the flags, the arrival of each peer's flag, the end. An
// operation writes one Timeline of its own header and nothing else, so a replayed graph leaves one
// per replay.
//
// A stamp belongs to this round if it is not older than `start_ns`. An older stamp is from an
// earlier round: this round has not reached that point.
#pragma once
#include <weft/device/header.cuh>

namespace weft {

WEFT_FN Timeline& timeline(Header& header, Phase phase, u64 epoch) {
    return header.timelines[(u32(epoch) * 2 + (phase == Phase::combine)) % ring_timelines];
}

// A GPU starts its CTAs in order, so the start of the first one is the operation's.
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

// Call before this team stores its first flag.
template <class Team>
WEFT_FN void mark_sent(const Team& team, Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) {
        if (team.lane() == 0) timeline(header, phase, epoch).sent_ns = now_ns();
        team.meet_publishers();
    }
}

// Call after this team has stored all flags.
template <class Team>
WEFT_FN void mark_published(const Team& team, Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) {
        team.meet_publishers();
        if (team.lane() == 0) timeline(header, phase, epoch).published_ns = now_ns();
        team.meet_publishers();
    }
}

// Called by the lane that has observed the peer's flag, with its timed SpinWait.
template <class Spin>
WEFT_FN void mark_arrived(Header& header, Phase phase, u64 epoch, u32 peer, const Spin& spin) {
    if constexpr (WEFT_PROFILE)
        timeline(header, phase, epoch).arrived_ns[peer] = spin.polls == 0 ? now_ns() : spin.end;
}

// Called by one lane of each team that ends; the latest one counts.
WEFT_FN void mark_end(Header& header, Phase phase, u64 epoch) {
    if constexpr (WEFT_PROFILE) raise_to(&timeline(header, phase, epoch).end_ns, now_ns());
}

// The same for a lane that has just read the clock.
WEFT_FN void mark_end(Header& header, Phase phase, u64 epoch, u64 end_ns) {
    if constexpr (WEFT_PROFILE) raise_to(&timeline(header, phase, epoch).end_ns, end_ns);
}

}  // namespace weft
