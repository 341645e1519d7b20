// The bulk copy engine of few SMs on a CPU: copies happen late, in any order, and not before a wait
// demands them; a copy that no fence orders behind what it must follow is counted. One engine for
// each CTA, because a CTA is a thread of the system; its shared memory begins as garbage.
#pragma once
#include <cstdlib>
#include <random>

namespace emulated {

// What a kernel did that a GPU would not forgive, and what it would do slowly.
enum Rule : unsigned {
    behind_the_flags,    // a load without a whole fence since the last barrier of the CTA
    behind_the_readers,  // a load without a fence since threads said that they had read the stage
    aligned,             // an address or a size that is not of whole 16 bytes
    finished,            // the CTA ended before its copies
    one_whole_fence,     // a thread fenced the whole GPU's memory more than once
    rules
};
inline std::atomic<unsigned> broken[rules];

struct Barrier {
    unsigned phase : 1, by_bytes : 1, expects : 1, count : 13, pending : 16;
    int bytes;

    void settle() {
        if (pending != 0 || bytes != 0) return;
        phase ^= 1;
        by_bytes = expects;
        expects = 0;
        pending = count;
    }
    void init(unsigned threads) { *this = {0, 0, 0, threads, threads, 0}; }
    void arrive() {
        --pending;
        settle();
    }
    void expect(unsigned more) {
        bytes += int(more);
        expects = 1;
        arrive();
    }
    void complete(unsigned less) {
        bytes -= int(less);
        settle();
    }
};
static_assert(sizeof(Barrier) == 8);

struct Copy {
    char* to;
    const char* from;
    unsigned bytes, issuer, group;
    Barrier* arrival;        // of a load; null of a store
    std::vector<char> held;  // what a store has read and not yet written
};

struct Issuer {
    unsigned group = 0, whole_fences = 0, fenced_phase = ~0u;
    bool fenced = false;
};

struct Engine {
    std::vector<Copy> open;
    std::vector<Issuer> issuer{1024};
    std::mt19937 random{std::random_device{}()};
    char* memory = nullptr;

    ~Engine() {
        if (!open.empty()) ++broken[finished];
        std::free(memory);
    }
    Issuer& mine() { return issuer[cta->current]; }

    // The next thing that may happen to one copy; a store reads, and later writes.
    void advance(std::size_t i) {
        Copy& copy = open[i];
        if (copy.arrival == nullptr && copy.held.empty()) {
            copy.held.assign(copy.from, copy.from + copy.bytes);
            return;
        }
        std::memcpy(copy.to, copy.arrival ? copy.from : copy.held.data(), copy.bytes);
        if (copy.arrival) copy.arrival->complete(copy.bytes);
        open.erase(open.begin() + long(i));
    }
    // Stores linger: what they read may be gone by then if nobody has waited.
    void work() {
        if (open.empty() || random() % 2 == 0) return;
        const std::size_t i = random() % open.size();
        if (open[i].arrival || random() % 8 == 0) advance(i);
    }
    void issue(Copy copy) {
        const auto whole = [](const void* at) {
            return reinterpret_cast<std::size_t>(at) % 16 == 0;
        };
        if (!whole(copy.to) || !whole(copy.from) || copy.bytes % 16) ++broken[aligned];
        open.push_back(std::move(copy));
    }
    void load(void* to, const void* from, unsigned bytes, Barrier* arrival) {
        if (mine().fenced_phase != cta->phase) ++broken[behind_the_flags];
        if (!mine().fenced) ++broken[behind_the_readers];
        issue({static_cast<char*>(to),
               static_cast<const char*>(from),
               bytes,
               cta->current,
               0,
               arrival,
               {}});
    }
    void store(void* to, const void* from, unsigned bytes) {
        issue({static_cast<char*>(to),
               static_cast<const char*>(from),
               bytes,
               cta->current,
               mine().group,
               nullptr,
               {}});
    }
    // This thread's stores but those of its latest `left` groups have read, or have written as
    // well.
    void drain(unsigned left, bool written) {
        for (std::size_t i = open.size(); i-- > 0;) {
            const Copy& copy = open[i];
            if (copy.arrival || copy.issuer != cta->current || copy.group + left >= mine().group)
                continue;
            if (copy.held.empty()) advance(i);
            if (written) advance(i);
        }
    }
    void fence(bool whole) {
        mine().fenced = true;
        if (!whole) return;
        mine().fenced_phase = cta->phase;
        if (++mine().whole_fences > 1) ++broken[one_whole_fence];
    }
    void await(Barrier& barrier, unsigned parity) {
        while (barrier.phase == parity) {
            work();
            yield();
        }
        if (!barrier.by_bytes) mine().fenced = false;
        // Some threads are late: what they go on to read must still be there.
        for (unsigned turns = random() % 16 == 0 ? random() % 64 : 0; turns != 0; --turns) yield();
    }
};
inline thread_local Engine engine;

inline unsigned char* dynamic_shared(std::size_t bytes) {
    if (engine.memory == nullptr) {
        engine.memory = static_cast<char*>(std::aligned_alloc(128, 227 * 1024));
        std::memset(engine.memory, 0xA5, 227 * 1024);
    }
    if (bytes > 227 * 1024) std::abort();
    return reinterpret_cast<unsigned char*>(engine.memory);
}

}  // namespace emulated
