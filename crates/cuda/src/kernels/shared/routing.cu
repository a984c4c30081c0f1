// Selects the experts of a row from its router logits: for route_experts.cu, and for the kernels of experts that route
// one or two rows themselves.

struct Route {
    const float* logits;  // [rows][experts]
    const float* bias;    // [experts], added to scores for the selection alone; may be null
    u32* experts;         // [rows][selected], in ascending order
    float* weights;
    u32 num_rows, num_experts, num_selected;
    u32 normalize;
    u32 is_sigmoid;       // scores are sigmoids of logits; else their softmax
    // Groups of adjacent experts, and the number of groups from which experts are selected; 0 for no groups.
    u32 num_groups, selected_groups;
    float scale;          // factor of the weights
};

static const u32 NOBODY = 0xffffffffu;
static const u32 MAX_SELECTED = 512;

// Experts whose logits a lane holds.
static const u32 HELD_EXPERTS = 8;

// `look(e, value)` for every expert of a lane. `value_of(e)` is the value of an expert that is not held.
template <class ValueOf, class Look>
DEVICE void for_each_expert(const float (&held)[HELD_EXPERTS], u32 num_experts, ValueOf value_of, Look look) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 k = 0; k < HELD_EXPERTS; k++)
        if (lane + 32 * k < num_experts) look(lane + 32 * k, held[k]);
#pragma unroll 1
    for (u32 e = lane + 32 * HELD_EXPERTS; e < num_experts; e += 32) look(e, value_of(e));
}

// The highest value of all lanes and the lowest expert that has it; NOBODY if no lane has an expert.
struct Highest {
    u32 expert;
    float value;
};

DEVICE Highest highest_of_lanes(u32 expert, float value) {
    // No key is below 0, the key of a lane that has no expert.
    u32 mine = expert == NOBODY ? 0 : ordered(value), winning = __reduce_max_sync(FULL_WARP, mine);
    Highest highest;
    highest.expert = __reduce_min_sync(FULL_WARP, mine == winning ? expert : NOBODY);
    highest.value = unordered(winning);
    return highest;
}

// The groups with the highest sums of their two highest values or, with a softmax, with the highest value, as bits;
// ties go to the lower group. `highest(taken, group)` finds the highest of a group but for the expert `taken`.
template <class HighestOf>
DEVICE u32 selected_groups(const Route& r, HighestOf highest) {
    u32 lane = threadIdx.x % 32, group = NOBODY, chosen = 0;
    float mine = 0.0f;
    for (u32 g = 0; g < r.num_groups; g++) {
        Highest first = highest(NOBODY, g), second = highest(first.expert, g);
        if (lane != g) continue;
        group = g;
        mine = r.is_sigmoid ? __fadd_rn(first.value, second.value) : first.value;
    }
    for (u32 n = 0; n < r.selected_groups; n++) {
        u32 best = highest_of_lanes(group, mine).expert;
        chosen |= best == NOBODY ? 0 : 1u << best;
        if (group == best) group = NOBODY;
    }
    return chosen;
}

// The experts with the highest ranks, ties to the lower number. A rank is the score plus the bias, or when PLAIN, for a
// softmax without either bias or groups, the logit, which has the same order. Weights are scores, normalised if
// `normalize` is set, and scaled. A warp for each row: lane l looks at the experts l, l + 32, ... The two lists are
// shared memory.
template <bool PLAIN>
DEVICE void route_row(const Route& r, u32 row, u32* experts, float* weights) {
    const float* logits = r.logits + (u64)row * r.num_experts;
    u32 lane = threadIdx.x % 32;
    float held[HELD_EXPERTS];
#pragma unroll
    for (u32 k = 0; k < HELD_EXPERTS; k++) held[k] = lane + 32 * k < r.num_experts ? logits[lane + 32 * k] : 0.0f;
    auto logit_of = [&](u32 e) { return logits[e]; };
    float largest = -__int_as_float(0x7f800000), sum = 0.0f;
    for_each_expert(held, r.num_experts, logit_of, [&](u32, float logit) { largest = fmaxf(largest, logit); });
    largest = warp_max(largest);
    for_each_expert(held, r.num_experts, logit_of, [&](u32, float logit) { sum = __fadd_rn(sum, expf(__fsub_rn(logit,
        largest))); });
    sum = warp_sum(sum);
    auto score_of = [&](float logit) {
        return !PLAIN && r.is_sigmoid ? __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-logit)))
                                      : __fdiv_rn(expf(__fsub_rn(logit, largest)), sum);
    };
    auto rank_of = [&](u32 e, float logit) {
        float score = PLAIN ? logit : score_of(logit);
        return !PLAIN && r.bias ? __fadd_rn(score, r.bias[e]) : score;
    };
    auto rank_at = [&](u32 e) { return rank_of(e, logits[e]); };
    if (!PLAIN)
