// Linear maps of any number of rows: out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]. x is [rows][cols], w
// [outputs][cols] in any format, out [rows][outputs] in f32.
//
// The order of the sums is the same for any number of rows, here and in the other files of this folder. The columns are
// cut into `slices` at multiples of 256 that depend on their number alone. Within a slice the tensor core adds steps of
// 16 columns in ascending order to f32 accumulators; the sums of the slices are added in ascending order; then come the
// row's factor (a power of two) and the bias. `linear_few` gives the slices to the warps of a block, `linear_many`
// takes them one after the other or gives them to blocks: the same sums, hence the same bits.
//
// Bytes moved: the weights once for each block of rows, x once for every 128 outputs. Bound: the tensor cores, with
// enough rows.

// Any number of rows. A block takes 128 outputs and 8 * NT * WARPS_N rows: four warps by WARPS_N, each with two tiles
// of outputs. Rows of x pass through shared memory, STAGES units deep; weights are loaded into registers, one unit
// ahead. blockIdx: x = rows, y = outputs, z = slice when slices are given to blocks.
template <int F, int WARPS_N, int NT>
DEVICE void many(const Linear& p, bool split) {
    typedef Weights<F> W;
    static const int ROWS = 8 * NT * WARPS_N;
    static const int THREADS = 128 * WARPS_N;
    static const int STAGES = 4;
    static const u32 ROW_BYTES = 144;
    extern __shared__ uint4 shared[];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 warp_m = warp % 4, warp_n = warp / 4;
    u32 first_row = blockIdx.x * ROWS;
    u32 base = shared_address(shared);

    begin();
    const u8* weights[2];
    bool has[2];
    u32 first_tile = blockIdx.y * 8 + warp_m * 2;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        has[m] = first_tile + m < p.num_tiles;
        const LinearPart& part = part_of(p, first_tile + m);
        weights[m] = group_weights<W>(part.weight, has[m] ? first_tile + m - part.first_tile : 0, 0, p.cols);
    }
    u32 begin_slice = split ? blockIdx.z : 0, end_slice = split ? blockIdx.z + 1 : p.slices;
    u32 begin_unit = 4 * slice_start(p.cols, p.slices, begin_slice), end_unit = 4 * slice_start(p.cols, p.slices,
        end_slice);
    u32 slice_end = 4 * slice_start(p.cols, p.slices, begin_slice + 1), slice = begin_slice;

    auto fetch = [&](u32 unit) {
        if (unit < end_unit) {
            u32 stage = base + unit % STAGES * (ROWS * ROW_BYTES);
            for (u32 i = threadIdx.x; i < ROWS * 8; i += THREADS) {
                u32 row = i / 8;
                bool valid = first_row + row < p.num_rows;
                const u16* from = p.x.numbers + operand_place(valid ? first_row + row : 0, unit * 64 + i % 8 * 8,
                    p.x.pitch);
                copy_async(stage + row * ROW_BYTES + i % 8 * 16, from, valid);
            }
        }
        copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(begin_unit + i);
    typename W::Raw raw[2], next[2];
#pragma unroll
    for (int m = 0; m < 2; m++) W::template load<FromDevice>(raw[m],
        chunk_of<W>(weights[m] + (u64)(begin_unit / 4) * group_stride<W>(), begin_unit % 4), begin_unit % 4, lane);

    float sum[2][NT][4], total[2][NT][4];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[m][n][i] = total[m][n][i] = 0.0f;

    u32 my_row = (warp_n * NT * 8 + lane % 8) * ROW_BYTES + lane / 8 * 16;
    for (u32 unit = begin_unit; unit < end_unit; unit++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        fetch(unit + STAGES - 1);
        if (unit + 1 < end_unit)
#pragma unroll
            for (int m = 0; m < 2; m++) W::template load<FromDevice>(next[m],
                chunk_of<W>(weights[m] + (u64)((unit + 1) / 4) * group_stride<W>(), (unit + 1) % 4), (unit + 1) % 4,
                lane);
        u32 stage = base + unit % STAGES * (ROWS * ROW_BYTES) + my_row;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 a[2][2][4];
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int s = 0; s < 2; s++) W::decode(a[m][s], raw[m], 2 * h + s);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                u32 x[4];
                load_matrices(x, stage + n * 8 * ROW_BYTES + h * 64);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    multiply<F>(sum[m][n], a[m][0], x[0], x[1]);
                    multiply<F>(sum[m][n], a[m][1], x[2], x[3]);
                }
            }
        }
        if (unit + 1 == slice_end) {
            bool is_first = slice == begin_slice;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[m][n][i] = is_first ? sum[m][n][i] : __fadd_rn(total[m][n][i], sum[m][n][i]);
                        sum[m][n][i] = 0.0f;
                    }
            slice++;
            slice_end = 4 * slice_start(p.cols, p.slices, slice + 1);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) raw[m] = next[m];
    }

    u32 g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if (!has[m]) continue;
        const LinearPart& part = part_of(p, first_tile + m);
        u32 tile = first_tile + m - part.first_tile;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first_row + warp_n * NT * 8 + n * 8 + 2 * t + i % 2;
                u32 o = tile * 16 + g + i / 2 * 8;
                if (row >= p.num_rows || o >= part.outputs) continue;
                if (split)
                    slice_sums(p, blockIdx.z)[(u64)row * slice_width(p)
                        + (first_tile + m) * 16 + g + i / 2 * 8] = grown<W>(total[m][n][i]);
                else
                    part.out[(u64)row * part.outputs + o] = finished(grown<W>(total[m][n][i]), p.x.scales[row],
                        part.bias, o);
            }
    }
}

