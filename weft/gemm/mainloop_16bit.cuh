// SPDX-License-Identifier: Apache-2.0
// The mainloop of BF16 and FP16. There are no scales, so the tensor cores accumulate over all k
// blocks without interruption. All tiles are swapped, with up to 256 rows; mainloop_fp8.cuh
// documents which sums a thread holds.
//
// With gating, the weights alternate eight rows of gate and the eight of up for the same columns.
// A thread thus has both for column lane / 4 of its warp's eight: for rows
// 8 j + 2 (lane % 4) + {0, 1}, gates in sums 4 j and 4 j + 1, ups in 4 j + 2 and 4 j + 3.
#pragma once
#include <weft/gemm/math_warps.cuh>
#include <weft/gemm/pipeline.cuh>
#include <weft/gemm/shape.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

// Each k block is issued before the previous one is complete, so that the tensor cores do not wait
// for the release of a stage.
template <GemmShape S, u32 N>
WEFT_FN void mainloop_16bit(GemmShared<S>& smem, PipelineState<S.stages>& pipeline,
                            const Operands<S>& operands, u32 rank, float (&sum)[N / 2]) {
    static_assert(S.stages >= 2);  // one stage is read while the next is loaded
    const auto issue = [&] {
        smem.full[pipeline.stage].wait(pipeline.parity);
        const u32 offset = descriptor_offset<S>(pipeline.stage);
        issue_k_block<S.operand, N>(sum, operands.swap_a + offset, operands.swap_b + offset, true);
    };
    u32 last = pipeline.stage;
    issue();
    pipeline.advance();
#pragma unroll 1
    for (u32 k = 1; k < S.k_blocks(); ++k, pipeline.advance()) {
        issue();
        wgmma_wait<1>();
        release_stage(smem, last, rank);
        last = pipeline.stage;
    }
    wait_accumulator<0>(sum);
    release_stage(smem, last, rank);
}

}  // namespace weft
