// SPDX-License-Identifier: Apache-2.0
// Converts the caller's top-k to the form for dispatch: int32 ids with -1 for no expert, float32
// weights, physical instead of logical experts. Grid: one thread per entry.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 normalize_threads = 128;
constexpr i32 no_such_expert = 0x7fffffff;  // replaces an invalid id; dispatch rejects it

// Mirrored by `NormalizeArgs` in moe/routing/kernels.py.
struct NormalizeArgs {
    const void* ids;        // [tokens, top_k], int32 or int64
    const void* weights;    // the same shape
    const i32* num_tokens;  // rows from *num_tokens on are padding; null: no padding
    const i32* replicas;    // [experts][width]: count, then physical ids; null: ids stay
    i32* out_ids;
    float* out_weights;
    i64 padding_id;
    u32 entries, top_k;
    u32 ids_bytes;  // 4 or 8
    DType dtype;    // dtype of the weights
    u32 experts, width, rank;
    u32 skips_zeros;  // entries of weight 0 become -1
};

WEFT_FN float weight_at(const NormalizeArgs& a, u32 i) {
    if (a.dtype == DType::fp32) return static_cast<const float*>(a.weights)[i];
    return low_half(a.dtype, static_cast<const u16*>(a.weights)[i]);
}

// Returns a replica of a logical expert. Tokens use the replicas round-robin, and each rank
// starts with a different one.
WEFT_FN i32 replica_of(const NormalizeArgs& a, u32 expert, u32 token) {
    const i32* row = a.replicas + u64(expert) * a.width;
    return row[1 + (token + a.rank) % u32(row[0])];
}

WEFT_FN void normalize_topk(const NormalizeArgs& a) {
    griddep_wait();
    launch_dependents();
    const u32 i = blockIdx.x * normalize_threads + threadIdx.x;
    if (i >= a.entries) return;
    const u32 token = i / a.top_k;
    const i64 id = id_at(a.ids, a.ids_bytes, i);
    const float weight = weight_at(a, i);
    const bool none = id == -1 || id == a.padding_id || (a.skips_zeros != 0 && weight == 0.0f) ||
                      (a.num_tokens != nullptr && i64(token) >= *a.num_tokens);
    i32 result = id < -i64(no_such_expert) - 1 || id > no_such_expert ? no_such_expert : i32(id);
    if (!none && a.replicas != nullptr)
        result = u32(result) < a.experts ? replica_of(a, u32(result), token) : no_such_expert;
    a.out_ids[i] = none ? -1 : result;
    a.out_weights[i] = none ? 0.0f : weight;
}

}  // namespace weft
