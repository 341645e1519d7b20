// What the CTAs of a kernel do that sends rows and receives others at the same time.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

// Up to so many tokens, words that are missing are asked for all at once; with more, one at a time:
// others need the cache, too.
constexpr u32 few_tokens = 32;

// What a lane asks for next of the vectors that it misses (`left`, a bit for each).
WEFT_FN u32 asked_next(u32 left, u32 tokens) {
    return tokens > few_tokens ? left & (0u - left) : left;
}

// What one warp does of a kernel's work: units `first`, `first + step`, ...
struct Turns {
    u32 first, step;
};

// The CTAs of a kernel by what they do. The first one is the herald: it grants, and hears what is
// told once for a whole operation; no row waits for it. Then those that tell, that send rows, that
// take rows: in this order, so that whoever waits has been preceded by whoever sends.
struct Crew {
    u32 tellers, senders;

    WEFT_FN bool heralds() const { return blockIdx.x == 0; }
    WEFT_FN bool tells() const { return !heralds() && blockIdx.x <= tellers; }
    WEFT_FN bool sends() const { return blockIdx.x > tellers && blockIdx.x <= tellers + senders; }
    WEFT_FN bool takes() const { return blockIdx.x > tellers + senders; }
    WEFT_FN bool takes_first() const { return blockIdx.x == tellers + senders + 1; }
    WEFT_FN u32 warps() const { return blockDim.x / warp_lanes; }
    WEFT_FN u32 role() const { return tells() ? 0 : sends() ? 1 : 2; }
    // This warp's first unit of what its crew does, and the step to its next.
    WEFT_FN Turns of_senders() const {
        return {(blockIdx.x - 1 - tellers) * warps() + threadIdx.x / warp_lanes, senders * warps()};
    }
    WEFT_FN Turns of_takers() const {
        return {(blockIdx.x - 1 - tellers - senders) * warps() + threadIdx.x / warp_lanes,
                (gridDim.x - 1 - tellers - senders) * warps()};
    }
};

}  // namespace weft
