// Tiles of more than 96 rows. Rows are the first operand, 64 for a warpgroup, or twice 64: a row's
// scale then belongs to a thread, and shared memory, which is busiest, is spared the others.
//
// A thread holds rows lane / 4 and eight further on of its warp's sixteen; of the first, columns
// 8 j + 2 (lane % 4) + {0, 1} in sums 4 j and 4 j + 1, of the second in 4 j + 2 and 4 j + 3. Where
// gating is wanted, j is even for gates and odd for their ups.
#pragma once
#include <weft/kernels/product_finish.cuh>

namespace weft {

constexpr u32 tall_rows = 64, tall_sums = tile_columns / 2;
constexpr u32 half_row = tile_columns, half_pitch = half_row + 16;  // bytes; two make a row
constexpr u32 gated_row = tile_columns / 2, gated_pitch = gated_row + 16;
static_assert(8 * half_pitch <= chunk_bytes && 16 * gated_pitch <= chunk_bytes);

// This warpgroup's b-th block of rows begins there.
WEFT_FN u32 tall_block(u32 b) { return (2 * b + multiplier() / group_threads) * tall_rows; }
// This warp's rows of it.
WEFT_FN u32 tall_row(u32 b) { return tall_block(b) + multiplier() / warp_lanes % 4 * 16; }

// `sum += part * (scale of row * scale of weights)`, rounded once each.
template <Product P>
WEFT_FN void add_tall(float (&sum)[tall_sums], const float (&part)[tall_sums],
                      const StepScales<P>& scales, u32 row) {
    const float x = scales.rows[scale_place(row)], y = scales.rows[scale_place(row + 8)];
    const float first = scales.weights[0], second = scales.weights[P.gated() ? 1 : 0];
    const float by[4] = {__fmul_rn(x, first), __fmul_rn(y, first), __fmul_rn(x, second),
                         __fmul_rn(y, second)};
#pragma unroll
    for (u32 i = 0; i < tall_sums; ++i) sum[i] = __fmaf_rn(part[i], by[i / 2 % 4], sum[i]);
}

// Eight rows by 64 columns at a time through the warp's own memory, then 128 bytes by eight lanes.
template <Product P, u32 blocks>
WEFT_FN void finish_tall_rows(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                              const float (&sum)[blocks][tall_sums], u64 home) {
    const u32 lane = multiplier() % warp_lanes, place = lane % 8 * 16;
    u8* const chunk = s.chunk + multiplier() / warp_lanes * chunk_bytes;
    share_homes(s, tile, home);
#pragma unroll
    for (u32 i = 0; i < blocks * 4; ++i) {
        const u32 b = i / 4, lower = i / 2 % 2, right = i % 2, row = tall_row(b) + lower * 8;
        const float* const x = &sum[b][right * (tall_sums / 2) + lower * 2];
#pragma unroll
        for (u32 j = 0; j < 2; ++j)
            store_blocks(chunk + lane % 8 * half_pitch + j * 64 + lane / 8 * 16,
                         pack_halves(P.number, x[16 * j], x[16 * j + 1]),
                         pack_halves(P.number, x[16 * j + 4], x[16 * j + 5]),
                         pack_halves(P.number, x[16 * j + 8], x[16 * j + 9]),
                         pack_halves(P.number, x[16 * j + 12], x[16 * j + 13]));
        __syncwarp();
#pragma unroll
        for (u32 r = lane / 8; r < 8; r += 4) {
            const u64 to = row + r < tile.live ? place_of(a, s, tile, rank, row + r) : 0;
            if (to != 0)
                store(reinterpret_cast<uint4*>(to + right * half_row + place),
                      *reinterpret_cast<const uint4*>(chunk + r * half_pitch + place));
        }
        __syncwarp();
    }
}

// The largest |x| of each row over this CTA's columns, as bits: of a thread's two rows. Gates in
// place; what was up is no more.
WEFT_FN void gate_tall(const ProductArgs& a, float (&sum)[tall_sums], u32 (&bits)[2]) {
    bits[0] = bits[1] = 0;
#pragma unroll
    for (u32 j = 0; j < tall_sums / 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const float x = gate_of(a, sum[8 * j + i], sum[8 * j + 4 + i]);
            sum[8 * j + i] = x;
            bits[i / 2] = max(bits[i / 2], __float_as_uint(x) & 0x7fffffffu);
        }
#pragma unroll
    for (u32 step = 1; step < 4; step *= 2)
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
            bits[i] = max(bits[i], __shfl_xor_sync(all_lanes, bits[i], step));
}

// Sixteen rows of FP8 through the warp's own memory, then 64 bytes of each by four lanes.
template <Product P>
WEFT_FN void store_tall_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile, u32 rank,
                              const float (&sum)[tall_sums], u32 row, const float (&inverse)[2]) {
    const u32 lane = multiplier() % warp_lanes, place = lane % 4 * 16;
    u8* const chunk = s.chunk + multiplier() / warp_lanes * chunk_bytes;
#pragma unroll
    for (u32 j = 0; j < tall_sums / 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float* const x = &sum[8 * j + 2 * i];
            *reinterpret_cast<u16*>(chunk + (lane / 4 + 8 * i) * gated_pitch + 8 * j +
                                    lane % 4 * 2) =
                u16(pack_e4m3(__fmul_rn(x[0], inverse[i]), __fmul_rn(x[1], inverse[i])));
        }
    __syncwarp();
#pragma unroll
    for (u32 r = lane / 4; r < 16; r += 8)
        if (row + r < tile.live)
            *reinterpret_cast<uint4*>(gated_place<P>(a, tile, rank, row + r) + place) =
                *reinterpret_cast<const uint4*>(chunk + r * gated_pitch + place);
    __syncwarp();
}

