// SPDX-License-Identifier: Apache-2.0
// Compile-time parameters of the grouped GEMM for Hopper (sizes, tiles, dtypes, epilogue), and its
// arguments.
#pragma once
#include <weft/device/header.cuh>
#include <weft/device/tma.cuh>
#include <weft/gemm/wgmma.cuh>

namespace weft {

enum class Epilogue : u32 { store, push, gated, gated_fp8, store_fp8 };
enum class Bias : u32 { none, bf16, fp16, fp32 };

// Whether a GEMM is a kernel of its own or one of the two of experts' kernel (grouped_mlp.cuh).
enum class Part : u32 { alone, up, down };

constexpr u32 block_n = 128;                  // weight rows per CTA; gated: half gate, half up
constexpr u32 gated_block_n = block_n / 2;    // columns per CTA of a gated result
constexpr u32 cluster_n = 2 * block_n;        // weight rows of the two CTAs of a cluster
constexpr u32 block_k_bytes = swizzle_bytes;  // of k per stage; in FP8 also one scale block
constexpr u32 scale_block = 128;              // FP8: weights have a scale per block of 128 x 128
constexpr u32 weight_tile_bytes = block_n * block_k_bytes;

// MXFP4 weights consist of units of 64 rows by a k block: values, then one exponent byte per 32
// columns of a row (expand.cuh). A CTA has two units per k block.
constexpr u32 unit_n = 64;
constexpr u32 unit_value_bytes = unit_n * block_k_bytes / 2;
constexpr u32 unit_bytes = unit_value_bytes + unit_n * block_k_bytes / 32;
constexpr u32 unit_pair_bytes =
    9 * 1024;  // per stage, padded so that the rows after it are aligned
static_assert(unit_pair_bytes >= 2 * unit_bytes && unit_pair_bytes % 1024 == 0);

constexpr u32 block_m_granularity = 16;
// Tile heights are multiples of 16 up to this, and of 32 above. In FP8 this is also the highest
// tile with A and B swapped; BF16 and FP16 swap all tiles.
constexpr u32 max_swap_ab_m = 160;
constexpr u32 normal_m = 128;          // FP8: rows are wgmma's A operand
constexpr u32 split_m = 2 * normal_m;  // FP8: each CTA of the cluster takes half of the rows
constexpr u32 wide_n = 2 * cluster_n;  // FP8: each CTA of the cluster takes 256 weight rows
constexpr u32 scale_k_blocks = 4;      // k blocks whose scales are loaded together

constexpr u32 math_warpgroups = 2;
constexpr u32 math_threads = math_warpgroups * warpgroup_threads;
constexpr u32 math_warps = math_threads / warp_lanes;
constexpr u32 gemm_threads = warpgroup_threads + math_threads;  // one warpgroup loads

constexpr u32 row_boxes = 4;  // TMA boxes of 8, 16, 32 and 64 rows

// Mirrored by `GemmShape` in gemm/kernels.py.
struct GemmShape {
    u32 experts, n, k;  // weights are [experts, n, k]
    u32 block_m;        // the highest tile
    u32 stages;         // k blocks, or pairs of them, in flight
    Epilogue epilogue;
    DType out_dtype;  // of 16-bit results
    Operand operand;
    Bias bias;
    bool prefetch_weights;  // counts and weights were written before the previous kernel started
    bool flag_in_data;      // push: the owner polls the rows themselves
    bool situ;              // gated: gate and up are squashed by tanh
    bool relu2;             // store and store_fp8: sums are squared after ReLU
    Part part = Part::alone;

