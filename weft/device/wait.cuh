// SPDX-License-Identifier: Apache-2.0
// Errors and waits of every operator: reports of bad input, notices of a failure to the peers,
// deadlines, and the choice of the culprit.
#pragma once
#include <weft/device/fault.cuh>
#include <weft/device/timeline.cuh>
#if !defined(__CUDACC__)
#include <weft/device/interrupt.hpp>
#endif

namespace weft {

struct ExpertLocation {
    u32 rank, local;
};

// The rank and local id of an expert. table: entries of rank << 16 | local id, if the shape is
// mapped. Otherwise experts are in contiguous blocks, and the first experts % ranks ranks hold one
// expert more than the others.
template <auto S> WEFT_FN ExpertLocation locate_expert(const i32* table, u32 expert) {
    constexpr u32 low = S.experts / S.ranks, longer = S.experts % S.ranks;
    constexpr u32 edge = longer * (low + 1);
    if constexpr (S.mapped) {
        const u32 entry = u32(table[expert]);
        return {entry >> 16, entry & 0xffffu};
    } else if constexpr (longer == 0) {
        return {expert / low, expert % low};
    } else if constexpr (low == 0) {
        return {expert, 0};
    } else {
        if (expert < edge) return {expert / (low + 1), expert % (low + 1)};
        return {longer + (expert - edge) / low, (expert - edge) % low};
    }
}

// Reports bad input, which the caller drops, to the host. One report is written at a time; a
// concurrent report is lost, but its input is dropped nevertheless.
// once: bits of a word of header.reported that suppress further reports of such input.
WEFT_FN void refuse(Header& header, const Site& site, ErrorRecord record, u32 once = 0,
                    u32 word = 0) {
    u32& reported = word_of(header.reported, word);
    const auto was_reported = [&] { return once != 0 && (load_relaxed(&reported) & once) != 0; };
    if (was_reported() || !claim(&header.refusing, 0, 1)) return;
    if (!was_reported()) {
        const u32 serial = ++header.refusals;
        Mailbox& box = mailbox(site);
        record.rank = site.rank;
        box.refused[serial % 8] = record;
        store_release(&box.refusals, serial);
        if (once != 0) store_relaxed(&reported, reported | once);
    }
    claim(&header.refusing, 1, 0);
}

// Marks the group as broken: the first record is kept, every later kernel of this rank returns at
// once, and the peers are notified of the culprit. Without the notice they would time out and
// report this rank.
WEFT_FN void fail(Header& header, const Site& site, const ErrorRecord& record) {
    if (!claim(&header.state.failed, 0, record.code)) return;
    Mailbox& box = mailbox(site);
    box.broken = record;
    box.broken.rank = site.rank;
    store_release(&box.broken_code, record.code);
    // If this rank's host requested the abort, the host has notified the peers.
    if (record.code == u32(Code::aborted) && record.peer == site.rank) return;
    const u64 notice = make_notice(record.code, record.peer, record.expected);
    for (u32 i = 1; i < header.ranks; ++i) {
        const u32 peer = (site.rank + i) % header.ranks;
        if (!has(header.living, peer)) continue;
        store_release(&header_of(site, peer).notices[site.rank], notice);
    }
}

// Fails because a peer's call differs from this rank's.
WEFT_FN void fail_call(Header& header, const Site& site, Code code, u32 peer, Phase phase,
                       u64 expected, u64 observed) {
    fail(header, site,
         {.code = u32(code),
          .peer = peer,
          .phase = u32(phase),
          .expected = expected,
          .observed = observed});
}

// One id of a tensor of int32 or int64.
WEFT_FN i64 id_at(const void* ids, u32 bytes, u64 at) {
    return bytes == 8 ? static_cast<const i64*>(ids)[at] : static_cast<const i32*>(ids)[at];
}

WEFT_FN void refuse_id(Header& header, const Site& site, u32 experts, i64 id, u32 token, u32 k) {
    refuse(header, site,
           {.code = u32(Code::bad_expert_id),
            .phase = u32(Phase::dispatch),
            .expected = experts,
            .observed = u64(id),
            .token = token,
            .index = k});
}

WEFT_FN void refuse_duplicate(Header& header, const Site& site, u32 token, u32 k, i32 id) {
    refuse(header, site,
           {.code = u32(Code::duplicate_expert),
            .phase = u32(Phase::dispatch),
            .expected = 1,
            .observed = u64(id),
            .token = token,
            .index = k});
}

// Reports an id of an expert on a rank that is gone. Such ids may be frequent, so each rank is
// reported once.
WEFT_FN void refuse_gone(Header& header, const Site& site, u32 gone, i32 id, u32 token, u32 k) {
    refuse(header, site,
           {.code = u32(Code::gone_rank),
            .peer = gone,
            .phase = u32(Phase::dispatch),
            .expected = ranks_from(header.living, 0),
            .observed = u64(id),
            .token = token,
            .index = k},
           1u << (rank_words == 1 ? gone : gone % 32), gone / 32);
}

// The object of a wait, as an error record reports it.
struct Wait {
    u32 peer;
    Phase phase;
    u64 epoch, observed;
};

WEFT_FN u32 ring_index(Phase phase, u64 epoch) {
    return u32(epoch * 2 + (phase == Phase::combine)) % ring_records;
}

// Whether a peer has finished this operation. It has then sent everything that its peers wait for,
// and may have closed or exited since.
WEFT_FN bool has_finished(Header& theirs, Phase phase, u64 epoch) {
    Record& record = theirs.ring[ring_index(phase, epoch)];
    return load_relaxed(&record.phase) == u32(phase) && load_relaxed(&record.epoch) == epoch;
}

// Why a wait failed: the code, the rank that caused it, and the rank + 1 that detected it (0: this
// rank itself).
struct WaitResult {
    Code code;
    u32 culprit, reported_by;
};

// Whether the process of a peer has ended. host_word: the first host word, read by the caller.
WEFT_FN bool has_ended(const Site& site, u64 host_word, u32 peer) {
    if constexpr (host_words == 1) return (host_word >> peer & 1) != 0;
    return (load_acquire(&mailbox(site).host_word[peer / 63]) >> peer % 63 & 1) != 0;
}

// Checks whether a peer has failed and sent a notice, or has left or ended before it did its part
// of this operation.
WEFT_FN WaitResult check_peers(Header& header, const Site& site, const Wait& wait, u64 host_word) {
    for (u32 peer = 0; peer < header.ranks; ++peer) {
        const u64 notice = load_acquire(&header.notices[peer]);
        const bool ended = has_ended(site, host_word, peer);
        if (notice == 0 && !ended) continue;
        const Code code = notice_code(notice);
        const u32 culprit = notice_culprit(notice);
        const bool left = code == Code::peer_left && culprit == peer;
        if (notice != 0 && !left) return {code, culprit, peer + 1};
        if (has_finished(header_of(site, peer), wait.phase, wait.epoch)) continue;
        return {left ? Code::peer_left : Code::peer_died, peer, 0};
    }
    return {Code::ok, wait.peer, 0};
}

// Whether a wait has exceeded its deadline. The error should name the rank that caused the stall,
// not one that waits itself. So a wait for this rank itself gets a quarter more time, because this
// rank's other wait, which causes it, knows the culprit. A peer that waits itself is not reported:
// it knows the culprit, and sends a notice when it fails. Only a cycle of waits ends here, at twice
// the deadline.
WEFT_FN bool is_overdue(Header& header, const Site& site, const Wait& wait, u64 start_ns, u64 now) {
    const bool first = ((wait.epoch - header.first_epoch) & epoch_mask) <= 1;
    const u64 limit = first ? header.first_deadline_ns : header.deadline_ns;
    if (now - start_ns <= limit) return false;
    if (wait.peer == site.rank) return now - start_ns > limit + limit / 4;
    const u64 seen = load_relaxed(&header_of(site, wait.peer).waiting_ns);
    const bool waits_itself = seen != 0 && i64(now - seen) < i64(limit / 2);
    return !waits_itself || now - start_ns > 2 * limit;
}

// Whether this thread reads the host word and the peers' notices, on behalf of all waits of its
// rank; one thread does in every 16 us. Host words are in host memory: when 29,000 GPU threads read
// them at once, the reads took 0.9 ms, during which rows that had arrived were not observed (2 x
// H200, 2026-11-27).
WEFT_FN bool looks_round(Header& header, u64 now) {
    const u32 last = load_relaxed(&header.looked), tick = u32(now >> 14);
    return last != tick && claim(&header.looked, last, tick);
}

// The slow path of a wait; Code::ok means that it continues. Notices take precedence over the
// deadline, because peers may know the culprit.
WEFT_FN WaitResult check_wait(Header& header, const Site& site, const Wait& wait, u64 start_ns) {
    // Another wait of this rank has failed and has written the record.
    if (load_acquire(&header.state.failed) != 0) return {Code::aborted, site.rank, 0};
    const u64 now = now_ns();
    const bool overdue = is_overdue(header, site, wait, start_ns, now);
    if (overdue || looks_round(header, now)) {
        const u64 host_word = load_acquire(mailbox(site).host_word);
        if (host_word & host_asks_to_leave) return {Code::aborted, site.rank, 0};
        const WaitResult result = check_peers(header, site, wait, host_word);
        if (result.code != Code::ok) return result;
        store_relaxed(&header.waiting_ns, now);
    }
#if !defined(__CUDACC__)
    if (interrupted(now)) return {Code::aborted, site.rank, 0};
#endif
    if (overdue) return {Code::peer_timeout, wait.peer, 0};
    return {Code::ok, wait.peer, 0};
}

// Records the failure of a wait that must end; false while the wait may continue. Inlined, because
// a call would make the low-latency kernels spill registers that are live during a wait.
WEFT_FN bool wait_failed(Header& header, const Site& site, const Wait& wait, u64 start_ns) {
    const WaitResult result = check_wait(header, site, wait, start_ns);
    if (result.code == Code::ok) return false;
    fail(header, site,
         {.code = u32(result.code),
          .peer = result.culprit,
          .phase = u32(wait.phase),
          .expected = wait.epoch,
          .observed = wait.observed,
          .elapsed_ns = now_ns() - start_ns,
          .reported_by = result.reported_by});
    return true;
}

// State of one thread's spin loop.
struct SpinWait {
    u64 start = 0, end = 0;  // end: of a timed wait, after the last poll
    u32 polls = 0;           // that have failed
    bool is_timed = false;   // whether the caller records the duration

