// Choosing experts, and adding up what they give.

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

// Softmax over all experts, then the highest probabilities, ties to the lower number, normalised when asked for. A warp for each row: lane l
// looks at the experts l, l + 32, ...
KERNEL void route(Route r) {
    __shared__ u32 lists[ROUTE_WARPS][MAX_SELECTED];
    __shared__ float shares[ROUTE_WARPS][MAX_SELECTED];
    begin();
    u32 warp = threadIdx.x / 32, row = blockIdx.x * ROUTE_WARPS + warp, lane = threadIdx.x % 32;
    if (row >= r.num_rows) return;
    const float* logits = r.logits + (u64)row * r.num_experts;
    u32* experts = lists[warp];
    float* weights = shares[warp];
    float largest = -__int_as_float(0x7f800000);
    for (u32 e = lane; e < r.num_experts; e += 32) largest = fmaxf(largest, logits[e]);
    largest = warp_max(largest);
    float sum = 0.0f;
    for (u32 e = lane; e < r.num_experts; e += 32) sum = __fadd_rn(sum, expf(__fsub_rn(logits[e], largest)));
    sum = warp_sum(sum);
    // Selected by descending logit, held in ascending order of the number: the first lane inserts into a short list.
    float last = __int_as_float(0x7f800000), selected = 0.0f;
    u32 last_expert = NOBODY;
    for (u32 n = 0; n < r.num_selected; n++) {
        u32 best = NOBODY;
        float highest = 0.0f;
        for (u32 e = lane; e < r.num_experts; e += 32) {
            float logit = logits[e];
            bool later = logit < last || (logit == last && (n == 0 || e > last_expert));
            if (later && (best == NOBODY || logit > highest)) {
                best = e;
                highest = logit;
            }
        }
        for (int i = 16; i > 0; i /= 2) {
            u32 other = __shfl_xor_sync(FULL_WARP, best, i);
            float logit = __shfl_xor_sync(FULL_WARP, highest, i);
            bool wins = best == NOBODY || logit > highest || (logit == highest && other < best);
            if (other != NOBODY && wins) {
                best = other;
                highest = logit;
            }
        }
        // Logits that are not numbers compare with nothing; any valid expert will do, since the row's result is not a number either.
        if (best == NOBODY) best = n;
        last = logits[best];
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

struct AddWeighted {
    const float* y;        // [rows of the expert][cols]
    const u32* rows;       // where each goes
    const float* weights;  // of each
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
