// The product of a block of four plus four warps, and a warp that copies, on compute capability 9.0. A block takes 128
// outputs and N rows: many_rows_wgmma.cu and expert_panels.cu say of what.

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

template <int F, int N, int BLOCKS>
struct WideShape {
    typedef Weights<F> W;
    static const u32 X_STAGES = N == 128 ? 6 : BLOCKS == 1 ? 8 : N == 64 ? 4 : 6;
    static const u32 X_BYTES = N * 128;
    static const u32 W_BYTES = SIDE * W::CHUNK_BYTES;
    // Weights come from memory, x from the L2 cache: weights get the shared memory that x leaves.
    static const u32 ROOM = (BLOCKS == 2 ? 111 : 223) * 1024 - X_STAGES * X_BYTES;
    static const u32 W_STAGES = ROOM / W_BYTES < 12 ? ROOM / W_BYTES : 12;
    // If a block has all rows, weights are not read again. Evicting quantized ones first made nothing faster.
    static const bool READS_ONCE = N < 128 && (F == F16 || F == BF16);
};

// Operands of a block: eight tiles of weights, or when gated four of the gate and four of up, and N rows of x.
struct WideTask {
    const u8 *weights, *weights_up;  // chunks of the first group
    const u8* x;                     // the panel of the first group, from the first row on
    u32 cols, slices, begin_slice, end_slice;
};

// The address of rows of an operand, from a group of columns on. They must lie in one panel.
DEVICE const u8* panel_rows(const Operand& x, u32 first_row, u32 group) {
    u64 panels = (u64)(first_row / PANEL_ROWS) * (x.pitch / 64) + group * 4;
    return (const u8*)x.numbers + panels * (PANEL_ROWS * 128) + first_row % PANEL_ROWS * 128;
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

// BLOCKS share a multiprocessor. `finish(slice, sums, shared)` takes the sums of every slice when SPLIT, else those of
// all slices; it may use the shared memory. It is called by the eight warps that multiply.
template <int F, int N, int BLOCKS, bool SPLIT, bool GATED, class Finish>
DEVICE void wide_product(const WideTask& task, Finish finish) {
    typedef Weights<F> W;
    typedef WideShape<F, N, BLOCKS> S;
    extern __shared__ u8 dynamic[];
    __shared__ u64 barriers[2 * (S::X_STAGES + S::W_STAGES)];
    u32 x_full = shared_address(barriers), x_empty = x_full + 8 * S::X_STAGES;
    u32 w_full = x_empty + 8 * S::X_STAGES, w_empty = w_full + 8 * S::W_STAGES;
    u32 skipped = (1024 - shared_address(dynamic) % 1024) % 1024;
    u8* x_ring = dynamic + skipped;
    u8* w_ring = x_ring + S::X_STAGES * S::X_BYTES;

    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 begin_group = slice_start(task.cols, task.slices, task.begin_slice);
    u32 end_group = slice_start(task.cols, task.slices, task.end_slice);
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
        release_registers<BLOCKS == 2 ? 24 : 40>();
        if (threadIdx.x == 256) {
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
                copy(to, task.weights + (u64)chunk * S::W_BYTES, GATED ? HALF : S::W_BYTES);
                if (GATED) copy(to + HALF, task.weights_up + (u64)chunk * S::W_BYTES, HALF);
                weights_ring.advance();
            };
            u32 brought = min(num_chunks, S::W_STAGES);
            for (u32 chunk = 0; chunk < brought; chunk++) bring_weights(chunk);
            wait_for_previous();
            auto x_places = Ring<S::X_STAGES>::start();
            for (u32 unit = 0; unit < num_units; unit++) {
                if (unit % W::CHUNK_UNITS == 0 && unit / W::CHUNK_UNITS >= brought) {
                    barrier_wait(w_empty + 8 * weights_ring.stage, weights_ring.round ^ 1);
                    bring_weights(unit / W::CHUNK_UNITS);
                }
                if (unit >= S::X_STAGES) barrier_wait(x_empty + 8 * x_places.stage, x_places.round ^ 1);
                u32 barrier = x_full + 8 * x_places.stage;
                barrier_expect(barrier, S::X_BYTES);
                copy_bulk(x_address + x_places.stage * S::X_BYTES, task.x + (u64)unit * (PANEL_ROWS * 128), S::X_BYTES,
                    barrier);
                x_places.advance();
            }
        }
    } else {
        claim_registers<BLOCKS == 2 ? 104 : 232>();
        wait_for_previous();
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
        u32 slice = task.begin_slice, slice_end = 4 * (slice_start(task.cols, task.slices, slice + 1) - begin_group);
        auto end_slice_if = [&](u32 unit) {
            if (unit + 1 != slice_end) return;
            wide_wait<0>(sum);
            bool is_first = slice == task.begin_slice;
            if (SPLIT) finish(slice, sum, (float*)x_ring);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                if (!SPLIT) total[i] = is_first ? sum[i] : __fadd_rn(total[i], sum[i]);
                sum[i] = 0.0f;
            }
            slice++;
            slice_end = 4 * (slice_start(task.cols, task.slices, slice + 1) - begin_group);
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

        if (!SPLIT) finish(0, total, (float*)x_ring);
    }
}

#endif