    constexpr bool in_mlp() const { return part != Part::alone; }
    // The first position of the GEMM's experts in GemmShared::tile_ends.
    constexpr u32 first_position() const { return part == Part::down ? experts : 0; }
    constexpr bool is_fp8() const { return operand == Operand::fp8; }
    constexpr bool is_mxfp4() const { return operand == Operand::mxfp4; }
    constexpr bool has_fp8_rows() const { return is_fp8() || is_mxfp4(); }
    // MXFP4 takes so many instructions per byte that one CTA cannot saturate the memory bandwidth.
    // With low tiles, an SM has room for several.
    constexpr u32 ctas_per_sm() const {
        return !is_mxfp4() || block_m > 96 ? 1 : block_m > 32 ? 2 : 3;
    }
    // Whether each CTA of a cluster loads half of the rows for both. With few rows that saves
    // little, and each CTA would wait for the other.
    constexpr bool shares_rows() const { return ctas_per_sm() < 3; }
    constexpr Operand row_operand() const { return is_mxfp4() ? Operand::fp8 : operand; }
    // Tiles over the weight rows of an expert per M-block; with split tiles see tiles_of.
    constexpr u32 n_blocks() const {
        const u32 rows = has_wide_n() ? wide_n : cluster_n;
        return (n + rows - 1) / rows;
    }
    constexpr u32 k_blocks() const {
        const u32 bytes = k * (has_fp8_rows() ? 1 : 2);
        return (bytes + block_k_bytes - 1) / block_k_bytes;
    }
    // Whether all tiles pass through whole rings of stages.
    constexpr bool has_whole_rings() const { return k_blocks() % stages == 0; }
    constexpr u32 weight_bytes() const {
        return is_mxfp4() ? unit_pair_bytes : (has_wide_n() ? 2 : 1) * weight_tile_bytes;
    }
    constexpr u32 stage_bytes() const { return weight_bytes() + cta_m() * block_k_bytes; }
    // Warps of the loading warpgroup that load scales, a row per lane as far as possible. In a
    // kernel of two GEMMs the last one publishes tiles.
    constexpr u32 scale_warps() const {
        return cta_m() <= 32 ? 1 : cta_m() <= 64 || in_mlp() ? 2 : 3;
    }
    // Scales of a row per k block. FP8 weights have separate ones for gate and up.
    constexpr u32 scales_of_row() const { return is_fp8() && (gated() || has_wide_n()) ? 2 : 1; }
    constexpr bool gated_fp8() const { return epilogue == Epilogue::gated_fp8; }
    constexpr bool gated() const { return gated_fp8() || epilogue == Epilogue::gated; }
    constexpr bool stores_fp8() const { return gated_fp8() || epilogue == Epilogue::store_fp8; }
    // The difference between a tile height and the next lower one. Fewer heights compile faster.
    constexpr u32 m_granularity(u32 m) const {
        return m <= max_swap_ab_m ? block_m_granularity : 2 * block_m_granularity;
    }
    constexpr bool has_split_m() const { return is_fp8() && block_m == weft::split_m; }
    // Whether each CTA takes 256 weight rows of a tile of up to 128 rows. Rows then pass from L2
    // half as often: with 128 rows, up takes 21 % less time than with 128 weight rows (H200,
    // 2026-11-29). With one expert there may be too few tiles.
    constexpr bool has_wide_n() const {
        return is_fp8() && (has_split_m() || (block_m == normal_m && experts > 1));
    }
    // Whether clusters draw their tiles from a counter (tile_scheduler.cuh).
    constexpr bool draws_tickets() const { return has_split_m() || in_mlp(); }
    // Tiles that a cluster takes without a ticket.
    constexpr u32 undrawn_tiles() const { return in_mlp() ? 0 : 1; }
    // Tickets in shared memory. A ticket overwrites one whose tile the math warps of both CTAs have
    // begun: the loader is at most `stages` stages ahead of them, and tiles have at least one.
    constexpr u32 ticket_ring() const { return draws_tickets() ? stages + 2 : 1; }
    // Maximum rows that one CTA multiplies.
    constexpr u32 cta_m() const { return has_split_m() ? normal_m : block_m; }
    // Whether the CTAs of a cluster have columns of the same rows of a gated result.
    constexpr bool exchanges_amax() const { return gated_fp8() && !has_wide_n(); }
    // An expert with more than block_m rows is split: in FP8 into tiles of this many rows and a
    // last one with the rest, else into tiles of equal height.
    constexpr u32 full_m() const {
        return is_fp8() && !has_split_m() && block_m > normal_m ? normal_m : block_m;
    }
};

// In global memory; 0 between launches.
struct TicketCounter {
    u32 drawn, finished;  // tickets; clusters that have drawn their last
};

// Mirrored by `GemmArgs` in gemm/kernels.py. Strides are in elements.
struct GemmArgs {
    TensorMap weights_map, rows_map[row_boxes];
    const float *row_scales, *weight_scales;
    void* out;
    float* out_scales;
    const u64* dst_addr;    // push: destination of each row; 0 skips the row
    const u32* abort_flag;  // push: if it is not 0, no row is stored; may be null
    const void* bias;
    const i32 *counts, *starts;
    const u8* weights;  // the tensor of weights_map; MXFP4: units, which have no map
    i64 row_scale_stride, k_scale_stride;
    float beta, linear_beta;     // situ
    u32 max_rows, rows;          // per expert; in total
    float alpha, offset, limit;  // limit: infinity without a limit
    u32 ticket_slot;             // kernels that draw tickets: their counter, or 0 for none
};

// In global memory, a kernel of two GEMMs: 0 between launches.
template <u32 experts> struct MlpState {
    TicketCounter tickets;
    u32 num_up_tiles[experts];  // of each expert: up tiles that CTAs have stored
};

WEFT_FN u32 round_up(u32 x, u32 to) { return (x + to - 1) / to * to; }

}  // namespace weft
