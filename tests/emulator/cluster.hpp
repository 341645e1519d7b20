// SPDX-License-Identifier: Apache-2.0
// Clusters of CTAs that reach into each other's shared memory, on a CPU: all threads of a cluster
// are fibers of one thread of the system, in an order drawn from a seed. What other units than
// threads do (copies, remote words and arrivals) lands when the policy says: as late as the
// protocol allows, at once, or at any time between. Memory that something is on its way to holds
// NaN.
//
// It knows what would be undefined on a GPU (`Rule`), but threads see each other's stores in order:
// whether fences are strong enough is for the tests with the gpu marker.
#pragma once
#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>

namespace emulated {

using Byte = unsigned char;

// What a kernel did that a GPU would not forgive.
enum Rule : unsigned {
    deadlock,    // every thread waits, and nothing is on its way
    gone,        // something reached the shared memory of a CTA that had ended
    unmade,      // a barrier was used before it was made, or by others before that was published
    overrun,     // more arrivals at a barrier than its phase takes
    misaligned,  // an address that an instruction does not take
    unordered,   // the copy engine was not fenced from earlier stores, or a product from registers
    unlike,      // threads of a warpgroup multiplied different tiles
    unknown,     // a descriptor that stands for nothing here
    outside,     // shared memory beyond what was asked for was written
    hasty,       // memory that the kernel in front may still write was read, or any written
    strangers,   // a barrier by name was met by others than the first time
    unreset,     // a counter was not left at 0 for the next launch
    rules
};
enum Policy : unsigned { late, at_once, at_any_time, policies };

constexpr unsigned window = 1024,
                   shared_bytes = 227 * 1024;  // where shared memory begins; its size

struct Barrier {
    Byte phase, made, count, pending;
    int bytes;
};
static_assert(sizeof(Barrier) == 8);

struct Landing {
    unsigned cta, to;  // of shared memory
    std::vector<Byte> data;
    bool swizzled, arrives;  // or the bytes are counted
    unsigned barrier;
};

// Memory that the kernel in front writes, and what.
struct Late {
    Byte* at;
    std::vector<Byte> data;

    bool holds(const void* place) const { return place >= at && place < at + data.size(); }
};

struct Operation {
    float* sum;
    unsigned long long a, b;
    unsigned columns;
    bool add;
    unsigned group;             // 0: not committed yet
    unsigned kind;              // of its operands
    const unsigned* registers;  // of A, or null
};

struct Core {
    Byte* memory = nullptr;
    std::unique_ptr<char[]> stacks;
    Cta cta;
    unsigned named[16] = {}, phase[16] = {}, published = 0;
    std::vector<bool> comes[16], came_first[16];     // threads at each barrier by name
    std::vector<std::vector<Operation>> operations;  // of each thread
    std::vector<bool> fenced, ordered;               // for the copy engine; for products
    std::vector<bool> followed;                      // has seen the kernel in front end
    std::vector<unsigned> issued, groups;            // products of each thread; its commits
    std::vector<std::vector<Operation>> issues;      // of each warpgroup, all
    bool left = false;
};

struct Machine {
    Policy policy;
    unsigned long long state;
    unsigned* broken;
    std::vector<Core> core;
    std::vector<Landing> open;
    Cluster cluster;
    std::vector<Late> late;
    unsigned over = 0;  // the kernel in front
    bool alone = true;  // no cluster of another thread runs beside this one

    unsigned random() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return unsigned(state >> 32);
    }
    void check(bool good, Rule rule) { broken[rule] += !good; }
    // The kernel in front is at work again, or at its end.
    void begin_front() {
        for (const Late& l : late) std::memset(l.at, 0xff, l.data.size());
    }
    void end_front() {
        for (const Late& l : late) std::memcpy(l.at, l.data.data(), l.data.size());
        over = 1;
    }
    Core& mine() { return core[cta->rank]; }
    Byte* at(unsigned rank, unsigned address) { return core[rank].memory + address - window; }
    Barrier& barrier(unsigned rank, unsigned address) {
        return *reinterpret_cast<Barrier*>(at(rank, address));
    }
    void settle(Barrier& b) {
        if (b.pending != 0 || b.bytes != 0) return;
        b.phase ^= 1;
        b.pending = b.count;
    }
    void arrive(Barrier& b, int bytes = 0) {
        check(b.made == 1, unmade);
        check(b.pending != 0, overrun);
        b.bytes += bytes;
        --b.pending;
        settle(b);
    }
    void send(Landing landing) {
        check(core[landing.cta].published != 0, unmade);
        if (landing.data.size() > 4)
            std::memset(at(landing.cta, landing.to), 0xff, landing.data.size());
        open.push_back(std::move(landing));
        if (policy == at_once) land(open.size() - 1);
    }
    void land(std::size_t i) {
        const Landing landing = std::move(open[i]);
        open.erase(open.begin() + long(i));
        if (core[landing.cta].left) return check(false, gone);
        for (std::size_t k = 0; k < landing.data.size(); ++k) {
            const unsigned to = landing.to + unsigned(k);
            *at(landing.cta, landing.swizzled ? to ^ (to >> 7 & 7) << 4 : to) = landing.data[k];
        }
        Barrier& b = barrier(landing.cta, landing.barrier);
        if (landing.arrives) return arrive(b);
        check(b.made == 1, unmade);
        b.bytes -= int(landing.data.size());
        settle(b);
    }

