// SPDX-License-Identifier: Apache-2.0
// weft.moe.route in one launch: one warp computes a token's experts and their weights. Lane l holds
// experts l, l + 32, ... Each of top_k rounds selects the largest choice and, among equal ones, the
// lowest id. Grid: ceil(tokens / route_warps) CTAs.
#pragma once
#include <weft/device/copy.cuh>
#include <weft/device/team.cuh>

namespace weft {

constexpr u32 route_warps = 4;         // per CTA, one token each
constexpr float sum_epsilon = 1e-20f;  // SUM_EPSILON in moe/routing/router.py
constexpr u32 no_key = 0;              // less than the key of every value: not selectable

enum class Score : u32 { softmax, sigmoid, softmax_chosen, sqrtsoftplus };

// Compile-time parameters; `weft.moe.Routing` documents the fields.
struct Routing {
    u32 experts, top_k;
    Score score;
    bool renormalise, correction;
    u32 groups, top_groups, group_best;

    constexpr u32 each() const { return (experts + warp_lanes - 1) / warp_lanes; }
    constexpr u32 group_size() const { return experts / groups; }
    constexpr bool by_logits() const { return !correction && groups == 1; }
    // Lanes that scan one group together: a power of two.
    constexpr u32 group_lanes() const {
        u32 lanes = warp_lanes;
        while (lanes > 1 && lanes * groups > warp_lanes) lanes /= 2;
        return lanes;
    }
};

// Mirrored by `RouteArgs` in moe/routing/kernels.py. Strides are in elements.
struct RouteArgs {
    const void* logits;
    const float* correction;
    const i32* num_tokens;
    i32* ids;
    float* weights;
    i64 row_stride, column_stride;
    u32 tokens;
    DType dtype;  // dtype of the logits
    float scale;
};

// Shared memory of one warp.
template <Routing R> struct RouteScratch {
    static constexpr u32 grouped = R.groups > 1;
    float score[R.experts];
    float choice[grouped ? R.experts : 1];
    u32 group_score[R.groups];
    bool kept[R.groups];
};

// Maps a value to an integer key in the order of choice: NaN is the largest, -0 equals +0, and
// every key is greater than `no_key`.
WEFT_FN u32 key_of(float x) {
    if (x != x) return 0xffffffffu;
    const u32 bits = __float_as_uint(x + 0.0f), sign = 0x80000000u;
    return bits & sign ? ~bits : bits | sign;
}

WEFT_FN float value_of_key(u32 key) {
    const u32 sign = 0x80000000u;
    return __uint_as_float(key & sign ? key ^ sign : ~key);
}

WEFT_FN float as_float(DType, float x) { return x; }
WEFT_FN float as_float(DType dtype, u16 x) { return low_half(dtype, x); }

// Loads this lane's logits, -inf beyond the last expert. All loads are in flight at once.
template <Routing R, class T>
WEFT_FN void load_logits(const RouteArgs& a, u32 token, u32 lane, float (&logit)[R.each()]) {
    const T* row = static_cast<const T*>(a.logits) + i64(token) * a.row_stride;
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i) {
        const u32 e = i * warp_lanes + lane;
        logit[i] = e < R.experts ? as_float(a.dtype, row[i64(e) * a.column_stride])
                                 : -__uint_as_float(0x7f800000u);
    }
}

template <Routing R>
WEFT_FN void load_correction(const RouteArgs& a, u32 lane, float (&bias)[R.each()]) {
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i) {
        const u32 e = i * warp_lanes + lane;
        bias[i] = e < R.experts ? a.correction[e] : 0.0f;
    }
}

template <Routing R>
WEFT_FN void set_keys(const float (&choice)[R.each()], u32 lane, u32 (&key)[R.each()]) {
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i)
        key[i] = i * warp_lanes + lane < R.experts ? key_of(choice[i]) : no_key;
}

WEFT_FN float warp_sum(float x) {
#pragma unroll
    for (u32 step = warp_lanes / 2; step != 0; step /= 2) x += __shfl_xor_sync(all_lanes, x, step);
    return x;
}

// May ignore a NaN among the values.
WEFT_FN float warp_max(float x) {
#pragma unroll
    for (u32 step = warp_lanes / 2; step != 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(all_lanes, x, step));
    return x;
}

// Replaces logits by scores. In a softmax, NaN propagates through its own exponential.
template <Routing R> WEFT_FN void score_all(float (&x)[R.each()]) {
    if constexpr (R.score == Score::sigmoid) {
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) x[i] = 1.0f / (1.0f + expf(-x[i]));
    } else if constexpr (R.score == Score::sqrtsoftplus) {
        // Like torch's softplus, uses x for log(1 + exp(x)) above 20.
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) x[i] = sqrtf(x[i] > 20.0f ? x[i] : log1pf(expf(x[i])));
    } else if constexpr (R.score == Score::softmax) {
        float top = x[0], sum = 0.0f;
#pragma unroll
        for (u32 i = 1; i < R.each(); ++i) top = fmaxf(top, x[i]);
        top = warp_max(top);
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) {
            x[i] = expf(x[i] - top);
            sum += x[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) x[i] = x[i] / sum;
    }
}

struct BestTwo {
    u32 first = no_key, second = no_key;  // keys, the larger first

    WEFT_FN void add(u32 key) {
        second = key > first ? first : key > second ? key : second;
        first = key > first ? key : first;
    }
};

