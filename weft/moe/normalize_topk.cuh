// SPDX-License-Identifier: Apache-2.0
// A routing that the caller made, in the form that dispatch takes: ids in int32 with -1 for no
// expert, weights in float32, logical experts replaced by physical ones. One thread takes one
// entry.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>
#include <weft/device/wait.cuh>

namespace weft {

constexpr u32 normalize_threads = 128;
constexpr i32 no_such_expert = 0x7fffffff;  // an id that int32 cannot hold; dispatch refuses it

// Mirrored by `NormalizeArgs` in moe/kernels.py.
struct NormalizeArgs {
    const void* ids;        // [tokens, top_k], int32 or int64
    const void* weights;    // the same shape
    const i32* num_tokens;  // on the device: rows from there on are padding; null: none
    const i32* replicas;    // [experts][width]: how many, then which; null: ids stay
    i32* out_ids;
    float* out_weights;
    i64 padding_id;
    u32 entries, top_k;
    u32 ids_bytes;  // 4 or 8
    DType number;   // dtype of the weights
    u32 experts, width, rank;
    u32 skips_zeros;  // entries of weight 0 are of no expert
};

WEFT_FN float weight_at(const NormalizeArgs& a, u32 i) {
    if (a.number == DType::fp32) return static_cast<const float*>(a.weights)[i];
    return low_half(a.number, static_cast<const u16*>(a.weights)[i]);
}

// A replica of a logical expert: neighbouring tokens take its replicas in turn, each rank beginning
// with another one.
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
    i32 found = id < -i64(no_such_expert) - 1 || id > no_such_expert ? no_such_expert : i32(id);
    if (!none && a.replicas != nullptr)
        found = u32(found) < a.experts ? replica_of(a, u32(found), token) : no_such_expert;
    a.out_ids[i] = none ? -1 : found;
    a.out_weights[i] = none ? 0.0f : weight;
}

}  // namespace weft