DEVICE float4 sum_of(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Adds the slices that blocks computed; a thread for every four values.
KERNEL void linear_combine(Linear p) {
    begin();
    u64 vectors = slice_width(p) / 4, i = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    if (i >= p.num_rows * vectors) return;
    u32 row = i / vectors, column = i % vectors * 4;
    float4 sums[MAX_SLICES];
#pragma unroll
    for (u32 s = 0; s < MAX_SLICES; s++)
        if (s < p.slices) sums[s] = ((const float4*)slice_sums(p, s))[i];
#pragma unroll
    for (u32 s = 1; s < MAX_SLICES; s++)
        if (s < p.slices) sums[0] = sum_of(sums[0], sums[s]);
    write_four(p, row, column / 16, column % 16, sums[0], p.x.scales[row]);
}

#define LINEAR_MANY(NAME, F)                                                                                  \
    KERNEL void __launch_bounds__(128) linear_many16_##NAME(Linear p) { many<F, 1, 2>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many32_##NAME(Linear p) { many<F, 1, 4>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(128) linear_many64_##NAME(Linear p) { many<F, 1, 8>(p, p.workspace != 0); }  \
    KERNEL void __launch_bounds__(256) linear_many128_##NAME(Linear p) { many<F, 2, 8>(p, p.workspace != 0); }

LINEAR_MANY(f16, F16)
LINEAR_MANY(bf16, BF16)
LINEAR_MANY(q8_0, Q8_0)
LINEAR_MANY(q4_0, Q4_0)
LINEAR_MANY(q4_k, Q4_K)
LINEAR_MANY(q5_k, Q5_K)
LINEAR_MANY(q6_k, Q6_K)
LINEAR_MANY(mxfp4, MXFP4)

// Weights, products and sums in f32: a warp takes ROWS rows and OUTPUTS outputs, lane l the columns l, l + 32, ...
// TOGETHER loads of each row and output are in flight at once. Zeros are added beyond the last column, which does not
// change a sum. Bound: latency, with few rows; the L1 cache, with many.
template <int ROWS, int OUTPUTS, int TOGETHER>
DEVICE void linear_plain(const Linear& p) {
    let_next_start();
    const LinearPart& part = p.parts[0];
    u32 lane = threadIdx.x % 32, first = blockIdx.y * ROWS;
    u32 first_output = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS;
    float sum[ROWS][OUTPUTS], weight[OUTPUTS][TOGETHER];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) sum[r][o] = 0.0f;
    // Rows and outputs beyond the last are computed as the last, and not written.
    auto load_weights = [&](u32 base) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            const float* w = (const float*)part.weight + (u64)min(first_output + o, part.outputs - 1) * p.cols;
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) weight[o][i] = base + i * 32 < p.cols ? w[base + i * 32] : 0.0f;
        }
    };
    // Weights do not depend on the kernels before.
    load_weights(lane);
    wait_for_previous();
    for (u32 base = lane; base < p.cols; base += TOGETHER * 32) {
        if (base != lane) load_weights(base);
        float number[ROWS][TOGETHER];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float* row = p.x_plain + (u64)min(first + r, p.num_rows - 1) * p.cols;
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) number[r][i] = base + i * 32 < p.cols ? row[base + i * 32] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int o = 0; o < OUTPUTS; o++) sum[r][o] = __fmaf_rn(weight[o][i], number[r][i], sum[r][o]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            float total = warp_sum(sum[r][o]);
            u32 output = first_output + o;
            if (lane == 0 && first + r < p.num_rows && output < part.outputs)
                part.out[(u64)(first + r) * part.outputs + output] = part.bias ? __fadd_rn(total, part.bias[output])
                                                                               : total;
        }
}

