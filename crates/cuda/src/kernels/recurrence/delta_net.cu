// The gated delta net, in three launches: the convolution, the recurrence, and the norm of its results.
//
// Queries, keys and values are convolved, and SiLU is applied; queries and keys are divided by their length. For each
// value head, with the matrix S of its state, [key_size][value_size]:
//
//   delta = beta (value - decay (key S)),  out = decay (query S) + (query . key) delta,  S = decay S + key delta
//   out = rms_norm(out) * weight * silu(gate)
//
// which is `advance` of the CPU's delta net with the sums taken before the matrix changes: key S and query S are
// summed together, so that a row waits for one sum over the lanes of a column instead of two.
//
// projected and the convolved rows are [rows][queries, keys, values]; out and gate [rows][value heads * value_size].
// A block of the recurrence has 32 columns of a matrix in registers, and goes through the rows of a sequence in order.
// Bytes moved: for a chunk each matrix twice (read and written; once more for every further save); for a row each value
// of the layer's inputs about twice. Bound: memory bandwidth, for steps of single rows of many sequences (64 KiB a
// head); the latency of a row's sums, about 300 cycles, for a chunk.

struct DeltaNet {
    States states;
    const float* projected;
    const float* beta;       // [rows][value heads], before the sigmoid
    const float* time_step;  // [rows][value heads], before the bias and the softplus
    const float* taps;       // [taps][channels]
    const float* decay;      // [value heads], the rate; negative
    const float* time_bias;  // [value heads]
    float* rows;             // [rows][channels], convolved
    float* factors;          // [rows][value heads][decay, beta, query . key, nothing]
    float* out;
    u32 num_key_heads, num_value_heads, key_size, value_size, num_taps;
    u32 is_tiled;            // value head h reads the key head h % num_key_heads, not h / (value heads of a key head)
};

// Added to the square of a length before its root is taken.
static const float LENGTH_EPS = 1e-6f;

DEVICE u32 num_channels(const DeltaNet& d) {
    return 2 * d.num_key_heads * d.key_size + d.num_value_heads * d.value_size;
}

// A block for the query and key of a key head, or for the value and the factors of a value head, of a run of rows; a
// thread has one channel of each. The code is kept short: between two layers it leaves the caches, and fetching it
// takes longer than the arithmetic of a row. blockIdx: x = heads, y = run, z = sequence.
KERNEL void __launch_bounds__(256) delta_convolve(DeltaNet d) {
    __shared__ float sums[3][8];
    begin();
    Sequence s = sequence_of(d.states, blockIdx.z);
    u32 head = blockIdx.x, i = threadIdx.x, start = blockIdx.y * CONVOLVED_RUN;
    if (start >= s.num_rows) return;
    u32 end = min(start + CONVOLVED_RUN, s.num_rows), channels = num_channels(d);
    u32 keys = d.num_key_heads * d.key_size, per_key = d.num_value_heads / d.num_key_heads;
    bool is_value = head >= d.num_key_heads;
    if (is_value) head -= d.num_key_heads;
    // Channels of a query and of its key have a distance of `keys`.
    u32 size = is_value ? d.value_size : d.key_size, num_vectors = is_value ? 1 : 2;
    u32 first = (is_value ? 2 * keys : 0) + head * size + i;
    bool has = i < size;
#pragma unroll 1
    for (u32 t = start; t < end; t++) {
        float x[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 v = 0; v < 2; v++) {
            u32 channel = first + v * keys;
            auto input = [&](u32 t) { return d.projected[(u64)(s.first_row + t) * channels + channel]; };
            if (has && v < num_vectors)
                x[v] = silu(convolved(s, d.taps, d.num_taps, channels, channel, t, 0.0f, input));
        }
        u64 row = s.first_row + t;
        if (!is_value) {
            float total[3] = {__fmul_rn(x[0], x[0]), __fmul_rn(x[1], x[1]), __fmul_rn(x[0], x[1])};
#pragma unroll
            for (u32 j = 0; j < 3; j++) {
                total[j] = warp_sum(total[j]);
                if (i % 32 == 0) sums[j][i / 32] = total[j];
                total[j] = 0.0f;
            }
            __syncthreads();
#pragma unroll 1
            for (u32 warp = 0; warp < blockDim.x / 32; warp++)
#pragma unroll
                for (u32 j = 0; j < 3; j++) total[j] = __fadd_rn(total[j], sums[j][warp]);
            __syncthreads();
            float factor[2];
#pragma unroll 1
            for (u32 v = 0; v < 2; v++)
                factor[v] = __fdiv_rn(v == 0 ? __fdiv_rn(1.0f, __fsqrt_rn((float)size)) : 1.0f,
                    __fsqrt_rn(__fadd_rn(v == 0 ? total[0] : total[1], LENGTH_EPS)));
            x[0] = __fmul_rn(x[0], factor[0]);
            x[1] = __fmul_rn(x[1], factor[1]);
            float both = __fmul_rn(__fmul_rn(total[2], factor[0]), factor[1]);
#pragma unroll 1
            for (u32 j = i; j < per_key; j += blockDim.x) {
                u32 value_head = d.is_tiled ? j * d.num_key_heads + head : head * per_key + j;
                d.factors[(row * d.num_value_heads + value_head) * 4 + 2] = both;
            }
        } else if (i == 0) {
            u64 at = row * d.num_value_heads + head;
            float time_step = softplus(__fadd_rn(d.time_step[at], d.time_bias[head]));
            d.factors[at * 4] = expf(__fmul_rn(d.decay[head], time_step));
            d.factors[at * 4 + 1] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-d.beta[at])));
        }
        if (has) d.rows[row * channels + first] = x[0];
        if (has && !is_value) d.rows[row * channels + keys + first] = x[1];
    }
    if (start > 0 || !has) return;
