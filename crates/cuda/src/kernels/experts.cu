// Choosing experts, and adding up what they give.

struct Route {
    const float* logits;  // [rows][experts]
    u32* experts;         // [rows][selected], in ascending order
    float* weights;
    u32 num_rows, num_experts, num_selected;
    u32 normalize;
};

// Softmax over all experts, then the highest probabilities, ties to the lower number, normalised when asked for. A thread for each row:
// rows are few and experts at most some hundreds.
KERNEL void route(Route r) {
    begin();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= r.num_rows) return;
    const float* logits = r.logits + (u64)row * r.num_experts;
    u32* experts = r.experts + (u64)row * r.num_selected;
    float* weights = r.weights + (u64)row * r.num_selected;
    float largest = logits[0];
    for (u32 e = 1; e < r.num_experts; e++) largest = fmaxf(largest, logits[e]);
    float sum = 0.0f;
    for (u32 e = 0; e < r.num_experts; e++) sum = __fadd_rn(sum, expf(__fsub_rn(logits[e], largest)));
    // Selected by descending logit, held in ascending order of the number: an insertion into a short list.
    float last = __int_as_float(0x7f800000);
    u32 last_expert = 0;
    float selected = 0.0f;
    for (u32 n = 0; n < r.num_selected; n++) {
        u32 best = 0xffffffffu;
        for (u32 e = 0; e < r.num_experts; e++) {
            bool later = logits[e] < last || (logits[e] == last && (n == 0 || e > last_expert));
            if (later && (best == 0xffffffffu || logits[e] > logits[best])) best = e;
        }
        // Logits that are not numbers compare with nothing; any valid expert will do, since the row's result is not a number either.
        if (best == 0xffffffffu) best = n;
        last = logits[best];
        last_expert = best;
        float weight = __fdiv_rn(expf(__fsub_rn(last, largest)), sum);
        selected = __fadd_rn(selected, weight);
        u32 at = n;
        for (; at > 0 && experts[at - 1] > best; at--) {
            experts[at] = experts[at - 1];
            weights[at] = weights[at - 1];
        }
        experts[at] = best;
        weights[at] = weight;
    }
    if (r.normalize)
        for (u32 n = 0; n < r.num_selected; n++) weights[n] = __fdiv_rn(weights[n], selected);
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