// One block a multiprocessor is enough: with fewer registers the compiler would load one number after the other, each
// when it is multiplied.
KERNEL void __launch_bounds__(256, 1) linear_f32(Linear p) { linear_plain<1, 1, 32>(p); }
KERNEL void __launch_bounds__(256, 1) linear_f32_some(Linear p) { linear_plain<4, 1, 16>(p); }

// `linear_f32` of the RMSNorm of a row, to the bit as `rms_norm` computes it: for routers in steps of one or two rows.
// Every block computes the norm, and the first writes it. blockIdx: x = outputs, y = row. Bound: latency.
KERNEL void __launch_bounds__(256, 1) linear_f32_normed(Linear p) {
    static const u32 THREADS = 256, TOGETHER = 64, VECTORS = 4;
    extern __shared__ float4 normed_row[];
    __shared__ float parts[32];
    let_next_start();
    const LinearPart& part = p.parts[0];
    u32 lane = threadIdx.x % 32, output = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, vectors = p.cols / 4;
    const float* w = (const float*)part.weight + (u64)min(output, part.outputs - 1) * p.cols;
    const float4* norm_weight = (const float4*)p.norm_weight;
    // Weights do not depend on the kernels before.
    float weight[TOGETHER];
    float4 by[VECTORS];
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) weight[i] = lane + i * 32 < p.cols ? w[lane + i * 32] : 0.0f;
#pragma unroll
    for (u32 k = 0; k < VECTORS; k++)
        by[k] = threadIdx.x + k * THREADS < vectors ? norm_weight[threadIdx.x + k * THREADS] : zeros;
    wait_for_previous();
    const float4* x = (const float4*)(p.x_plain + (u64)blockIdx.y * p.cols);
    float4 held[VECTORS];
    float squares[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 k = 0; k < VECTORS; k++)
        held[k] = threadIdx.x + k * THREADS < vectors ? x[threadIdx.x + k * THREADS] : zeros;
#pragma unroll
    for (u32 k = 0; k < VECTORS; k++) add_squares(squares, held[k]);
#pragma unroll 1
    for (u32 i = threadIdx.x + VECTORS * THREADS; i < vectors; i += THREADS) add_squares(squares, x[i]);
    float mine = norm_part(squares);
    if (threadIdx.x % 8 == 0) parts[threadIdx.x / 8] = mine;
    __syncthreads();
    float factor = norm_factor(parts, p.cols, p.eps);
    auto put = [&](u32 i, const float4& v) {
        normed_row[i] = v;
        if (blockIdx.x == 0) ((float4*)(p.normed + (u64)blockIdx.y * p.cols))[i] = v;
    };
#pragma unroll
    for (u32 k = 0; k < VECTORS; k++)
        if (threadIdx.x + k * THREADS < vectors) put(threadIdx.x + k * THREADS, normed(held[k], factor, by[k]));
