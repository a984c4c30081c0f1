// Linear maps of more than 8 rows on the tensor cores of compute capability 9.0 (wgmma): the arithmetic of many_rows.cu
// to the bit. out[r][o] = sum over k of x[r][k] w[o][k], plus bias[o]; x is [rows][cols], w [outputs][cols].
//
// A block takes 128 outputs and N rows. One of its warps copies packed weights and panels of x, as they lie in memory,
// into rings in shared memory. Two groups of four warps multiply: a warp loads its tile of 16 outputs into registers
// and decodes it if it is quantized, and the instruction reads x from shared memory. Each step of 16 columns adds to
// the same f32 sums in the same order as `mma` does in many_rows.cu, and gives the same bits (measured on an H200: no
// difference in 10^4 sums of up to 4,096 columns, f16 and bf16).
//
// If there are too few tiles for the multiprocessors, the slices of the columns are distributed over several blocks,
// which leave their sums in the workspace (that is, in the L2 cache): `linear_combine`, or the norm that comes next,
// adds them up. (The blocks of a cluster could do that in each other's shared memory, but only 30 clusters of eight
// blocks with half a multiprocessor each run at once on an H200, and a product with 4,096 outputs has 32 of them.)
//
// When gated, a block takes 64 outputs of the gate and the same 64 of up, and writes the operand that the next product
// reads.
//
// Bytes moved: the weights once for every N rows, x once for every 128 outputs, mostly from the L2 cache. Bound: the
// tensor cores, with enough rows; memory bandwidth, with few.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int F>
DEVICE void multiply_wide(float (&d)[8], const u32 (&a)[4], u64 x) {
    if (F == BF16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11},"
            " %12, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12,"
            " 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

template <int F>
DEVICE void multiply_wide(float (&d)[16], const u32 (&a)[4], u64 x) {
    if (F == BF16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

template <int F>
DEVICE void multiply_wide(float (&d)[32], const u32 (&a)[4], u64 x) {
    if (F == BF16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1,"
            " 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1,"
            " 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

template <int F>
DEVICE void multiply_wide(float (&d)[64], const u32 (&a)[4], u64 x) {
    if (F == BF16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,"
            "%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
            "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
            "%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,"
            "%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
            "%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

// The first four warps have 64 outputs of the gate, the others the same of up. Both are written to shared memory and
// read back by rows to compute activation(gate) * up: in f32, and rounded to bf16 as the operand of the next product.
// (Rows of bf16 have no factor.)
template <int N>
DEVICE void write_gated(const Linear& p, const float (&total)[N / 2], float* shared) {
    // [gate, up][row][output]; the pitch of a row is no multiple of 32 values, so that rows lie in different banks.
    static const u32 PITCH = 68;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_row = blockIdx.x * N, first_output = blockIdx.y * 64;
    const float* bias = p.parts[warp / 4].bias;
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 output = warp % 4 * 16 + g + i / 2 * 8;
            shared[(warp / 4 * N + n * 8 + 2 * t + i % 2) * PITCH + output] = finished(total[4 * n + i], 1.0f, bias,
                first_output + output);
        }
    asm volatile("bar.sync 1, 256;" ::: "memory");
    // Not unrolled: the code of the activations is long and would not stay in the instruction cache.
#pragma unroll 1
    for (u32 row = warp; row < min((u32)N, p.num_rows - first_row); row += 8) {
        float2 gate = *(const float2*)(shared + row * PITCH + 2 * lane),
            up = *(const float2*)(shared + (N + row) * PITCH + 2 * lane);
        float low = __fmul_rn(activated(p.activation, gate.x), up.x), high = __fmul_rn(activated(p.activation,
            gate.y), up.y);
        *(float2*)(p.parts[0].out + (u64)(first_row +
            row) * p.parts[0].outputs + first_output + 2 * lane) = make_float2(low, high);
        u32 rounded = float_to_bf16(low) | (u32)float_to_bf16(high) << 16;
        *(u32*)(p.result.numbers + operand_place(first_row + row, first_output + 2 * lane, p.result.pitch)) = rounded;
        if (blockIdx.y == 0 && lane == 0) p.result.scales[first_row + row] = 1.0f;
    }
}

// The sums of a block in shared memory, [row][output]; the pitch of a row is no multiple of 32 values.
static const u32 SUMS_PITCH = 132;

// Element 4n + i of the sums of a thread is output g + 8 (i / 2) of its warp's tile and row 8n + 2t + i % 2.
template <class W, int N>
DEVICE void put_sums(const float (&sum)[N / 2], float* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) shared[(n * 8 +
            2 * t + i % 2) * SUMS_PITCH + warp * 16 + g + i / 2 * 8] = grown<W>(sum[4 * n + i]);
}

// A warp for each row, four outputs a lane.
template <class W, int N>
DEVICE void write_tile(const Linear& p, const float (&total)[N / 2], float* shared) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = blockIdx.x * N;
    put_sums<W, N>(total, shared);
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll 4
    for (u32 row = warp; row < min((u32)N, p.num_rows - first_row); row += 8) {
        float4 sums = *(const float4*)(shared + row * SUMS_PITCH + lane * 4);
        write_four(p, first_row + row, blockIdx.y * 8 + lane / 4, lane % 4 * 4, sums, p.x.scales[first_row + row]);
    }
}

// Writes the sums of a slice to the workspace.
template <class W, int N>
DEVICE void leave_sums(const Linear& p, u32 slice, const float (&sum)[N / 2]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first_row = blockIdx.x * N;
    float* to = slice_sums(p, slice) + (u64)first_row * slice_width(p) + (blockIdx.y * 8 + warp) * 16 + g;
#pragma unroll
    for (u32 n = 0; n < N / 8; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 row = n * 8 + 2 * t + i % 2;
            if (first_row + row < p.num_rows) to[row * slice_width(p) + i / 2 * 8] = grown<W>(sum[4 * n + i]);
        }
}

template <int F, int N, bool SPLIT>
struct WideShape {
    typedef Weights<F> W;
    // With few rows the bound is memory, and with slices the start and end of blocks: two blocks then share a
    // multiprocessor.
    static const int BLOCKS = N <= 32 || (N == 64 && SPLIT) ? 2 : 1;
    static const u32 X_STAGES = N == 128 ? 6 : BLOCKS == 1 ? 8 : N == 64 ? 4 : 6;
    static const u32 X_BYTES = N * 128;
    static const u32 W_BYTES = SIDE * W::CHUNK_BYTES;
    // Weights come from memory, x from the L2 cache: weights get the shared memory that x leaves.
    static const u32 ROOM = (BLOCKS == 2 ? 111 : 223) * 1024 - X_STAGES * X_BYTES;
    static const u32 W_STAGES = ROOM / W_BYTES < 12 ? ROOM / W_BYTES : 12;
    // If a block has all rows, weights are not read again. Evicting quantized ones first made nothing faster.
    static const bool READS_ONCE = N < 128 && (F == F16 || F == BF16);
};

// blockIdx: x = rows, y = outputs; when SPLIT, z = some of the slices. When GATED, four of the eight tiles are of the
// gate, and four of up.
template <int F, int N, bool SPLIT, bool GATED = false>
DEVICE void wide(const Linear& p) {
    typedef Weights<F> W;
    typedef WideShape<F, N, SPLIT> S;
    extern __shared__ u8 dynamic[];
    __shared__ u64 barriers[2 * (S::X_STAGES + S::W_STAGES)];
    u32 x_full = shared_address(barriers), x_empty = x_full + 8 * S::X_STAGES;
    u32 w_full = x_empty + 8 * S::X_STAGES, w_empty = w_full + 8 * S::W_STAGES;
    u32 skipped = (1024 - shared_address(dynamic) % 1024) % 1024;
    u8* x_ring = dynamic + skipped;
    u8* w_ring = x_ring + S::X_STAGES * S::X_BYTES;

    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 first_row = blockIdx.x * N, first_tile = blockIdx.y * (GATED ? 4 : 8);
    u32 my_slices = SPLIT ? p.slices / gridDim.z : p.slices, begin_slice = SPLIT ? blockIdx.z * my_slices : 0,
        end_slice = begin_slice + my_slices;
    u32 begin_group = slice_start(p.cols, p.slices, begin_slice), end_group = slice_start(p.cols, p.slices, end_slice);
    u32 num_units = 4 * (end_group - begin_group);

    let_next_start();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < S::X_STAGES; i++) {
            barrier_init(x_full + 8 * i, 1);
            barrier_init(x_empty + 8 * i, 8);
        }
        for (u32 i = 0; i < S::W_STAGES; i++) {
            barrier_init(w_full + 8 * i, 1);
            barrier_init(w_empty + 8 * i, 8);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp >= 8) {
        release_registers<S::BLOCKS == 2 ? 24 : 40>();
        if (threadIdx.x == 256) {
            // The eight tiles belong to one matrix: its number of tiles is padded.
            const LinearPart& part = GATED ? p.parts[0] : part_of(p, first_tile);
            const u8* weights = group_weights<W>(part.weight, first_tile - part.first_tile, begin_group, p.cols);
            const u8* weights_up = GATED ? group_weights<W>(p.parts[1].weight, first_tile, begin_group, p.cols) : 0;
            u32 num_chunks = num_units / W::CHUNK_UNITS;
            u32 w_address = shared_address(w_ring), x_address = shared_address(x_ring);
            auto weights_ring = Ring<S::W_STAGES>::start();
            auto bring_weights = [&](u32 chunk) {
                u32 barrier = w_full + 8 * weights_ring.stage;
                barrier_expect(barrier, S::W_BYTES);
                u32 to = w_address + weights_ring.stage * S::W_BYTES;
                static const u32 HALF = S::W_BYTES / 2;
                auto copy = [&](u32 to, const u8* from, u32 bytes) {
                    if (S::READS_ONCE)
                        copy_bulk_once(to, from, bytes, barrier);
                    else
                        copy_bulk(to, from, bytes, barrier);
                };
                copy(to, weights + (u64)chunk * S::W_BYTES, GATED ? HALF : S::W_BYTES);
                if (GATED) copy(to + HALF, weights_up + (u64)chunk * S::W_BYTES, HALF);
                weights_ring.advance();
            };
            u32 brought = min(num_chunks, S::W_STAGES);
            for (u32 chunk = 0; chunk < brought; chunk++) bring_weights(chunk);
            wait_for_previous();
            u64 panels = (u64)(first_row / PANEL_ROWS) * (p.x.pitch / 64) + begin_group * 4;
            const u8* x = (const u8*)p.x.numbers + panels * (PANEL_ROWS * 128) + first_row % PANEL_ROWS * 128;
            auto x_places = Ring<S::X_STAGES>::start();
            for (u32 unit = 0; unit < num_units; unit++) {
                if (unit % W::CHUNK_UNITS == 0 && unit / W::CHUNK_UNITS >= brought) {
                    barrier_wait(w_empty + 8 * weights_ring.stage, weights_ring.round ^ 1);
                    bring_weights(unit / W::CHUNK_UNITS);
                }
                if (unit >= S::X_STAGES) barrier_wait(x_empty + 8 * x_places.stage, x_places.round ^ 1);
                u32 barrier = x_full + 8 * x_places.stage;
                barrier_expect(barrier, S::X_BYTES);
                copy_bulk(x_address + x_places.stage * S::X_BYTES, x + (u64)unit * (PANEL_ROWS * 128), S::X_BYTES,
                    barrier);
                x_places.advance();
            }
        }
    } else {
        claim_registers<S::BLOCKS == 2 ? 104 : 232>();
        wait_for_previous();
        u32 g = lane / 4, t = lane % 4;
        float sum[N / 2], total[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; i++) sum[i] = total[i] = 0.0f;
        auto x_places = Ring<S::X_STAGES>::start();
        auto weights_ring = Ring<S::W_STAGES>::start();
        u32 x_address = shared_address(x_ring);
        u32 done = 0;  // the stage of x whose products are in flight

        // Loads the weights of a unit into registers; the stage of the ring is released with the last unit of a chunk.
        auto fetch = [&](u32 (&a)[4][4], u32 unit) {
            u32 within = unit % W::CHUNK_UNITS;
            if (within == 0) barrier_wait(w_full + 8 * weights_ring.stage, weights_ring.round);
            typename W::Raw raw;
            W::template load<FromShared>(raw, w_ring + weights_ring.stage * S::W_BYTES + warp * W::CHUNK_BYTES,
                within, lane);
#pragma unroll
            for (int s = 0; s < 4; s++) W::decode(a[s], raw, s);
            if (within == W::CHUNK_UNITS - 1) {
                __syncwarp();
                if (lane == 0) barrier_arrive(w_empty + 8 * weights_ring.stage);
                weights_ring.advance();
            }
        };
        auto multiply_unit = [&](const u32 (&a)[4][4]) {
            barrier_wait(x_full + 8 * x_places.stage, x_places.round);
            u32 x = x_address + x_places.stage * S::X_BYTES;
            wide_fence();
#pragma unroll
            for (int s = 0; s < 4; s++) multiply_wide<F>(sum, a[s], panel_descriptor(x + s * 32));
            wide_commit();
        };
        auto give_back = [&](u32 stage) {
            if (lane == 0) barrier_arrive(x_empty + 8 * stage);
        };
        u32 slice = begin_slice, slice_end = 4 * (slice_start(p.cols, p.slices, slice + 1) - begin_group);
        auto end_slice_if = [&](u32 unit) {
            if (unit + 1 != slice_end) return;
            wide_wait<0>(sum);
            bool is_first = slice == begin_slice;
            if (SPLIT) leave_sums<W, N>(p, slice, sum);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                if (!SPLIT) total[i] = is_first ? sum[i] : __fadd_rn(total[i], sum[i]);
                sum[i] = 0.0f;
            }
            slice++;
            slice_end = 4 * (slice_start(p.cols, p.slices, slice + 1) - begin_group);
        };

        // Two units a round: the registers of one are loaded while the products of the other are in flight. Slices have
        // an even number of units.
        u32 even[4][4], odd[4][4];
        fetch(even, 0);
        for (u32 unit = 0; unit < num_units; unit += 2) {
            multiply_unit(even);
            u32 stage_even = x_places.stage;
            x_places.advance();
            if (unit > 0) {
                wide_wait<1>(sum);
                give_back(done);
            }
            fetch(odd, unit + 1);
            multiply_unit(odd);
            done = x_places.stage;
            x_places.advance();
            wide_wait<1>(sum);
            give_back(stage_even);
            if (unit + 2 < num_units) fetch(even, unit + 2);
            end_slice_if(unit + 1);
        }
        wide_wait<0>(sum);

        if (SPLIT) return;
        if (GATED)
            write_gated<N>(p, total, (float*)x_ring);
        else
            write_tile<W, N>(p, total, (float*)x_ring);
    }
}

#else

// Other GPUs use `linear_many`.
template <int F, int N, bool SPLIT, bool GATED = false>
DEVICE void wide(const Linear& p) {}

#endif

#define WIDE(NAME, F)                                                                                       \
    KERNEL void __launch_bounds__(384, 2) wide16_##NAME(Linear p) { wide<F, 16, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 2) wide32_##NAME(Linear p) { wide<F, 32, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 1) wide64_##NAME(Linear p) { wide<F, 64, false>(p); }                 \
    KERNEL void __launch_bounds__(384, 1) wide128_##NAME(Linear p) { wide<F, 128, false>(p); }               \
    KERNEL void __launch_bounds__(384, 2) wide16_split_##NAME(Linear p) { wide<F, 16, true>(p); }            \
    KERNEL void __launch_bounds__(384, 2) wide32_split_##NAME(Linear p) { wide<F, 32, true>(p); }            \
    KERNEL void __launch_bounds__(384, 2) wide64_split_##NAME(Linear p) { wide<F, 64, true>(p); }            \
    KERNEL void __launch_bounds__(384, 1) wide128_split_##NAME(Linear p) { wide<F, 128, true>(p); }

// Gated for bf16 only, whose result can be rounded at once: f16 needs the largest magnitude of a row first.
KERNEL void __launch_bounds__(384, 2) wide16_gated_bf16(Linear p) { wide<BF16, 16, false, true>(p); }
KERNEL void __launch_bounds__(384, 2) wide32_gated_bf16(Linear p) { wide<BF16, 32, false, true>(p); }
KERNEL void __launch_bounds__(384, 1) wide64_gated_bf16(Linear p) { wide<BF16, 64, false, true>(p); }
KERNEL void __launch_bounds__(384, 1) wide128_gated_bf16(Linear p) { wide<BF16, 128, false, true>(p); }

WIDE(f16, F16)
WIDE(bf16, BF16)
WIDE(q8_0, Q8_0)
WIDE(q4_0, Q4_0)
WIDE(q4_k, Q4_K)
WIDE(q5_k, Q5_K)
WIDE(q6_k, Q6_K)
