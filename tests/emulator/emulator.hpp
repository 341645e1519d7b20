// SPDX-License-Identifier: Apache-2.0
// As much of a GPU as the kernels need, on a CPU: a CTA is a thread of the system, its threads are
// fibers that take turns in it, a cluster's CTAs find each other's shared memory. Slow, and in
// order where a GPU is not: what threads see here says nothing about memory order. What they
// promise each other does: memory.hpp.
#pragma once

namespace emulated {

inline void enter() {
    Cta& own = *cta;
    own.body();
    own.done[own.current] = true;
    --own.running;
    _longjmp(own.scheduler, 1);
}

// What a thread did before it arrives at a barrier, and what it knows when it has left.
inline void gather(Clock& gathered) {
    if (!cta->watched) return;
    Clock& own = memory.clocks[self()];
    join(gathered, own);
    ++own[self()];
}
inline void spread(const Clock& gathered) {
    if (cta->watched) join(memory.clocks[self()], gathered);
}

// Lanes of a warp meet. All of them must come: no kernel here lets one leave early. What they
// exchange on the way orders no memory, `__syncwarp` does.
inline void meet_warp(bool orders = false) {
    Warp& warp = cta->warp[cta->current / 32];
    const unsigned phase = warp.phase;
    Clock& gathered = warp.gathered[phase & 1];
    if (orders) gather(gathered);
    if (++warp.arrived == warp.lanes) {
        warp.arrived = 0;
        warp.gathered[~phase & 1].clear();
        ++warp.phase;
    }
    await_change(warp.phase, phase);
    if (orders) spread(gathered);
}

// Both verdicts of a CTA's barrier; two sets in turn, because a fast thread may be in the next one.
inline int meet_cta(bool mine, bool wants_all) {
    Cta& own = *cta;
    const unsigned phase = own.phase, side = phase & 1;
    own.all[side] &= mine;
    own.any[side] |= mine;
    gather(own.gathered[side]);
    if (++own.arrived == own.size.x) {
        own.arrived = 0;
        own.all[side ^ 1] = 1;
        own.any[side ^ 1] = 0;
        own.gathered[side ^ 1].clear();
        ++own.phase;
    }
    await_change(own.phase, phase);
    spread(own.gathered[side]);
    return wants_all ? own.all[side] : own.any[side];
}

inline void arrive_cluster() {
    Cta& own = *cta;
    Cluster& cluster = *own.cluster;
    const std::scoped_lock lock(memory.mutex);
    const unsigned phase = own.awaited[own.current] = cluster.phase;
    gather(cluster.gathered[phase & 1]);
    if (++cluster.arrived == own.neighbours * own.size.x) {
        cluster.arrived = 0;
        cluster.gathered[~phase & 1].clear();
        ++cluster.phase;
    }
}
inline void wait_cluster() {
    const unsigned phase = cta->awaited[cta->current];
    await_change(cta->cluster->phase, phase);
    const std::scoped_lock lock(memory.mutex);
    spread(cta->cluster->gathered[phase & 1]);
}

// The same place in the shared memory of a neighbour.
template <class T> T* neighbour(unsigned rank, T* at) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(at) - &anchor +
                                cta->cluster->anchors[rank]);
}

template <class T> T exchange(T value, unsigned from) {
    Warp& warp = cta->warp[cta->current / 32];
    std::memcpy(&warp.value[cta->current % 32], &value, sizeof value);
    meet_warp();
    std::memcpy(&value, &warp.value[from], sizeof value);
    meet_warp();
    return value;
}

// Calls visit(lane, value) with every lane's value.
template <class T, class Visit> void survey(T value, Visit visit) {
    Warp& warp = cta->warp[cta->current / 32];
    std::memcpy(&warp.value[cta->current % 32], &value, sizeof value);
    meet_warp();
    for (unsigned lane = 0; lane < warp.lanes; ++lane) {
        T theirs;
        std::memcpy(&theirs, &warp.value[lane], sizeof theirs);
        visit(lane, theirs);
    }
    meet_warp();
}

// A fiber for each thread, none of which has begun; returns their stacks.
inline std::unique_ptr<char[]> make_fibers(Cta& own) {
    constexpr std::size_t stack = 128 * 1024;
    std::unique_ptr<char[]> stacks(new char[stack * own.size.x]);
    own.fiber.resize(own.size.x);
    own.done.assign(own.size.x, false);
    own.watch.assign(own.size.x, {});
    own.awaited.assign(own.size.x, 0);
    own.warp.resize((own.size.x + 31) / 32);
    own.running = own.size.x;
    for (unsigned i = 0; i < own.size.x; ++i) {
        ++own.warp[i / 32].lanes;
        ucontext_t& entry = own.fiber[i].entry;
        getcontext(&entry);
        entry.uc_stack.ss_sp = stacks.get() + i * stack;
        entry.uc_stack.ss_size = stack;
        makecontext(&entry, enter, 0);
    }
    return stacks;
}

// Lets one thread of a CTA run until it waits.
inline void resume(Cta& own, unsigned thread) {
    own.current = thread;
    Fiber& fiber = own.fiber[thread];
    if (_setjmp(own.scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.entry);
}

inline void run_cta(Cta& own) {
    cta = &own;
    const std::unique_ptr<char[]> stacks = make_fibers(own);
    while (own.running != 0) {
        for (unsigned i = 0; i < own.size.x; ++i) {
            if (!own.done[i] && !own.watch[i].blocks()) resume(own, i);
        }
        sched_yield();
    }
}

struct Grid {
    unsigned x, y, threads, neighbours = 1, owner = owners;
    unsigned long long base = 0, span = 0;
};

// The same as a rank of a group launches it, whose kernels can be watched.
template <class Site> Grid seen_from(const Site& site, unsigned ranks, Grid grid) {
    grid.owner = site.rank, grid.base = site.base, grid.span = ranks * site.stride;
    return grid;
}

// Runs a kernel to its end, all CTAs at once.
inline void launch(const Grid& grid, const std::function<void()>& kernel) {
    const unsigned ctas = grid.x * grid.y, neighbours = grid.neighbours;
    const bool watched = memory.watched && grid.owner < owners;
    if (watched && ctas * grid.threads >= seats) std::abort();
    if (watched) memory.begin(grid.owner, ctas * grid.threads);
    std::vector<Cluster> clusters(ctas / neighbours);
    for (Cluster& cluster : clusters) cluster.anchors.resize(neighbours);
    Places own_places;
    std::atomic<unsigned> ready{0};
    std::vector<std::thread> running;
    for (unsigned b = 0; b < ctas; ++b)
        running.emplace_back([&, b] {
            Cta own;
            own.block = {b % grid.x, b / grid.x, 0};
            own.grid = {grid.x, grid.y, 1};
            own.size = {grid.threads, 1, 1};
            own.rank = b % neighbours;
            own.neighbours = neighbours;
            own.cluster = &clusters[b / neighbours];
            own.cluster->anchors[own.rank] = &anchor;
            own.body = kernel;
            own.owner = grid.owner;
            own.number = b;
            own.base = grid.base;
            own.span = grid.span;
            own.own_places = &own_places;
            own.watched = watched;
            for (++ready; ready < ctas;) sched_yield();
            run_cta(own);
            // Shared memory lives as long as its thread: nobody leaves before all are done.
            for (++ready; ready < 2 * ctas;) sched_yield();
        });
    for (std::thread& thread : running) thread.join();
    if (watched) memory.end(grid.owner, ctas * grid.threads);
}

}  // namespace emulated
