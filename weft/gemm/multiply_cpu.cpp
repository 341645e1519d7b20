// SPDX-License-Identifier: Apache-2.0
// The matrix product of the grouped GEMM on a CPU: out[r][n] = the dot product of row r and weight
// row n in fp32. The order of its additions depends on `columns` only, so a row's bits do not
// depend on the number of rows, as on GPUs. gemm/reference.py generates the entry point that
// includes this file.
#include <weft/device/cpu.hpp>

namespace weft {

constexpr u32 dot_lanes = 16;  // partial sums, in vector registers

inline float dot(const float* __restrict__ x, const float* __restrict__ w, u64 columns) {
    float sum[dot_lanes] = {};
    const u64 whole = columns - columns % dot_lanes;
    for (u64 k = 0; k < whole; k += dot_lanes)
        for (u32 i = 0; i < dot_lanes; ++i) sum[i] += x[k + i] * w[k + i];
    for (u64 k = whole; k < columns; ++k) sum[k - whole] += x[k] * w[k];
    for (u32 step = dot_lanes / 2; step != 0; step /= 2)
        for (u32 i = 0; i < step; ++i) sum[i] += sum[i + step];
    return sum[0];
}

inline void multiply(const float* x, const float* weights, float* out, u64 rows, u64 n,
                     u64 columns) {
    for (u64 j = 0; j < n; ++j)
        for (u64 r = 0; r < rows; ++r)
            out[r * n + j] = dot(x + r * columns, weights + j * columns, columns);
}

}  // namespace weft