#pragma unroll 1
    for (u32 v = 0; v < num_vectors; v++) {
        u32 channel = first + v * keys;
        auto input = [&](u32 t) { return d.projected[(u64)(s.first_row + t) * channels + channel]; };
        save_inputs(d.states, s, d.num_taps, channels, channel, input);
    }
}

// blockIdx: x = columns, y = value head, z = sequence.
template <int QUADS>
DEVICE void delta_scan(const DeltaNet& d) {
    let_next_start();
    Sequence s = sequence_of(d.states, blockIdx.z);
    u32 head = blockIdx.y, column = column_of_thread(), group = threadIdx.x % 32 / 8, channels = num_channels(d);
    u32 key_head = d.is_tiled ? head % d.num_key_heads : head / (d.num_value_heads / d.num_key_heads);
    u32 keys = d.num_key_heads * d.key_size;
    u64 offset = (u64)(d.num_taps - 1) * channels + (u64)head * d.key_size * d.value_size;
    TokenSource source;
    source.rows[0] = d.rows + key_head * d.key_size;
    source.rows[1] = source.rows[0] + keys;
    source.columns = d.rows + 2 * keys + head * d.value_size + blockIdx.x * COLUMNS;
    source.factors = d.factors + head * 4;
    source.pitch = channels;
    source.factors_pitch = d.num_value_heads * 4;
    source.num_keys = d.key_size;
    source.num_columns = min(COLUMNS, d.value_size - blockIdx.x * COLUMNS);
    float cells[QUADS][4];
    load_cells<QUADS>(cells, s.from ? s.from + offset : 0, d.key_size, d.value_size, column);
    wait_for_previous();
    auto advance = [&](const Token<QUADS>& token, u32 row) {
        float by_key[4] = {0.0f, 0.0f, 0.0f, 0.0f}, by_query[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            float4 q = ((const float4*)token.rows[0])[quad * 4 + group], k = ((const float4*)token.rows[1])[quad * 4 +
                group];
            const float query[4] = {q.x, q.y, q.z, q.w}, key[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                by_key[i] = __fmaf_rn(key[i], cells[quad][i], by_key[i]);
                by_query[i] = __fmaf_rn(query[i], cells[quad][i], by_query[i]);
            }
        }
        float decay = token.factors[0], read = __fmul_rn(decay, column_sum(by_key)),
              attended = __fmul_rn(decay, column_sum(by_query));
        float value = token.columns[threadIdx.x / 32 * 8 + threadIdx.x % 8];
        float delta = __fmul_rn(__fsub_rn(value, read), token.factors[1]);
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            float4 k = ((const float4*)token.rows[1])[quad * 4 + group];
            const float key[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
                cells[quad][i] = __fmaf_rn(key[i], delta, __fmul_rn(cells[quad][i], decay));
        }
        if (group == 0 && column < d.value_size)
            d.out[((u64)row * d.num_value_heads + head) * d.value_size + column] =
                __fmaf_rn(token.factors[2], delta, attended);
    };
    auto save = [&](u32 slot) {
        store_cells<QUADS>(cells, d.states.memory + slot * d.states.state_len + offset, d.key_size, d.value_size,
            column);
    };
    for_each_token<QUADS>(s, source, advance, save);
}

// With few blocks, registers hold the next loads; with many, more blocks share a multiprocessor. The bits are the same.
KERNEL void __launch_bounds__(128, 2) delta_scan_128(DeltaNet d) { delta_scan<8>(d); }
KERNEL void __launch_bounds__(128, 6) delta_scan_many_128(DeltaNet d) { delta_scan<8>(d); }
KERNEL void __launch_bounds__(128, 2) delta_scan_256(DeltaNet d) { delta_scan<16>(d); }

// Values of a head that a lane has.
static const u32 HEAD_VALUES = 8;

struct DeltaNorm {
    float* x;             // [rows][heads * size], in place
    const float* gate;
    const float* weight;  // [size]
    u32 num_heads, size;
    float eps;
    u32 with_operand;
    Operand operand;
};

// x = rms_norm(x) * weight * silu(gate) of each head, and the operand of the next product. A block for each row, a warp
// for each head.
KERNEL void __launch_bounds__(1024, 1) delta_norm(DeltaNorm n) {
    begin();
    u32 row = blockIdx.x, lane = threadIdx.x % 32, cols = n.num_heads * n.size;
    float* x = n.x + (u64)row * cols;
    const float* gate = n.gate + (u64)row * cols;
    for (u32 head = threadIdx.x / 32; head < n.num_heads; head += blockDim.x / 32) {
        float held[HEAD_VALUES], sum = 0.0f;
#pragma unroll
        for (u32 k = 0; k < HEAD_VALUES; k++) {
            u32 i = k * 32 + lane;
            held[k] = i < n.size ? x[head * n.size + i] : 0.0f;
            sum = __fmaf_rn(held[k], held[k], sum);
        }
        float factor = rms_factor(warp_sum(sum), n.size, n.eps);
#pragma unroll
        for (u32 k = 0; k < HEAD_VALUES; k++) {
            u32 i = k * 32 + lane, at = head * n.size + i;
            if (i < n.size)
                x[at] = __fmul_rn(__fmul_rn(__fmul_rn(held[k], factor), n.weight[i]), silu(gate[at]));
        }
    }
    if (!n.with_operand) return;
    __syncthreads();
    float held[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        u32 i = threadIdx.x + k * blockDim.x;
        held[k] = i < cols ? x[i] : 0.0f;
    }
    write_operand(n.operand, row, cols, held, [&](u32 i) { return x[i]; });
}
