// SPDX-License-Identifier: Apache-2.0
// Memory as kernels see it that share it: every access that is strong, or of whole vectors, by who
// made it, in which order and at which scope. While somebody watches, each is written down, and a
// clock for each thread tells whether two accesses to one word are ordered by the protocol or only
// by luck (PTX ISA, memory consistency model): what happens before what follows from releases that
// are acquired at a scope that both sides are in, from barriers, and from kernels of one rank that
// follow each other. A scope of a GPU does not reach another rank.
#pragma once
namespace emulated {

enum Order : unsigned { weak, relaxed, acquire, release, acq_rel };
enum Scope : unsigned { no_scope, scope_cta, scope_gpu, scope_sys };
enum Access : unsigned { reads, writes, updates };

struct Event {
    unsigned long long address;
    unsigned bytes, access, order, scope, owner, cta, thread, reserved = 0;
};

inline void join(Clock& to, const Clock& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

constexpr unsigned owners = 3, seats = 1536;  // ranks; threads of a kernel, and the host

// Who did something to a word, when by its own clock, and how.
struct Mark {
    unsigned who = ~0u, at = 0;
    Order order = weak;
    Scope scope = no_scope;

    bool was(const Clock& mine) const { return who < mine.size() && mine[who] >= at; }
    // Are both strong, each at a scope that the other is in?
    bool strong_with(const Mark& other) const {
        const Scope least = who / seats == other.who / seats ? scope_gpu : scope_sys;
        return order != weak && other.order != weak && scope >= least && other.scope >= least;
    }
};

struct Place {
    Mark written;
    std::vector<Mark> read;  // since then
};
using Places = std::unordered_map<unsigned long long, Place>;  // words of four bytes

// What the latest release of a word offers to those who acquire it.
struct Offer {
    Clock to_all, to_owner;
    unsigned owner = ~0u;
};

// Ranks see their shares at different addresses: those count from here.
constexpr unsigned long long shares = 1ull << 56;

struct Memory {
    std::mutex mutex;
    std::atomic<bool> watched{false};
    std::vector<Event> events;
    Places places;  // of the shares
    std::unordered_map<unsigned long long, Offer> offers;
    Clock clocks[owners * seats], owner_clocks[owners];
    unsigned races = 0;
    char first_race[256] = {};  // or the first address that an instruction does not take

    static unsigned host(unsigned owner) { return owner * seats + seats - 1; }
    static Clock& own(Clock& clock, unsigned who) {
        if (clock.size() < owners * seats) clock.resize(owners * seats);
        ++clock[who];
        return clock;
    }

    void begin(unsigned owner, unsigned threads) {
        const std::scoped_lock lock(mutex);
        Clock& past = own(owner_clocks[owner], host(owner));
        for (unsigned i = 0; i < threads; ++i)
            own(clocks[owner * seats + i] = past, owner * seats + i);
        ++past[host(owner)];
    }
    void end(unsigned owner, unsigned threads) {
        const std::scoped_lock lock(mutex);
        for (unsigned i = 0; i < threads; ++i) join(owner_clocks[owner], clocks[owner * seats + i]);
    }

    void race(const Mark& one, const Mark& other, unsigned long long word, bool wrote,
              bool writing) {
        if (races++ != 0) return;
        std::snprintf(first_race, sizeof first_race,
                      "rank %u thread %u %s %#llx (order %u, scope %u) beside rank %u thread %u, "
                      "which %s it (order %u, scope %u)",
                      other.who / seats, other.who % seats, writing ? "writes" : "reads", word,
                      unsigned(other.order), unsigned(other.scope), one.who / seats,
                      one.who % seats, wrote ? "wrote" : "read", unsigned(one.order),
                      unsigned(one.scope));
    }
    void touch(Places& in, unsigned long long at, unsigned bytes, bool writing, const Mark& mine,
               const Clock& clock) {
        for (unsigned long long word = at & ~3ull; word < at + bytes; word += 4) {
            Place& place = in[word];
            const Mark& written = place.written;
            if (written.who != ~0u && !written.was(clock) && !written.strong_with(mine))
                race(written, mine, word, true, writing);
            if (!writing) {
                for (Mark& read : place.read)
                    if (read.who == mine.who) {
                        read = mine;
                        goto next;
                    }
                place.read.push_back(mine);
            } else {
                for (const Mark& read : place.read)
                    if (!read.was(clock) && !read.strong_with(mine))
                        race(read, mine, word, false, true);
                place = {mine, {}};
            }
        next:;
        }
    }
    // What this rank's host reads or writes of the shares between two kernels.
    void touch_by_host(unsigned owner, unsigned long long offset, unsigned bytes, bool writing) {
        const std::scoped_lock lock(mutex);
        const Clock& clock = own(owner_clocks[owner], host(owner));
        const Mark mine{host(owner), clock[host(owner)], weak, no_scope};
        touch(places, shares + offset, bytes, writing, mine, clock);
    }
    void acquire_from(unsigned long long at, unsigned owner, Scope scope, Clock& clock) {
        const Offer& offer = offers[at];
        if (scope == scope_sys) join(clock, offer.to_all);
        if (scope >= scope_gpu && offer.owner == owner) join(clock, offer.to_owner);
    }
    void release_to(unsigned long long at, unsigned owner, Scope scope, const Clock& clock,
                    bool keeps) {
        Offer& offer = offers[at];
        if (!keeps) offer = {};
        if (scope == scope_sys) join(offer.to_all, clock);
        if (offer.owner != owner) offer.to_owner = {};
        offer.owner = owner;
        join(offer.to_owner, clock);
    }
};
inline Memory memory;

// This thread's seat.
inline unsigned self() { return cta->owner * seats + cta->number * cta->size.x + cta->current; }

inline unsigned long long place_of(const void* at) {
    const unsigned long long address = reinterpret_cast<unsigned long long>(at),
                             offset = address - cta->base;
    return offset < cta->span ? shares + offset : address;
}

// Runs `act`, which is one access to memory, and writes it down.
template <class Act>
auto access(const void* at, unsigned bytes, Access kind, Order order, Scope scope, Act act) {
    if (cta == nullptr || !cta->watched) return act();
    const std::scoped_lock lock(memory.mutex);
    const unsigned who = self(), owner = cta->owner;
    Clock& clock = memory.clocks[who];
    const unsigned long long place = place_of(at);
    const Mark mine{who, clock[who], order, scope};
    if (place % bytes != 0 && memory.races++ == 0)
        std::snprintf(memory.first_race, sizeof memory.first_race,
                      "rank %u thread %u: %u bytes at %#llx", owner, who % seats, bytes, place);
    // Memory of the rank's own is somebody else's after the kernel.
    Places& in = place < shares ? *static_cast<Places*>(cta->own_places) : memory.places;
    memory.touch(in, place, bytes, kind != reads, mine, clock);
    if (kind != writes && (order == acquire || order == acq_rel))
        memory.acquire_from(place, owner, scope, clock);
    if (kind != reads && (order == release || order == acq_rel)) {
        memory.release_to(place, owner, scope, clock, kind == updates);
        ++clock[who];
    } else if (kind == writes) {
        memory.offers.erase(place);
    }
    const Event event{place, bytes, kind, order, scope, owner, cta->number, who % seats};
    // A poll is told once.
    if (kind != reads || cta->told.insert(place * 2048 + order * 512 + cta->current).second)
        memory.events.push_back(event);
    return act();
}

template <unsigned bits> struct Words;
template <> struct Words<32> {
    using type = unsigned;
};
template <> struct Words<64> {
    using type = unsigned long long;
};
template <unsigned bits> using Word = typename Words<bits>::type;

template <class T, unsigned count> struct Vector {
    T word[count];
};

// Strong loads are polls: others of the CTA go on first.
template <class T, unsigned count>
Vector<T, count> load_words(const void* at, Order order, Scope scope) {
    if (order != weak) yield();
    return access(at, sizeof(T) * count, reads, order, scope, [&] {
        Vector<T, count> v;
        for (unsigned i = 0; i < count; ++i) {
            const T* from = static_cast<const T*>(at) + i;
            if (order == weak)
                v.word[i] = *from;
            else
                v.word[i] = __atomic_load_n(from, __ATOMIC_ACQUIRE);
        }
        return v;
    });
}
template <class T, unsigned count>
void store_words(void* at, Vector<T, count> v, Order order, Scope scope) {
    access(at, sizeof(T) * count, writes, order, scope, [&] {
        for (unsigned i = 0; i < count; ++i) {
            T* to = static_cast<T*>(at) + i;
            if (order == weak)
                *to = v.word[i];
            else
                __atomic_store_n(to, v.word[i], __ATOMIC_RELEASE);
        }
    });
}

}  // namespace emulated

#define __NV_ATOMIC_RELAXED emulated::relaxed
#define __NV_ATOMIC_ACQUIRE emulated::acquire
#define __NV_ATOMIC_RELEASE emulated::release
#define __NV_ATOMIC_ACQ_REL emulated::acq_rel
#define __NV_THREAD_SCOPE_BLOCK emulated::scope_cta
#define __NV_THREAD_SCOPE_DEVICE emulated::scope_gpu
#define __NV_THREAD_SCOPE_SYSTEM emulated::scope_sys

// On the host every order is the strongest: whether a weaker one suffices, the clocks tell.
template <class T> T __nv_atomic_load_n(T* at, emulated::Order order, emulated::Scope scope) {
    emulated::yield();
    return emulated::access(at, sizeof(T), emulated::reads, order, scope,
                            [&] { return __atomic_load_n(at, __ATOMIC_SEQ_CST); });
}
template <class T>
void __nv_atomic_store_n(T* at, T value, emulated::Order order, emulated::Scope scope) {
    emulated::access(at, sizeof(T), emulated::writes, order, scope,
                     [&] { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); });
}
template <class T>
T __nv_atomic_fetch_add(T* at, T value, emulated::Order order, emulated::Scope scope) {
    return emulated::access(at, sizeof(T), emulated::updates, order, scope,
                            [&] { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); });
}
template <class T>
T __nv_atomic_fetch_max(T* at, T value, emulated::Order order, emulated::Scope scope) {
    return emulated::access(at, sizeof(T), emulated::updates, order, scope, [&] {
        T seen = __atomic_load_n(at, __ATOMIC_SEQ_CST);
        while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, false,
                                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
        return seen;
    });
}
template <class T>
bool __nv_atomic_compare_exchange_n(T* at, T* expected, T value, bool, emulated::Order order,
                                    emulated::Order, emulated::Scope scope) {
    return emulated::access(at, sizeof(T), emulated::updates, order, scope, [&] {
        return __atomic_compare_exchange_n(at, expected, value, false, __ATOMIC_SEQ_CST,
                                           __ATOMIC_SEQ_CST);
    });
}

// For the test: begin or end to watch; what was seen.
#define ENTRY extern "C" __attribute__((visibility("default")))
ENTRY void watch(unsigned on) {
    emulated::Memory& memory = emulated::memory;
    memory.watched = on != 0;
    if (on == 0) return;
    memory.events.clear(), memory.places.clear(), memory.offers.clear();
    for (emulated::Clock& clock : memory.clocks) clock.clear();
    for (emulated::Clock& clock : memory.owner_clocks) clock.clear();
    memory.races = 0, memory.first_race[0] = 0;
}
ENTRY const char* seen_race() { return emulated::memory.first_race; }
ENTRY unsigned seen_events(const emulated::Event** events) {
    *events = emulated::memory.events.data();
    return unsigned(emulated::memory.events.size());
}
ENTRY void touched_by_host(unsigned owner, unsigned long long offset, unsigned bytes,
                           unsigned writing) {
    if (emulated::memory.watched)
        emulated::memory.touch_by_host(owner, offset, bytes, writing != 0);
}
#undef ENTRY
