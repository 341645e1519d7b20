// What the teams of a low-latency operation did, and when; compiled in on request only.
#pragma once
#include <weft/device/wait.cuh>

namespace weft {

// What one team did of one operation, and when (compiled in with -DWEFT_PROFILE=1): a CTA, or on a
// CPU the sending or the taking half. Its start is on the rank's clock; what follows is in ticks of
// the team's own clock. The team that keeps the operation's record knows its end on both, so they
// can be told in each other's terms.
struct Track {
    u64 epoch, start_ns;
    u64 end_ns;                   // 0: this team did not read the rank's clock again
    u32 granted, learned, ended;  // ticks since the start; 0: not reached
    u16 phase, role;
    u32 team, units;
    u32 waited[max_ranks];  // ticks, of its first warp, for each source; of a combine for all
};
constexpr u32 most_tracks = 1024;  // teams that are kept of one operation
constexpr u32 track_words = sizeof(Track) / 8;
static_assert(track_words <= 32, "one word a lane: the first warp writes all of it");

// The rank's clock, where tracks are kept; else nobody needs it.
WEFT_FN u64 profiled_now() {
    if constexpr (WEFT_PROFILE) return now_ns();
    return 0;
}

// A team's own times. All are kept in memory of the team and leave it once, at the end: to add up
// in the rank's memory costs a trip for each row. Without WEFT_PROFILE nothing of it is left.
// page: memory of the team, for one track. start_ns: the rank's clock, where the first lane has
// just read it.
class Diary {
  public:
    template <class Team>
    WEFT_FN Diary(const Team& team, Track& page, bool keeps, u64 start_ns = 0) : page(page) {
        if constexpr (WEFT_PROFILE) {
            kept = keeps;
            if (!kept) return;
            for (u32 i = team.lane(); i < track_words; i += team.lanes())
                reinterpret_cast<u64*>(&page)[i] = 0;
            team.meet_publishers();
            writes = team.lane() == 0;
            if (!writes) return;
            page.start_ns = start_ns != 0 ? start_ns : now_ns();
            start = ticks();
        }
    }
    WEFT_FN void granted() {
        if constexpr (WEFT_PROFILE)
            if (writes) page.granted = since(start);
    }
    WEFT_FN void learned() {
        if constexpr (WEFT_PROFILE)
            if (writes) page.learned = since(start);
    }
    WEFT_FN void worked() {
        if constexpr (WEFT_PROFILE)
            if (writes) ++page.units;
    }
    // Around a wait that may last.
    WEFT_FN u64 waits() const {
        if constexpr (WEFT_PROFILE) return writes ? ticks() : 0;
        return 0;
    }
    WEFT_FN void waited(u64 from, u32 source) {
        if constexpr (WEFT_PROFILE)
            if (writes) page.waited[source] = bounded(u64(page.waited[source]) + since(from));
    }
    // end_ns: the rank's clock just now, where it has been read.
    template <class Team>
    WEFT_FN void ended(const Team& team, Track* tracks, Phase phase, u64 epoch, u32 role, u32 at,
                       u64 end_ns) {
        if constexpr (WEFT_PROFILE) {
            if (!kept || at >= most_tracks) return;
            if (writes) {
                page.epoch = epoch;
                page.ended = since(start);
                page.end_ns = end_ns;
                page.phase = u16(phase);
                page.role = u16(role);
                page.team = at;
            }
            team.meet_publishers();
            const u32 line = (u32(epoch) * 2 + (phase == Phase::combine)) % ring_timelines;
            u64* to = reinterpret_cast<u64*>(tracks + u64(line) * most_tracks + at);
            for (u32 i = team.lane(); i < track_words; i += team.lanes())
                to[i] = reinterpret_cast<const u64*>(&page)[i];
        }
    }

  private:
    WEFT_FN static u32 bounded(u64 value) { return value < ~0u ? u32(value) : ~0u; }
    WEFT_FN static u32 since(u64 from) { return bounded(ticks() - from); }

    Track& page;
    u64 start = 0;
    bool kept = false, writes = false;
};

}  // namespace weft