    unsigned draw_sloths();
    bool turn(unsigned sloths);
    void run();
};
inline thread_local Machine* machine = nullptr;

// Who is slow for a while: nobody, some warps, or a whole CTA. A bit for each warp.
inline unsigned Machine::draw_sloths() {
    const unsigned warps = unsigned(core[0].cta.warp.size()), one = (1u << warps) - 1;
    switch (random() % 4) {
        case 0:
            return 0;
        case 1:
            return one << random() % 2 * warps;
        default:
            return random() & random() & one << warps | random() & random() & one;
    }
}

// One turn of every warp that is not slow just now; some lanes of it, in any order. Did one run?
inline bool Machine::turn(unsigned sloths) {
    bool ran = false;
    const unsigned warps = unsigned(core[0].cta.warp.size()), all = warps * unsigned(core.size());
    for (unsigned i = 0, first = random(); i < all; ++i) {
        const unsigned at = (first + i) % all, swap = random() % 32;
        if (sloths >> at & 1) continue;
        Core& own = core[at / warps];
        cta = &own.cta;
        for (unsigned l = 0; l < 32; ++l) {
            const unsigned thread = at % warps * 32 + (l ^ swap);
            if (cta->done[thread] || cta->watch[thread].blocks()) continue;
            ran = true;
            if (random() % 16 != 0) resume(*cta, thread);
        }
        own.left = own.left || cta->running == 0;
    }
    return ran;
}

// Until all threads have ended, or all wait in vain.
inline void Machine::run() {
    unsigned sloths = 0;
    unsigned long next = 0;
    auto last = std::chrono::steady_clock::now();  // when a thread ran
    for (unsigned long turns = 0;; ++turns) {
        unsigned running = 0;
        for (const Core& own : core) running += own.cta.running;
        if (running == 0) break;
        if (turns >= next) sloths = draw_sloths(), next = turns + (16u << random() % 6);
        const bool ran = turn(sloths);
        const bool may = policy == at_any_time && random() % 4 == 0;
        if (over == 0 && (random() % 64 == 0 || (!ran && sloths == 0))) {
            end_front();
        } else if (!open.empty() && (may || (!ran && sloths == 0))) {
            land(random() % open.size());
        } else if (!ran && sloths == 0) {
            if (alone || std::chrono::steady_clock::now() > last + std::chrono::seconds(20))
                return check(false, deadlock);
            std::this_thread::yield();
        }
        if (ran && !alone) last = std::chrono::steady_clock::now();
        if (!ran) sloths = 0;
    }
    while (!open.empty()) land(open.size() - 1);
}

inline unsigned address(const void* at) {
    return unsigned(static_cast<const Byte*>(at) - machine->mine().memory) + window;
}
inline Barrier& barrier_at(const void* at) { return machine->barrier(cta->rank, address(at)); }

inline void make_barrier(void* at, unsigned count) {
    barrier_at(at) = {0, 1, Byte(count), Byte(count), 0};
}
inline void arrive(const void* at, unsigned bytes = 0) {
    machine->arrive(barrier_at(at), int(bytes));
}
inline void await(const void* at, unsigned parity) {
    machine->check(barrier_at(at).made == 1, unmade);
    await_change(barrier_at(at).phase, parity);
}
inline bool is_complete(const void* at, unsigned parity) {
    machine->check(barrier_at(at).made == 1, unmade);
    return barrier_at(at).phase != parity;
}
inline void arrive_at(unsigned rank, const void* barrier) {
    machine->send({rank, address(barrier), {}, false, true, address(barrier)});
}
inline void send_word(unsigned rank, const void* at, unsigned value, const void* barrier) {
    std::vector<Byte> data(sizeof value);
    std::memcpy(data.data(), &value, sizeof value);
    machine->send({rank, address(at), std::move(data), false, false, address(barrier)});
}