#pragma unroll 1
    for (u32 i = threadIdx.x + VECTORS * THREADS; i < vectors; i += THREADS) put(i, normed(x[i], factor,
        norm_weight[i]));
    __syncthreads();
    const float* values = (const float*)normed_row + lane;
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++)
        if (lane + i * 32 < p.cols) sum = __fmaf_rn(weight[i], values[i * 32], sum);
#pragma unroll 1
    for (u32 col = TOGETHER * 32; lane + col < p.cols; col += 32) sum = __fmaf_rn(w[lane + col], values[col], sum);
    sum = warp_sum(sum);
    if (lane == 0 && output < part.outputs)
        part.out[(u64)blockIdx.y * part.outputs + output] = part.bias ? __fadd_rn(sum, part.bias[output]) : sum;
}

// The same sums for many rows: a block takes 16 rows and 64 outputs, a warp eight of them, and both come through shared
// memory, 128 columns at a time. The number of columns is a multiple of four. Bound: f32 arithmetic.
KERNEL void __launch_bounds__(256, 1) linear_f32_many(Linear p) {
    static const u32 ROWS = 16, OUTPUTS = 64, WARP_OUTPUTS = 8, COLS = 128, STAGES = 3;
    static const u32 STAGE_VALUES = (ROWS + OUTPUTS) * COLS;
    extern __shared__ float stages[];
    begin();
    const LinearPart& part = p.parts[0];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first_row = blockIdx.y * ROWS, first_output = blockIdx.x * OUTPUTS, num_chunks = (p.cols + COLS - 1) / COLS;
    // Rows and outputs beyond the last are computed as the last, and not written.
    auto fetch = [&](u32 chunk) {
        u32 to = shared_address(stages + chunk % STAGES * STAGE_VALUES);
#pragma unroll
        for (u32 i = threadIdx.x; i < STAGE_VALUES / 4; i += 256) {
            u32 line = i / (COLS / 4), col = chunk * COLS + i % (COLS / 4) * 4;
            const float* from = line < ROWS
                ? p.x_plain + (u64)min(first_row + line, p.num_rows - 1) * p.cols
                : (const float*)part.weight + (u64)min(first_output + line - ROWS, part.outputs - 1) * p.cols;
            bool valid = col < p.cols;
            if (chunk < num_chunks) copy_async(to + i * 16, from + (valid ? col : 0), valid);
        }
        copy_async_commit();
    };
    float sum[ROWS][WARP_OUTPUTS];
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 o = 0; o < WARP_OUTPUTS; o++) sum[r][o] = 0.0f;
    for (u32 chunk = 0; chunk < STAGES - 1; chunk++) fetch(chunk);
    for (u32 chunk = 0; chunk < num_chunks; chunk++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        fetch(chunk + STAGES - 1);
        const float* x = stages + chunk % STAGES * STAGE_VALUES + lane;
        const float* w = x + (ROWS + warp * WARP_OUTPUTS) * COLS;
#pragma unroll
        for (u32 step = 0; step < COLS; step += 32) {
            float weight[WARP_OUTPUTS];
#pragma unroll
            for (u32 o = 0; o < WARP_OUTPUTS; o++) weight[o] = w[o * COLS + step];
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                float number = x[r * COLS + step];
#pragma unroll
                for (u32 o = 0; o < WARP_OUTPUTS; o++) sum[r][o] = __fmaf_rn(weight[o], number, sum[r][o]);
            }
        }
    }
#pragma unroll
    for (u32 r = 0; r < ROWS; r++)
#pragma unroll
        for (u32 o = 0; o < WARP_OUTPUTS; o++) {
            float total = warp_sum(sum[r][o]);
            u32 row = first_row + r, output = first_output + warp * WARP_OUTPUTS + o;
            if (lane == 0 && row < p.num_rows && output < part.outputs)
                part.out[(u64)row * part.outputs + output] = part.bias ? __fadd_rn(total, part.bias[output]) : total;
        }
}