#pragma unroll
        for (u32 k = 0; k < HELD_EXPERTS; k++)
            if (lane + 32 * k < r.num_experts) held[k] = rank_of(lane + 32 * k, held[k]);
    u32 groups = 0xffffffffu, group_len = !PLAIN && r.num_groups ? r.num_experts / r.num_groups : r.num_experts;
    if (!PLAIN && r.num_groups)
        groups = selected_groups(r, [&](u32 taken, u32 group) {
            u32 best = NOBODY;
            float highest = -__int_as_float(0x7f800000);
            for_each_expert(held, r.num_experts, rank_at, [&](u32 e, float rank) {
                if (e / group_len != group || e == taken || (best != NOBODY && !(rank > highest))) return;
                best = e;
                highest = rank;
            });
            return highest_of_lanes(best, highest);
        });
    // Selected by descending rank. `keep(n, expert, rank)` takes the n-th.
    auto select = [&](auto keep) {
        float last = __int_as_float(0x7f800000);
        u32 last_expert = NOBODY;
#pragma unroll 1
        for (u32 n = 0; n < r.num_selected; n++) {
            u32 best = NOBODY;
            float highest = 0.0f;
            for_each_expert(held, r.num_experts, rank_at, [&](u32 e, float rank) {
                bool later = rank < last || (rank == last && (n == 0 || e > last_expert));
                bool allowed = PLAIN || (groups >> e / group_len & 1);
                if (later && allowed && (best == NOBODY || rank > highest)) {
                    best = e;
                    highest = rank;
                }
            });
            Highest found = highest_of_lanes(best, highest);
            // NaN ranks compare with nothing; any valid expert serves, because the row's result is a NaN too.
            last_expert = found.expert == NOBODY ? n : found.expert;
            last = found.expert == NOBODY ? rank_at(n) : found.value;
            keep(n, last_expert, last);
        }
    };
    u64 first = (u64)row * r.num_selected;
    float selected = 0.0f;
    if (r.num_selected <= 32) {
        // Lane n keeps the n-th, and its place is the number of lower experts.
        u32 expert = NOBODY, place = 0;
        float rank = 0.0f;
        select([&](u32 n, u32 best, float its_rank) {
            if (lane != n) return;
            expert = best;
            rank = its_rank;
        });
        float weight = score_of(PLAIN || expert == NOBODY ? rank : logits[expert]);
        for (u32 n = 0; n < r.num_selected; n++) {
            u32 other = __shfl_sync(FULL_WARP, expert, n);
            selected = __fadd_rn(selected, __shfl_sync(FULL_WARP, weight, n));
            place += other < expert || (other == expert && n < lane);
        }
        if (lane >= r.num_selected) return;
        r.experts[first + place] = expert;
        r.weights[first + place] = __fmul_rn(r.normalize ? __fdiv_rn(weight, selected) : weight, r.scale);
        return;
    }
    // The first lane inserts into a list in ascending order of the expert.
    select([&](u32 n, u32 best, float) {
        float weight = score_of(logits[best]);
        selected = __fadd_rn(selected, weight);
        if (lane != 0) return;
        u32 at = n;
        for (; at > 0 && experts[at - 1] > best; at--) {
            experts[at] = experts[at - 1];
            weights[at] = weights[at - 1];
        }
        experts[at] = best;
        weights[at] = weight;
    });
    __syncwarp();
    for (u32 n = lane; n < r.num_selected; n += 32) {
        r.experts[first + n] = experts[n];
        r.weights[first + n] = __fmul_rn(r.normalize ? __fdiv_rn(weights[n], selected) : weights[n], r.scale);
    }
}
