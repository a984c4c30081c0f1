// Selects the experts of each row from router logits, [rows][experts], and adds up their results for prefill, where
// rows are grouped by expert on the host. Bytes moved: the logits once; for a sum, y and out once. Bound: latency.

struct Route {
    const float* logits;  // [rows][experts]
    u32* experts;         // [rows][selected], in ascending order
    float* weights;
    u32 num_rows, num_experts, num_selected;
    u32 normalize;
};

static const u32 NOBODY = 0xffffffffu;
static const u32 ROUTE_WARPS = 4;
static const u32 MAX_SELECTED = 512;

// Experts whose logits a lane holds.
static const u32 HELD_EXPERTS = 8;

// `look(e, logit)` for every expert of a lane.
template <class Look>
DEVICE void for_each_expert(const float (&held)[HELD_EXPERTS], const float* logits, u32 num_experts, Look look) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 k = 0; k < HELD_EXPERTS; k++)
        if (lane + 32 * k < num_experts) look(lane + 32 * k, held[k]);
#pragma unroll 1
    for (u32 e = lane + 32 * HELD_EXPERTS; e < num_experts; e += 32) look(e, logits[e]);
}

// Softmax over all experts, then the highest probabilities, ties to the lower number, normalised if `normalize` is set.
// A warp for each row: lane l looks at the experts l, l + 32, ... The two lists are shared memory.
DEVICE void route_row(const Route& r, u32 row, u32* experts, float* weights) {
    const float* logits = r.logits + (u64)row * r.num_experts;
    u32 lane = threadIdx.x % 32;
    float held[HELD_EXPERTS];
#pragma unroll
    for (u32 k = 0; k < HELD_EXPERTS; k++) held[k] = lane + 32 * k < r.num_experts ? logits[lane + 32 * k] : 0.0f;
    float largest = -__int_as_float(0x7f800000), sum = 0.0f;
    for_each_expert(held, logits, r.num_experts, [&](u32 e, float logit) { largest = fmaxf(largest, logit); });
    largest = warp_max(largest);
    for_each_expert(held, logits, r.num_experts, [&](u32 e, float logit) { sum = __fadd_rn(sum, expf(__fsub_rn(logit,
        largest))); });
    sum = warp_sum(sum);
    // Selected by descending logit, listed in ascending order of the expert: the first lane inserts into a short list.
    float last = __int_as_float(0x7f800000), selected = 0.0f;
    u32 last_expert = NOBODY;
#pragma unroll 1
    for (u32 n = 0; n < r.num_selected; n++) {
        u32 best = NOBODY;
        float highest = 0.0f;
        for_each_expert(held, logits, r.num_experts, [&](u32 e, float logit) {
            bool later = logit < last || (logit == last && (n == 0 || e > last_expert));
            if (later && (best == NOBODY || logit > highest)) {
                best = e;
                highest = logit;
            }
        });
        // No key is below 0, the key of a lane that has no expert left.
        u32 mine = best == NOBODY ? 0 : ordered(highest), winning = __reduce_max_sync(FULL_WARP, mine);
        best = __reduce_min_sync(FULL_WARP, mine == winning ? best : NOBODY);
        last = unordered(winning);
        // NaN logits compare with nothing; any valid expert serves, because the row's result is a NaN too.
        if (best == NOBODY) {
            best = n;
            last = logits[n];
        }
        last_expert = best;
        float weight = __fdiv_rn(expf(__fsub_rn(last, largest)), sum);
        selected = __fadd_rn(selected, weight);
        if (lane != 0) continue;
        u32 at = n;
        for (; at > 0 && experts[at - 1] > best; at--) {
            experts[at] = experts[at - 1];
            weights[at] = weights[at - 1];
        }
        experts[at] = best;
        weights[at] = weight;
    }
    __syncwarp();
    for (u32 n = lane; n < r.num_selected; n += 32) {
        u64 place = (u64)row * r.num_selected + n;
        r.experts[place] = experts[n];
        r.weights[place] = r.normalize ? __fdiv_rn(weights[n], selected) : weights[n];
    }
}

KERNEL void route(Route r) {
    __shared__ u32 experts[ROUTE_WARPS][MAX_SELECTED];
    __shared__ float weights[ROUTE_WARPS][MAX_SELECTED];
    begin();
    u32 warp = threadIdx.x / 32, row = blockIdx.x * ROUTE_WARPS + warp;
    if (row < r.num_rows) route_row(r, row, experts[warp], weights[warp]);
}

struct AddWeighted {
    const float* y;        // [rows of the expert][cols]
    const u32* rows;       // destination of each
    const float* weights;  // weight of each
    float* out;
    u32 cols;
};

// out[rows[i]] += weights[i] * y[i]; a block for each row of y, and no row comes twice.
KERNEL void add_weighted(AddWeighted a) {
    begin();
    float* out = a.out + (u64)a.rows[blockIdx.x] * a.cols;
    const float* y = a.y + (u64)blockIdx.x * a.cols;
    float weight = a.weights[blockIdx.x];
    for (u32 i = threadIdx.x; i < a.cols; i += blockDim.x) out[i] = __fadd_rn(out[i], __fmul_rn(weight, y[i]));
}
