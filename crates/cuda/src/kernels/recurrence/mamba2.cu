// A Mamba-2 layer, in three launches: the convolution, the recurrence, and the norm of its results.
//
// The inputs x of the heads, B and C are convolved, and SiLU is applied. For each head, with the matrix S of its state,
// [state_size][head_size], and B and C of its group:
//
//   dt = clamp(softplus(time_step + time_bias)),  S = exp(rate dt) S + B (dt x),  y = C S + skip x
//   out = rms_norm(y * silu(gate)) * weight over each `norm_size` outputs
//
// projected and the convolved rows are [rows][inputs of all heads, B of all groups, C of all groups]; out and gate
// [rows][heads * head_size]. A block of the recurrence has 32 columns of a matrix in registers, and goes through the
// rows of a sequence in order. Bytes moved: for a chunk each matrix twice (read and written; once more for every
// further save); for a row each value of the layer's inputs about twice. Bound: memory bandwidth, for steps of single
// rows of many sequences; the multiplications of a row, about 130 a thread, for a chunk.

struct Mamba2 {
    States states;
    const float* projected;
    const float* time_step;  // [rows][heads], before the bias and the softplus
    const float* taps;       // [taps][channels]
    const float* bias;       // [channels]; null for none
    const float* rate;       // [heads]; negative
    const float* time_bias;  // [heads]
    const float* skip;       // [heads]
    float* rows;             // [rows][channels], convolved
    float* factors;          // [rows][heads][decay, dt, nothing, nothing]
    float* out;
    float least_step, most_step;
    u32 num_heads, head_size, num_groups, state_size, num_taps;
};

DEVICE u32 num_channels(const Mamba2& m) { return m.num_heads * m.head_size + 2 * m.num_groups * m.state_size; }

// A thread for each channel, and for the factors of each head, of a run of rows. blockIdx: x = channels, then heads, y
// = run, z = sequence.
KERNEL void __launch_bounds__(256) mamba2_convolve(Mamba2 m) {
    begin();
    Sequence s = sequence_of(m.states, blockIdx.z);
    u32 channels = num_channels(m), channel = blockIdx.x * blockDim.x + threadIdx.x, start = blockIdx.y * CONVOLVED_RUN;
    if (start >= s.num_rows || channel >= channels + m.num_heads) return;
    u32 end = min(start + CONVOLVED_RUN, s.num_rows);
    if (channel >= channels) {
        u32 head = channel - channels;
        for (u32 t = start; t < end; t++) {
            u64 at = (u64)(s.first_row + t) * m.num_heads + head;
            float step = softplus(__fadd_rn(m.time_step[at], m.time_bias[head]));
            // A NaN passes the comparisons.
            if (step < m.least_step) step = m.least_step;
            if (step > m.most_step) step = m.most_step;
            m.factors[at * 4] = expf(__fmul_rn(m.rate[head], step));
            m.factors[at * 4 + 1] = step;
        }
        return;
    }
    auto input = [&](u32 t) { return m.projected[(u64)(s.first_row + t) * channels + channel]; };
    float first = m.bias ? m.bias[channel] : 0.0f;
#pragma unroll 2
    for (u32 t = start; t < end; t++)
        m.rows[(u64)(s.first_row + t) * channels + channel] =
            silu(convolved(s, m.taps, m.num_taps, channels, channel, t, first, input));
    if (start == 0) save_inputs(m.states, s, m.num_taps, channels, channel, input);
}

