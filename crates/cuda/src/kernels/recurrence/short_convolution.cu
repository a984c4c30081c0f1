// The gated short convolution. For each channel, with x[t] = gate_in[t] * input[t] and k taps:
//
// out[t] = gate_out[t] * (taps[0] x[t - k + 1] + ... + taps[k - 1] x[t] + bias)
//
// projected is [rows][gate_in, gate_out, input][channels], out [rows][channels]; a state is [k - 1][channels]. A thread
// for each channel and run of 16 rows. Bytes moved for a row: four values of each channel, and twice the state for a
// chunk. Bound: latency, with few rows; memory bandwidth, with many.

struct ShortConvolution {
    States states;
    const float* projected;
    const float* taps;  // [taps][channels]
    const float* bias;  // null for none
    float* out;
    u32 channels, num_taps;
};

// blockIdx: x = channels, y = run of rows, z = sequence.
KERNEL void __launch_bounds__(256) short_convolution(ShortConvolution c) {
    begin();
    Sequence s = sequence_of(c.states, blockIdx.z);
    u32 channel = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * CONVOLVED_RUN;
    if (channel >= c.channels || first >= s.num_rows) return;
    auto row_of = [&](u32 t) { return c.projected + (u64)(s.first_row + t) * 3 * c.channels + channel; };
    auto input = [&](u32 t) { return __fmul_rn(row_of(t)[0], row_of(t)[2 * c.channels]); };
    u32 end = min(first + CONVOLVED_RUN, s.num_rows);
#pragma unroll 2
    for (u32 t = first; t < end; t++) {
        float sum = convolved(s, c.taps, c.num_taps, c.channels, channel, t, 0.0f, input);
        if (c.bias) sum = __fadd_rn(sum, c.bias[channel]);
        c.out[(u64)(s.first_row + t) * c.channels + channel] = __fmul_rn(row_of(t)[c.channels], sum);
    }
    if (first == 0) save_inputs(c.states, s, c.num_taps, c.channels, channel, input);
}
