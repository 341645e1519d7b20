// Tiles of numbers of two bytes, BF16 and FP16. There are no scales: a step's products add to the
// sums of those before, on the tensor cores, and nothing stands between one step and the next. All
// tiles are low ones (product_sums.cuh), up to 256 rows high.
//
// Gated, weights lie as eight gates, then the ups of the same eight columns, and so on. So a thread
// has both: of column lane / 4 of its warp's eight, for rows 8 j + 2 (lane % 4) + {0, 1}, gates in
// sums 4 j and 4 j + 1, ups in 4 j + 2 and 4 j + 3.
#pragma once
#include <weft/gemm/epilogue_gated.cuh>

namespace weft {

constexpr u32 halves_rows = 32, halves_pitch = gated_columns * 2 + 16;  // of a chunk; bytes
static_assert(halves_rows * halves_pitch <= half_chunk);

// Each step begins before the last one's end: the tensor cores never wait for a stage to be freed.
template <Product P, u32 N>
WEFT_FN void sum_halves(ProductShared<P>& s, Ring<P.stages>& ring, const Operands<P>& from,
                        u32 rank, float (&sum)[N / 2]) {
    static_assert(P.stages >= 2);  // one is read while the next is awaited
    const auto begin = [&] {
        s.full[ring.at].await(ring.parity);
        const u32 skip = skip_to<P>(ring.at);
        begin_step<P.operand, N>(sum, from.half + skip, from.rows + skip, true);
    };
    u32 last = ring.at;
    begin();
    ring.next();
#pragma unroll 1
    for (u32 k = 1; k < P.steps(); ++k, ring.next()) {
        begin();
        await_products<1>();
        release_stage(s, last, rank);
        last = ring.at;
    }
    await_step<0>(sum);
    release_stage(s, last, rank);
}

// What a thread adds to its two columns; loaded early, for it takes a trip to memory.
template <Product P> struct Biases {
    float of[2] = {};

    WEFT_FN static float load(const ProductArgs& a, u32 expert, u32 column) {
        if (column >= P.n) return 0.0f;
        const u64 at = u64(expert) * P.n + column;
        if constexpr (P.bias == Bias::fp32) return static_cast<const float*>(a.bias)[at];
        constexpr Number number = P.bias == Bias::bf16 ? Number::bf16 : Number::fp16;
        return low_half(number, static_cast<const u16*>(a.bias)[at]);
    }
    WEFT_FN Biases(const ProductArgs& a, const Tile& tile, u32 rank) {
        if constexpr (P.bias != Bias::none) {
            const u32 warp = multiplier() / warp_lanes, lane = multiplier() % warp_lanes;
            constexpr u32 width = P.gated() ? 8 : 16;  // a warp's columns of the result
            const u32 first = (tile.pair * 2 + rank) * (width * weight_warps);
            const u32 column = first + warp * width + lane / 4;
            of[0] = load(a, tile.expert, column);
            of[1] = load(a, tile.expert, column + (P.gated() ? P.n / 2 : 8));
        }
    }
    template <u32 sums> WEFT_FN void add_to(float (&sum)[sums]) const {
        if constexpr (P.bias != Bias::none)
#pragma unroll
            for (u32 i = 0; i < sums; ++i) sum[i] += of[i / 2 % 2];
    }
};

// Thirty-two gated rows at a time through shared memory, then 128 bytes of each by eight threads.
template <Product P, u32 N>
WEFT_FN void finish_halves_gated(const ProductArgs& a, ProductShared<P>& s, const Tile& tile,
                                 u32 rank, const float (&sum)[N / 2]) {
    const u32 self = multiplier(), lane = self % warp_lanes, warp = self / warp_lanes;
    const u32 row = self / 8, place = self % 8 * 16;
    const u32 column = tile.pair * tile_columns + rank * gated_columns + place / 2;
    meet_multipliers();  // chunks of the tile before are free
#pragma unroll
    for (u32 c = 0; c < (N + halves_rows - 1) / halves_rows; ++c) {
        u8* const chunk = s.chunk + c % 2 * half_chunk;
        u32 pair[4] = {};
#pragma unroll
        for (u32 i = 0; i < 4 && 4 * c + i < N / 8; ++i) {
            const float* const x = &sum[4 * (4 * c + i)];
            pair[i] = pack_halves(P.number, gate_of(a, x[0], x[2]), gate_of(a, x[1], x[3]));
        }
        store_transposed(chunk + lane * halves_pitch + warp * 16, pair[0], pair[1], pair[2],
                         pair[3]);
        meet_multipliers();
        const u32 r = c * halves_rows + row;
        if (r < tile.live && column < P.n / 2) {
            const u64 to = u64(tile.first + r) * (P.n / 2) + column;
            store(reinterpret_cast<uint4*>(static_cast<u8*>(a.out) + to * 2),
                  *reinterpret_cast<const uint4*>(chunk + row * halves_pitch + place));
        }
    }
}

}  // namespace weft
