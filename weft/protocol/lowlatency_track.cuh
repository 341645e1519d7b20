// What the teams of a low-latency operation did, and when; compiled in on request only.
#pragma once
#include <weft/protocol/phases.cuh>

namespace weft {

// What one team did of one operation, and when (compiled in with -DWEFT_PROFILE=1): a CTA, or on a
// CPU the sending or the taking half.
struct Track {
    u64 epoch, start_ns, granted_ns, learned_ns, end_ns;
    u32 phase, role, team, units;
    u32 waited_ns[max_ranks];  // by its first warp, for each source; of a combine for all
};
constexpr u32 most_tracks = 1024;  // teams that are kept of one operation

// A team's own times. Without WEFT_PROFILE nothing of it is left.
class Diary {
  public:
    WEFT_FN Diary(Track* tracks, Phase phase, u64 epoch, u32 role, u32 team, bool leads) {
        if constexpr (WEFT_PROFILE) {
            const u32 line = (u32(epoch) * 2 + (phase == Phase::combine)) % ring_timelines;
            track = tracks + u64(line) * most_tracks + team;
            writes = leads && team < most_tracks;
            if (!writes) return;
            *track = {.epoch = epoch,
                      .start_ns = now_ns(),
                      .granted_ns = 0,
                      .learned_ns = 0,
                      .end_ns = 0,
                      .phase = u32(phase),
                      .role = role,
                      .team = team,
                      .units = 0,
                      .waited_ns = {}};
        }
    }
    WEFT_FN void granted() {
        if constexpr (WEFT_PROFILE)
            if (writes) track->granted_ns = now_ns();
    }
    WEFT_FN void learned() {
        if constexpr (WEFT_PROFILE)
            if (writes) track->learned_ns = now_ns();
    }
    WEFT_FN void worked() {
        if constexpr (WEFT_PROFILE)
            if (writes) ++track->units;
    }
    // Around a wait that may last.
    WEFT_FN u64 waits() const {
        if constexpr (WEFT_PROFILE) return writes ? now_ns() : 0;
        return 0;
    }
    WEFT_FN void waited(u64 since, u32 source) {
        if constexpr (WEFT_PROFILE)
            if (writes) track->waited_ns[source] += u32(now_ns() - since);
    }
    WEFT_FN void ended() {
        if constexpr (WEFT_PROFILE)
            if (writes) track->end_ns = now_ns();
    }

  private:
    Track* track = nullptr;
    bool writes = false;
};

}  // namespace weft
