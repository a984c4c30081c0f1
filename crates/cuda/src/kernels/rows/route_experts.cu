// Selects the experts of each row from router logits, [rows][experts], and adds up their results for prefill, where
// rows are grouped by expert on the host. Bytes moved: the logits once; for a sum, y and out once. Bound: latency.

static const u32 ROUTE_WARPS = 4;

template <bool PLAIN>
DEVICE void route_rows(const Route& r) {
    __shared__ u32 experts[ROUTE_WARPS][MAX_SELECTED];
    __shared__ float weights[ROUTE_WARPS][MAX_SELECTED];
    begin();
    u32 warp = threadIdx.x / 32, row = blockIdx.x * ROUTE_WARPS + warp;
    if (row < r.num_rows) route_row<PLAIN>(r, row, experts[warp], weights[warp]);
}

KERNEL void route(Route r) { route_rows<true>(r); }
KERNEL void route_by_scores(Route r) { route_rows<false>(r); }

struct ScaleExperts {
    const u32* experts;   // of each pair (row, selected expert)
    float* weights;
    const float* scales;  // of each expert
    u32 num_pairs;
};

// The weights of selected experts, times the factors of the experts.
KERNEL void scale_experts(ScaleExperts s) {
    begin();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.num_pairs) s.weights[i] = __fmul_rn(s.weights[i], s.scales[s.experts[i]]);
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