// blockIdx: x = columns, y = head, z = sequence.
template <int QUADS>
DEVICE void mamba2_scan(const Mamba2& m) {
    let_next_start();
    Sequence s = sequence_of(m.states, blockIdx.z);
    u32 head = blockIdx.y, column = column_of_thread(), lane_group = threadIdx.x % 32 / 8, channels = num_channels(m);
    u32 group = head / (m.num_heads / m.num_groups), inputs = m.num_heads * m.head_size;
    u64 offset = (u64)(m.num_taps - 1) * channels + (u64)head * m.state_size * m.head_size;
    float skip = m.skip[head];
    TokenSource source;
    source.rows[0] = m.rows + inputs + group * m.state_size;
    source.rows[1] = source.rows[0] + m.num_groups * m.state_size;
    source.columns = m.rows + head * m.head_size + blockIdx.x * COLUMNS;
    source.factors = m.factors + head * 4;
    source.pitch = channels;
    source.factors_pitch = m.num_heads * 4;
    source.num_keys = m.state_size;
    source.num_columns = min(COLUMNS, m.head_size - blockIdx.x * COLUMNS);
    float cells[QUADS][4];
    load_cells<QUADS>(cells, s.from ? s.from + offset : 0, m.state_size, m.head_size, column);
    wait_for_previous();
    auto advance = [&](const Token<QUADS>& token, u32 row) {
        float decay = token.factors[0], x = token.columns[threadIdx.x / 32 * 8 + threadIdx.x % 8];
        float added = __fmul_rn(token.factors[1], x), sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            float4 b = ((const float4*)token.rows[0])[quad * 4 + lane_group],
                   c = ((const float4*)token.rows[1])[quad * 4 + lane_group];
            const float in[4] = {b.x, b.y, b.z, b.w}, out[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                cells[quad][i] = __fmaf_rn(in[i], added, __fmul_rn(cells[quad][i], decay));
                sums[i] = __fmaf_rn(out[i], cells[quad][i], sums[i]);
            }
        }
        float y = __fmaf_rn(skip, x, column_sum(sums));
        if (lane_group == 0 && column < m.head_size) m.out[((u64)row * m.num_heads + head) * m.head_size + column] = y;
    };
    auto save = [&](u32 slot) {
        store_cells<QUADS>(cells, m.states.memory + slot * m.states.state_len + offset, m.state_size, m.head_size,
            column);
    };
    for_each_token<QUADS>(s, source, advance, save);
}

// With few blocks, registers hold the next loads; with many, more blocks share a multiprocessor. The bits are the same.
KERNEL void __launch_bounds__(128, 2) mamba2_scan_128(Mamba2 m) { mamba2_scan<8>(m); }
KERNEL void __launch_bounds__(128, 6) mamba2_scan_many_128(Mamba2 m) { mamba2_scan<8>(m); }
KERNEL void __launch_bounds__(128, 2) mamba2_scan_256(Mamba2 m) { mamba2_scan<16>(m); }

struct Mamba2Norm {
    float* x;             // [rows][cols], in place
    const float* gate;
    const float* weight;  // [cols]
    u32 cols, norm_size;
    float eps;
    u32 with_operand;
    Operand operand;
};

// x = rms_norm(x * silu(gate)) * weight over each `norm_size` values, and the operand of the next product. A block for
// each row; its size fixes the order of the sums.
KERNEL void __launch_bounds__(1024, 1) mamba2_norm(Mamba2Norm n) {
    begin();
    u32 row = blockIdx.x;
    float* x = n.x + (u64)row * n.cols;
    const float* gate = n.gate + (u64)row * n.cols;
    for (u32 first = 0; first < n.cols; first += n.norm_size) {
        float sum = 0.0f;
        for (u32 i = first + threadIdx.x; i < first + n.norm_size; i += blockDim.x) {
            float gated = __fmul_rn(x[i], silu(gate[i]));
            x[i] = gated;
            sum = __fmaf_rn(gated, gated, sum);
        }
        float factor = rms_factor(block_sum(sum), n.norm_size, n.eps);
        for (u32 i = first + threadIdx.x; i < first + n.norm_size; i += blockDim.x)
            x[i] = __fmul_rn(__fmul_rn(x[i], factor), n.weight[i]);
    }
    if (!n.with_operand) return;
    __syncthreads();
    float held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        held[k] = i < n.cols ? x[i] : 0.0f;
    }
    write_operand(n.operand, row, n.cols, held, [&](u32 i) { return x[i]; });
}
