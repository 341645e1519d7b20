// SPDX-License-Identifier: Apache-2.0
// CTA roles of a kernel that sends rows and receives others at the same time.
#pragma once
#include <weft/device/team.cuh>

namespace weft {

// The units of a role's work that one warp does: `first`, `first + step`, ...
struct WarpUnits {
    u32 first, step;
};

// The CTAs of a kernel by role. CTA 0 is the coordinator: it exchanges the words that ranks send
// once per operation, so no row waits for it. Metadata CTAs, senders and receivers follow in this
// order: receivers spin on data of the others, and the hardware starts CTAs in index order.
struct CtaRoles {
    u32 metadata_ctas, sender_ctas;

    template <CtaRole role> WEFT_FN bool is() const {
        if constexpr (role == CtaRole::coordinator) return blockIdx.x == 0;
        if constexpr (role == CtaRole::metadata)
            return !is<CtaRole::coordinator>() && blockIdx.x <= metadata_ctas;
        if constexpr (role == CtaRole::sender)
            return blockIdx.x > metadata_ctas && blockIdx.x <= metadata_ctas + sender_ctas;
        return blockIdx.x > metadata_ctas + sender_ctas;
    }
    // The role of a CTA other than the coordinator.
    WEFT_FN CtaRole worker_role() const {
        return is<CtaRole::metadata>() ? CtaRole::metadata
               : is<CtaRole::sender>() ? CtaRole::sender
                                       : CtaRole::receiver;
    }
    WEFT_FN bool is_first_receiver() const { return blockIdx.x == metadata_ctas + sender_ctas + 1; }
    WEFT_FN u32 warps() const { return blockDim.x / warp_lanes; }
    WEFT_FN WarpUnits sender_units() const {
        return {(blockIdx.x - 1 - metadata_ctas) * warps() + threadIdx.x / warp_lanes,
                sender_ctas * warps()};
    }
    WEFT_FN WarpUnits receiver_units() const {
        return {(blockIdx.x - 1 - metadata_ctas - sender_ctas) * warps() + threadIdx.x / warp_lanes,
                (gridDim.x - 1 - metadata_ctas - sender_ctas) * warps()};
    }
};

}  // namespace weft