    // The duration of a timed wait after its first untimed_polls, or 0.
    WEFT_FN u64 waited_ns() const { return polls <= untimed_polls ? 0 : end - start; }

    // Call after each poll, before the branch that ends the loop: the lanes of a warp leave the
    // loop together, so after it a lane would see the end of the longest wait among them.
    WEFT_FN void take_time() {
        if (is_timed && polls > untimed_polls) end = now_ns();
    }

    // False when the wait has failed; the reason is recorded then.
    WEFT_FN bool keep_waiting(Header& header, const Site& site, const Wait& wait) {
        return keep_waiting_for(header, site, [&] { return wait; });
    }
    // The same; `describe` returns the Wait and is called only for a check.
    template <class Describe>
    WEFT_FN bool keep_waiting_for(Header& header, const Site& site, const Describe& describe) {
        if (is_timed && polls == untimed_polls) start = now_ns();
        if (++polls % polls_per_check == 0) {
            if (start == 0) start = now_ns();
            if (wait_failed(header, site, describe(), start)) return false;
        }
        relax(polls);
        return true;
    }
};

// Waits for one peer's flag of a call (Site::descriptor for flags that belong to no call).
// Order: after `true`, this thread may read everything that the peer published with that epoch, and
// so may its team after its barrier `all`.
// expected: the flag's epoch, if it differs from the operation's (`epoch`).
WEFT_FN bool await_flag(Header& header, const Site& site, u64* flag, u32 peer, Phase phase,
                        u32 call, u64 epoch, u64 expected, SpinWait& spin) {
    // Loaded here: an acquire empties the L1 cache, so in the loop it would come from L2 each time,
    // and delay the end of the wait.
    const u32 generation = header.generation & 0xffffu;
    for (;;) {
        const u64 seen = load_acquire(flag);
        spin.take_time();
        if (flag_generation(seen) == generation && flag_not_older(seen, expected)) {
            if (flag_call(seen) == call) return true;
            fail_call(header, site, Code::geometry_mismatch, peer, phase, call, flag_call(seen));
            return false;
        }
        if (!spin.keep_waiting(header, site, {peer, phase, epoch, flag_epoch(seen, epoch)}))
            return false;
    }
}

WEFT_FN void record_duration(WaitTimes& times, u64 ns) {
    if (ns == 0) return;
    const u32 bucket = bit_width(ns >> 10);
    add_relaxed(&times.counts[bucket < wait_buckets ? bucket : wait_buckets - 1], 1ull);
    add_relaxed(&times.total_ns, ns);
    raise_to(&times.max_ns, ns);
}

WEFT_FN PeerWaits& waits_for(Header& header, Phase phase, u32 peer) {
    return header.waits[phase == Phase::combine][peer];
}

// Records a finished wait for a peer, if it was long enough to be timed. One thread does so for
// each peer, once in each phase of a round. The additions return nothing, so no thread waits for
// them.
// transfer_ns: the part of waited_ns after the peer had begun, as far as the protocol tells.
WEFT_FN void record_wait(Header& header, Phase phase, u64 epoch, u32 peer, u64 waited_ns,
                         u64 transfer_ns = 0) {
    if (waited_ns == 0) return;
    PeerWaits& waits = waits_for(header, phase, peer);
    record_duration(waits.skew, waited_ns - transfer_ns);
    record_duration(waits.transfer, transfer_ns);
    waits.epoch = epoch;
}

// Records a wait for rows of a peer whose start record_wait has recorded.
WEFT_FN void record_transfer(Header& header, Phase phase, u32 peer, u64 waited_ns) {
    record_duration(waits_for(header, phase, peer).transfer, waited_ns);
}

// Writes the record that peers and tools read after this rank has died. Returns its end time.
WEFT_FN u64 keep_record(Header& header, Phase phase, u64 epoch, u64 start_ns, u32 tokens) {
    const u64 end_ns = now_ns();
    header.ring[ring_index(phase, epoch)] = {epoch, start_ns, end_ns, u32(phase), tokens};
    return end_ns;
}

}  // namespace weft
