// SPDX-License-Identifier: Apache-2.0
// Trace records of the teams of a low-latency operation, compiled in only with -DWEFT_PROFILE=1.
#pragma once
#include <weft/device/wait.cuh>

namespace weft {

// The work of one team in one operation, with times. A team is a CTA, or on a CPU the sending or
// the receiving part. Its start is on the rank's clock; other times are ticks of the team's own
// clock. The team that keeps the operation's record has its end on both clocks, which allows
// conversion.
struct TraceRecord {
    u64 epoch, start_ns;
    u64 end_ns;                    // 0: this team did not read the rank's clock again
    u32 credited, learned, ended;  // ticks since the start; 0: not reached
    u16 phase, role;
    u32 team, units;
    u32 waited[max_ranks];  // ticks of its first warp, by source; in a combine, of all sources
};
constexpr u32 max_traces = 1024;  // records of one operation
constexpr u32 trace_words = sizeof(TraceRecord) / 8;
constexpr u32 publishing_lanes = 32;  // of the first warp, which writes all of a record

// The rank's clock in profiled builds; other builds do not need it.
WEFT_FN u64 profiled_now() {
    if constexpr (WEFT_PROFILE) return now_ns();
    return 0;
}

// Records a team's times. They are kept in the team's own memory (`record`) and stored once, at the
// end: accumulating them in the rank's memory would cost a round trip per row. Without WEFT_PROFILE
// it compiles to nothing.
// start_ns: the rank's clock, if the first lane has just read it.
class TraceRecorder {
  public:
    template <class Team>
    WEFT_FN TraceRecorder(const Team& team, TraceRecord& record, bool keeps, u64 start_ns = 0)
        : record(record) {
        if constexpr (WEFT_PROFILE) {
            kept = keeps;
            if (!kept) return;
            for_words(team, [&](u32 i) { reinterpret_cast<u64*>(&record)[i] = 0; });
            team.meet_publishers();
            writes = team.lane() == 0;
            if (!writes) return;
            record.start_ns = start_ns != 0 ? start_ns : now_ns();
            start = ticks();
        }
    }
    WEFT_FN void credited() {
        if constexpr (WEFT_PROFILE)
            if (writes) record.credited = since(start);
    }
    WEFT_FN void learned() {
        if constexpr (WEFT_PROFILE)
            if (writes) record.learned = since(start);
    }
    WEFT_FN void worked() {
        if constexpr (WEFT_PROFILE)
            if (writes) ++record.units;
    }
    // Called before and after a wait.
    WEFT_FN u64 waits() const {
        if constexpr (WEFT_PROFILE) return writes ? ticks() : 0;
        return 0;
    }
    WEFT_FN void waited(u64 from, u32 source) {
        if constexpr (WEFT_PROFILE)
            if (writes) record.waited[source] = bounded(u64(record.waited[source]) + since(from));
    }
    // end_ns: the rank's clock now, if it has been read.
    template <class Team>
    WEFT_FN void ended(const Team& team, TraceRecord* traces, Phase phase, u64 epoch, CtaRole role,
                       u32 at, u64 end_ns) {
        if constexpr (WEFT_PROFILE) {
            if (!kept || at >= max_traces) return;
            if (writes) {
                record.epoch = epoch;
                record.ended = since(start);
                record.end_ns = end_ns;
                record.phase = u16(phase);
                record.role = u16(role);
                record.team = at;
            }
            team.meet_publishers();
            const u32 line = (u32(epoch) * 2 + (phase == Phase::combine)) % ring_timelines;
            u64* to = reinterpret_cast<u64*>(traces + u64(line) * max_traces + at);
            for_words(team, [&](u32 i) { to[i] = reinterpret_cast<const u64*>(&record)[i]; });
        }
    }

  private:
    template <class Team, class Visit>
    WEFT_FN static void for_words(const Team& team, const Visit& visit) {
        const u32 step = team.lanes() < publishing_lanes ? team.lanes() : publishing_lanes;
        if (team.lane() >= step) return;
        for (u32 i = team.lane(); i < trace_words; i += step) visit(i);
    }
    WEFT_FN static u32 bounded(u64 value) { return value < ~0u ? u32(value) : ~0u; }
    WEFT_FN static u32 since(u64 from) { return bounded(ticks() - from); }

    TraceRecord& record;
    u64 start = 0;
    bool kept = false, writes = false;
};

}  // namespace weft