// Gated in place, scaled by what both CTAs have seen, and stored as FP8. Tiles take turns in what
// is exchanged, as narrow ones do.
template <Product P, u32 blocks>
WEFT_FN void finish_tall_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile,
                               u32 rank, float (&sum)[blocks][tall_sums], u32 turn) {
    const u32 lane = multiplier() % warp_lanes, half = turn % 2;
    u32 bits[blocks][2];
    meet_multipliers();  // chunks and the other turn of the tile before are free
    if (multiplier() == 0) s.amax_told[half].expect(tile.rows * sizeof(u32));
#pragma unroll
    for (u32 b = 0; b < blocks; ++b) {
        gate_tall(a, sum[b], bits[b]);
        const u32 row = tall_row(b) + lane / 4;
        if (tall_row(b) >= tile.rows || lane % 4 != 0) continue;
        send_word(rank ^ 1, &s.amax_there[half][row], bits[b][0], s.amax_told[half]);
        send_word(rank ^ 1, &s.amax_there[half][row + 8], bits[b][1], s.amax_told[half]);
    }
    s.amax_told[half].await(turn / 2 % 2);
#pragma unroll
    for (u32 b = 0; b < blocks; ++b) {
        if (tall_row(b) >= tile.rows) continue;
        float inverse[2];
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 row = tall_row(b) + lane / 4 + 8 * i;
            const u32 both = max(bits[b][i], s.amax_there[half][row]);
            inverse[i] = settle_scale<P>(a, tile, row, both, rank == 0 && lane % 4 == 0);
        }
        store_tall_gated(a, s, tile, rank, sum[b], tall_row(b), inverse);
    }
}

// A tile of up to 128 rows for each block of a warpgroup.
template <Product P, u32 blocks>
WEFT_FN void make_tall(const ProductArgs& a, ProductShared<P>& s, u8* stages, Ring<P.stages>& ring,
                       const Tile& tile, u32 rank, u32 turn) {
    float sum[blocks][tall_sums];
#pragma unroll
    for (u32 i = 0; i < blocks * tall_sums; ++i) sum[i / tall_sums][i % tall_sums] = 0.0f;
    const u64 home = load_home<P>(a, tile);
    const u32 lane = multiplier() % warp_lanes;
#pragma unroll 1
    for (u32 k = 0; k < P.steps(); ++k, ring.next()) {
        const u32 stage = u32(__cvta_generic_to_shared(stages)) + ring.at * P.stage_bytes();
        s.full[ring.at].await(ring.parity);
#pragma unroll
        for (u32 b = 0; b < blocks; ++b) {
            if (tall_block(b) >= tile.rows) continue;
            float part[tall_sums];
            multiply_step<tile_columns>(part, stage + weight_bytes + tall_block(b) * tile_bytes,
                                        stage);
            add_tall<P>(sum[b], part, s.scales[ring.at], tall_row(b) + lane / 4);
        }
        release_stage(s, ring.at, rank);
    }
    if constexpr (P.gated())
        finish_tall_gated<P, blocks>(a, s, tile, rank, sum, turn);
    else
        finish_tall_rows<P, blocks>(a, s, tile, rank, sum, home);
}

}  // namespace weft