// Threads of a CTA that meet by name.
inline void meet(unsigned id, unsigned threads) {
    Core& own = machine->mine();
    const unsigned phase = own.phase[id];
    std::vector<bool>& comes = own.comes[id];
    comes.resize(cta->size.x);
    comes[cta->current] = true;
    if (++own.named[id] == threads) {
        if (own.came_first[id].empty()) own.came_first[id] = comes;
        machine->check(comes == own.came_first[id], strangers);
        comes.clear();
        own.named[id] = 0;
        ++own.phase[id];
    }
    await_change(own.phase[id], phase);
}

// Until another thread of the GPU has counted this far. The copy engine needs another fence before
// it reads what that thread has stored.
inline void await_count(const unsigned* at, unsigned count) {
    for (unsigned seen; (seen = __atomic_load_n(at, __ATOMIC_ACQUIRE)) < count;)
        await_change(*at, seen);
    machine->mine().fenced[cta->current] = false;
}

// Until the kernel in front has ended.
inline void follow() {
    await_change(machine->over, 0);
    machine->mine().followed[cta->current] = true;
}

inline Byte* dynamic_shared() { return machine->mine().memory; }

// Runs the cluster of two CTAs whose first one has this index. Counts broken rules.
inline void run_pair(unsigned first, unsigned ctas, unsigned threads, unsigned bytes, unsigned seed,
                     Policy policy, unsigned* broken, const std::vector<Late>& late, bool alone,
                     const std::function<void()>& kernel) {
    Machine own{policy, seed * 2654435761ull + first + 1, broken, {}, {}, {}, late, 0, alone};
    own.begin_front();
    own.core.resize(2);
    machine = &own;
    for (unsigned rank = 0; rank < 2; ++rank) {
        Core& core = own.core[rank];
        core.memory = static_cast<Byte*>(std::aligned_alloc(1024, shared_bytes));
        std::memset(core.memory, 0xff, shared_bytes);
        core.cta.block = {first + rank, 0, 0};
        core.cta.grid = {ctas, 1, 1};
        core.cta.size = {threads, 1, 1};
        core.cta.rank = rank;
        core.cta.neighbours = 2;
        core.cta.cluster = &own.cluster;
        core.cta.body = kernel;
        core.stacks = make_fibers(core.cta);
        core.operations.resize(threads);
        core.fenced.resize(threads), core.ordered.resize(threads);
        core.followed.resize(threads);
        core.issued.resize(threads), core.groups.resize(threads), core.issues.resize(threads / 128);
    }
    own.run();
    if (own.over == 0) own.end_front();
    for (Core& core : own.core) {
        for (unsigned i = bytes; i < shared_bytes; ++i) own.check(core.memory[i] == 0xff, outside);
        std::free(core.memory);
    }
}

// Runs a kernel's clusters one after the other.
inline void launch_pairs(unsigned ctas, unsigned threads, unsigned bytes, unsigned seed,
                         Policy policy, unsigned* broken, const std::vector<Late>& late,
                         const std::function<void()>& kernel) {
    for (unsigned first = 0; first < ctas && broken[deadlock] == 0; first += 2)
        run_pair(first, ctas, threads, bytes, seed, policy, broken, late, true, kernel);
}

// Runs a kernel's clusters at once, in threads of the system.
inline void launch_pairs_at_once(unsigned ctas, unsigned threads, unsigned bytes, unsigned seed,
                                 Policy policy, unsigned* broken,
                                 const std::function<void()>& kernel) {
    std::vector<std::thread> running;
    std::vector<std::array<unsigned, rules>> own(ctas / 2, std::array<unsigned, rules>{});
    for (unsigned first = 0; first < ctas; first += 2)
        running.emplace_back([=, &own] {
            run_pair(first, ctas, threads, bytes, seed, policy, own[first / 2].data(), {}, false,
                     kernel);
        });
    for (std::thread& each : running) each.join();
    for (const auto& each : own)
        for (unsigned rule = 0; rule < rules; ++rule) broken[rule] += each[rule];
}

}  // namespace emulated

inline unsigned __cvta_generic_to_shared(const void* at) { return emulated::address(at); }