// Computes the score of each group: its best choice, or the sum of its best two.
template <Routing R> WEFT_FN void score_groups(RouteScratch<R>& s, u32 lane) {
    constexpr u32 lanes = R.group_lanes(), at_once = warp_lanes / lanes, size = R.group_size();
#pragma unroll 1
    for (u32 base = 0; base < R.groups; base += at_once) {
        const u32 group = base + lane / lanes;
        BestTwo best;
        if (group < R.groups)
            for (u32 m = lane % lanes; m < size; m += lanes)
                best.add(key_of(s.choice[group * size + m]));
#pragma unroll
        for (u32 step = lanes / 2; step != 0; step /= 2) {
            const u32 first = __shfl_xor_sync(all_lanes, best.first, step);
            const u32 second = __shfl_xor_sync(all_lanes, best.second, step);
            best.add(first);
            best.add(second);
        }
        if (group < R.groups && lane % lanes == 0)
            s.group_score[group] =
                R.group_best == 1 ? best.first
                                  : key_of(value_of_key(best.first) + value_of_key(best.second));
    }
    __syncwarp();
}

// Sets the choices of all but the best groups to -inf. A group is kept if fewer than top_groups
// have a better score. Experts of kept groups with a correction of -inf rank last, but still above
// all experts of other groups.
template <Routing R>
WEFT_FN void limit_groups(RouteScratch<R>& s, u32 lane, float (&choice)[R.each()]) {
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i)
        if (i * warp_lanes + lane < R.experts) s.choice[i * warp_lanes + lane] = choice[i];
    __syncwarp();
    score_groups(s, lane);
    for (u32 g = lane; g < R.groups; g += warp_lanes) {
        const u32 own = s.group_score[g];
        u32 better = 0;
        for (u32 h = 0; h < R.groups; ++h)
            better += s.group_score[h] > own || (s.group_score[h] == own && h < g);
        s.kept[g] = better < R.top_groups;
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i) {
        const u32 e = i * warp_lanes + lane;
        if (e >= R.experts) continue;
        constexpr u32 infinite = 0xff800000u, lowest = 0xff7fffffu;  // negative
        if (!s.kept[e / R.group_size()])
            choice[i] = __uint_as_float(infinite);
        else if (__float_as_uint(choice[i]) == infinite)
            choice[i] = __uint_as_float(lowest);
    }
}

// Computes the keys of this lane's experts and writes their scores to shared memory.
template <Routing R>
WEFT_FN void score_experts(const RouteArgs& a, RouteScratch<R>& s, u32 token, u32 lane,
                           u32 (&key)[R.each()]) {
    float x[R.each()], bias[R.each()];
    if (a.dtype == DType::fp32)
        load_logits<R, float>(a, token, lane, x);
    else
        load_logits<R, u16>(a, token, lane, x);
    // Load before the stores below: the compiler cannot move a load above a store.
    if constexpr (R.correction) load_correction<R>(a, lane, bias);
    if constexpr (R.by_logits()) set_keys<R>(x, lane, key);
    score_all<R>(x);
#pragma unroll
    for (u32 i = 0; i < R.each(); ++i) {
        if (i * warp_lanes + lane < R.experts) s.score[i * warp_lanes + lane] = x[i];
        if constexpr (R.correction) x[i] += bias[i];
    }
    if constexpr (R.groups > 1) limit_groups(s, lane, x);
    if constexpr (!R.by_logits()) set_keys<R>(x, lane, key);
}

// Returns the k-th best expert in lane k; sets `best` to the first one in every lane.
template <Routing R> WEFT_FN u32 choose(u32 (&key)[R.each()], u32 lane, u32& best) {
    u32 own = 0;
    for (u32 k = 0; k < R.top_k; ++k) {
        u32 top = no_key, id = 0;
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) {
            id = key[i] > top ? i * warp_lanes + lane : id;
            top = key[i] > top ? key[i] : top;
        }
        const u32 winner = __reduce_max_sync(all_lanes, top);
        id = ~__reduce_max_sync(all_lanes, top == winner ? ~id : 0u);
        own = lane == k ? id : own;
        best = k == 0 ? id : best;
#pragma unroll
        for (u32 i = 0; i < R.each(); ++i) key[i] = i * warp_lanes + lane == id ? no_key : key[i];
    }
    return own;
}

// Returns the weight of lane k's expert.
template <Routing R>
WEFT_FN float weigh(const RouteArgs& a, const RouteScratch<R>& s, u32 lane, u32 id, u32 best) {
    float weight = lane < R.top_k ? s.score[id] : 0.0f;
    if constexpr (R.score == Score::softmax_chosen) {
        weight = lane < R.top_k ? expf(weight - s.score[best]) : 0.0f;
        weight = weight / warp_sum(weight);
    } else if constexpr (R.renormalise) {
        weight = weight / (warp_sum(weight) + sum_epsilon);
    }
    return weight * a.scale;
}

template <Routing R> WEFT_FN void route(const RouteArgs& a) {
    static_assert(R.top_k <= warp_lanes && R.each() <= 32,
                  "one lane for each choice, 1024 experts");
    __shared__ RouteScratch<R> scratch[route_warps];
    const Block team;
    griddep_wait();
    launch_dependents();
    const u32 token = blockIdx.x * route_warps + team.warp(), lane = team.warp_lane();
    if (token >= a.tokens) return;
    i32 id = -1;
    float weight = 0.0f;
    if (a.num_tokens == nullptr || i64(token) < *a.num_tokens) {
        u32 key[R.each()], best = 0;
        score_experts(a, scratch[team.warp()], token, lane, key);
        id = i32(choose<R>(key, lane, best));
        __syncwarp();
        weight = weigh(a, scratch[team.warp()], lane, u32(id), best);
    }
    if (lane >= R.top_k) return;
    a.ids[u64(token) * R.top_k + lane] = id;
    a.weights[u64(token) * R.top_k + lane] = weight;
}

}  // namespace weft
