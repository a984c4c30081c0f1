// Attention of a chunk of tokens (prefill) on the tensor cores of compute capability 9.0 (wgmma), keys and values in
// panels of 16-bit values: the arithmetic of `flash` in prefill.cu to the bit. queries and out are [rows][heads *
// head_size].
//
// A block has 128 rows of scores: the query heads that share a kv head, of as many consecutive tokens of one sequence
// as fit. A warp copies tiles of keys and values into a ring; two groups of four warps have 64 rows each and go through
// the tiles at their own pace, so that one's softmax overlaps with the other's products, and with its own of the next
// tile's keys.
//
// Bytes moved: every visible key and value once for each block. Bound: the tensor cores, 4 * head_size operations for
// each row and visible key.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Scores: 64 rows by 64 keys, queries and keys from shared memory. The first product of a sum does not add: its
// registers need not be cleared, so that nothing writes to them while other products are in flight.
template <int S, bool ADDS>
DEVICE void multiply_scores(float (&d)[32], u64 a, u64 b) {
    if (S == STORE_F16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, %34, 1, 1, 0, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "l"(a), "l"(b), "n"(ADDS));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, %34, 1, 1, 0, 0;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "l"(a), "l"(b), "n"(ADDS));
}

// Values: weights from registers; the rows of a panel are the depth here, as the last operand says.
template <int S, bool ADDS>
DEVICE void multiply_values(float (&d)[32], const u32 (&a)[4], u64 b) {
    if (S == STORE_F16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37,"
            " 1, 1, 1;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37,"
            " 1, 1, 1;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS));
}

template <int S, bool ADDS>
DEVICE void multiply_values(float (&d)[64], const u32 (&a)[4], u64 b) {
    if (S == STORE_F16)
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,"
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,"
            "%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
            "%63}, {%64,%65,%66,%67}, %68, %69, 1, 1, 1;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS));
    else
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,"
            "%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,"
            "%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,"
            "%63}, {%64,%65,%66,%67}, %68, %69, 1, 1, 1;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADDS));
}

// As panel_descriptor, for an operand whose depth goes down the rows: panels of 64 columns are `stride` bytes apart.
DEVICE u64 column_descriptor(u32 address, u32 stride) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(stride >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

struct Tiles {
    u32 begin, end, last_position;
};

// Copies tiles into the ring, a stage each: its barrier in `full` says that a tile is there, the one behind them that
// it was consumed. One warp does it; each lane copies some rows of a panel of keys or values.
template <u32 PANELS, u32 STAGES>
DEVICE void bring_tiles(const Attention& a, const u32* table, u32 kv_head, Tiles tiles, u32 ring, u32 full) {
    static const u32 PANEL_BYTES = FLASH_TILE * 128, STAGE_BYTES = 2 * PANELS * PANEL_BYTES;
    u32 lane = threadIdx.x % 32, is_values = lane % 2, panel = lane / 2 % PANELS, number = lane / (2 * PANELS);
    u32 block_log = logarithm(a.block_len), rows_log = min(block_log, 6), first_row = number << rows_log,
        bytes = 128 << rows_log;
    u32 my_place = (is_values * PANELS + panel) * PANEL_BYTES + first_row * 128;
    const u8* blocks = (const u8*)(is_values ? a.value_blocks : a.key_blocks);
    // Blocks that no token of the chunk sees may not exist.
    auto has_rows = [&](u32 tile) { return first_row < FLASH_TILE && tile < tiles.end &&
        tile * FLASH_TILE + first_row <= tiles.last_position; };
    auto block_of = [&](u32 tile) { return has_rows(tile) ? table[(tile * FLASH_TILE + first_row) >> block_log] : 0; };
    u32 block = block_of(tiles.begin);
    auto place = Ring<STAGES>::start();
    for (u32 tile = tiles.begin; tile < tiles.end; tile++) {
        u32 next_block = block_of(tile + 1), barrier = full + 8 * place.stage;
        if (tile - tiles.begin >= STAGES) barrier_wait(barrier + 8 * STAGES, place.round ^ 1);
        u32 num_keys = min((u32)FLASH_TILE, tiles.last_position + 1 - tile * FLASH_TILE);
        u32 num_copies = ((num_keys - 1) >> rows_log) + 1;
        if (lane == 0) barrier_expect(barrier, num_copies * bytes * 2 * PANELS);
        __syncwarp();
        if (has_rows(tile)) {
            u32 offset = (tile * FLASH_TILE + first_row) & (a.block_len - 1);
            u64 from = (((((u64)block * a.num_kv_heads + kv_head) * PANELS + panel) << block_log) + offset) * 128;
            copy_bulk(ring + place.stage * STAGE_BYTES + my_place, blocks + from, bytes, barrier);
        }
        block = next_block;
        place.advance();
    }
}

// Sums over the four lanes of a row, of several values at a time, so that the exchanges overlap.
template <int LEN>
DEVICE void row_sums(float (&x)[LEN]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        float other[LEN];
#pragma unroll
        for (int k = 0; k < LEN; k++) other[k] = __shfl_xor_sync(FULL_WARP, x[k], distance);
#pragma unroll
        for (int k = 0; k < LEN; k++) x[k] = __fadd_rn(x[k], other[k]);
    }
}

// blockIdx: x = kv head and piece of its group, y = run of tokens, the last and longest first.
template <int S, int HS, bool CAPPED>
DEVICE void flash_wide(const Attention& a) {
    static const u32 PANELS = HS / 64, PANEL_BYTES = FLASH_TILE * 128, STAGES = HS == 128 ? 5 : 8;
    static const u32 STAGE_BYTES = 2 * PANELS * PANEL_BYTES;
    extern __shared__ u8 dynamic[];
    __shared__ u64 barriers[2 * STAGES];
    begin();
    u32 row = a.runs[a.num_runs - 1 - blockIdx.y];
    u32 group = a.num_heads / a.num_kv_heads, padded = padded_group(group);
    u32 group_tokens = 64 / padded, block_tokens = 2 * group_tokens;
    if ((row - a.first_rows[row]) % block_tokens != 0) return;
    u32 pieces = (group + padded - 1) / padded;
    u32 kv_head = blockIdx.x / pieces, first_head = kv_head * group + blockIdx.x % pieces * padded;
    u32 heads = min(padded, (kv_head + 1) * group - first_head);
    u32 num_tokens = min(block_tokens, a.end_rows[row] - row);
    u32 first_position = a.positions[row], last_position = a.positions[row + num_tokens - 1];
    u32 lowest = a.window && first_position + 1 > a.window ? first_position + 1 - a.window : 0;
    u32 begin_tile = lowest / FLASH_TILE, end_tile = last_position / FLASH_TILE + 1;

    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    u32 skipped = (1024 - shared_address(dynamic) % 1024) % 1024;
    u8* queries = dynamic + skipped;                       // [group of warps][panel][64 rows]
    u8* ring = queries + 2 * PANELS * PANEL_BYTES;         // [stage][keys, values][panel][64 rows]
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4;
    __syncthreads();

    if (warp >= 8) {
        release_registers<24>();
        Tiles tiles = {begin_tile, end_tile, last_position};
        if (warp == 8) bring_tiles<PANELS, STAGES>(a, a.block_tables + a.first_blocks[row], kv_head, tiles,
            shared_address(ring), full);
        return;
    }

    claim_registers<240>();
    u32 g = lane / 4, t = lane % 4;
    // Queries of 64 rows, rounded, into panels.
    u8* my_queries = queries + half * PANELS * PANEL_BYTES;
    for (u32 i = threadIdx.x % 128; i < 64 * (HS / 8); i += 128) {
        u32 m = i / (HS / 8), piece = i % (HS / 8), token = half * group_tokens + m / padded, head = m % padded;
        uint4 numbers = make_uint4(0, 0, 0, 0);
        if (token < num_tokens && head < heads) {
            const float4* from = (const float4*)(a.queries +
                ((u64)(row + token) * a.num_heads + first_head + head) * HS + piece * 8);
            float4 low = from[0], high = from[1];
            numbers = make_uint4(pack_pair<S>(low.x, low.y), pack_pair<S>(low.z, low.w), pack_pair<S>(high.x, high.y),
                pack_pair<S>(high.z, high.w));
        }
        *(uint4*)(my_queries + piece / 8 * PANEL_BYTES + m * 128 + (piece % 8 ^ m % 8) * 16) = numbers;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");

    // The two rows of scores that this lane has a part of.
    int position[2], first[2];
    u64 query[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 m = warp % 4 * 16 + g + 8 * i, token = half * group_tokens + m / padded, head = m % padded;
        bool valid = token < num_tokens && head < heads;
        position[i] = valid ? (int)a.positions[row + token] : -1;
        first[i] = valid && a.window ? max(0, position[i] + 1 - (int)a.window) : 0;
        query[i] = ((u64)(row + token) * a.num_heads + first_head + head) * HS;
    }
    // Keys from `seen_from` up to `seen_to` are visible to every token of the block.
    u32 seen_from = a.window && last_position + 1 > a.window ? last_position + 1 - a.window : 0,
        seen_to = first_position + 1;
    const float nothing = __int_as_float(0xff800000), factor = exponent_factor(a);
    float out[HS / 2];
#pragma unroll
    for (int i = 0; i < HS / 2; i++) out[i] = 0.0f;
    Running running[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
    u64 query_descriptor = panel_descriptor(shared_address(my_queries));
    auto place = Ring<STAGES>::start(), done_with = place;
    // Waits for a tile, and starts to multiply its keys.
    auto begin_scores = [&](u32 tile, float (&score)[32]) {
        u32 keys = shared_address(ring) + place.stage * STAGE_BYTES;
        barrier_wait(full + 8 * place.stage, place.round);
        // Keys that no token of the chunk sees are zeroed: memory may hold a NaN there, and 0 * NaN is not 0.
        u32 num_keys = min((u32)FLASH_TILE, last_position + 1 - tile * FLASH_TILE);
        if (num_keys < FLASH_TILE) {
            u8* from = ring + place.stage * STAGE_BYTES + PANELS * PANEL_BYTES;
            for (u32 i = num_keys * 8 + threadIdx.x % 128; i < FLASH_TILE * 8; i += 128)
#pragma unroll
                for (u32 panel = 0; panel < PANELS; panel++)
                    *(uint4*)(from + panel * PANEL_BYTES + i * 16) = make_uint4(0, 0, 0, 0);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
        }
        u64 key_descriptor = panel_descriptor(keys);
        wide_fence();
        multiply_scores<S, false>(score, query_descriptor, key_descriptor);
#pragma unroll
        for (int s = 1; s < HS / 16; s++) {
            u32 at = (s / 4 * PANEL_BYTES + s % 4 * 32) / 16;
            multiply_scores<S, true>(score, query_descriptor + at, key_descriptor + at);
        }
        wide_commit();
        place.advance();
    };
    // Completes the scores of a tile while the keys of the next tile are multiplied.
    auto finish_tile = [&](u32 tile, float (&score)[32]) {
        Running here[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
        if (CAPPED) {
#pragma unroll
            for (int i = 0; i < 32; i++) score[i] = capped(__fmul_rn(score[i], a.scale), a.cap);
        }
        // Most tiles are entirely visible.
        if (tile * FLASH_TILE < seen_from || (tile + 1) * FLASH_TILE > seen_to) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = tile * FLASH_TILE + n * 8 + 2 * t + i % 2;
                    if (key < first[i / 2] || key > position[i / 2]) score[4 * n + i] = nothing;
                }
        }
#pragma unroll
        for (int i = 0; i < 32; i++) here[i % 4 / 2].largest = fmaxf(here[i % 4 / 2].largest, score[i]);
#pragma unroll
        for (int distance = 1; distance <= 2; distance *= 2) {
            float other[2] = {__shfl_xor_sync(FULL_WARP, here[0].largest, distance), __shfl_xor_sync(FULL_WARP,
                here[1].largest, distance)};
#pragma unroll
            for (int i = 0; i < 2; i++) here[i].largest = fmaxf(here[i].largest, other[i]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) here[i].largest = __fmul_rn(here[i].largest, factor);
        float offset[2] = {exponent_offset(here[0].largest), exponent_offset(here[1].largest)};
#pragma unroll
        for (int i = 0; i < 32; i++) score[i] = weight_of(score[i], factor, offset[i % 4 / 2]);
        u32 weights[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int n = 2 * s + i / 2;
                weights[s][i] = pack_pair<S>(score[4 * n + i % 2 * 2], score[4 * n + i % 2 * 2 + 1]);
            }
        // As in `quarter_sum`, for all quarters of both rows.
        float quarters[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            int first = k % 4 * 8 + k / 4 * 2;
            quarters[k] = __fadd_rn(__fadd_rn(__fadd_rn(score[first], score[first + 1]), score[first + 4]),
                score[first + 5]);
        }
        float sum[HS / 2];
        u64 value_descriptor = column_descriptor(shared_address(ring)
            + done_with.stage * STAGE_BYTES + PANELS * PANEL_BYTES, PANEL_BYTES);
        wide_fence();
        multiply_values<S, false>(sum, weights[0], value_descriptor);
#pragma unroll
        for (int s = 1; s < 4; s++) multiply_values<S, true>(sum, weights[s], value_descriptor + s * 2048 / 16);
        wide_commit();
        row_sums(quarters);
        float keep[2], add[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            here[i].sum = __fadd_rn(__fadd_rn(__fadd_rn(quarters[4 * i], quarters[4 * i + 1]), quarters[4 * i + 2]),
                quarters[4 * i + 3]);
            merge<true>(running[i], here[i], keep[i], add[i]);
        }
        wide_wait<0>(sum);
        if (lane == 0) barrier_arrive(empty + 8 * done_with.stage);
        done_with.advance();
#pragma unroll
        for (int i = 0; i < HS / 2; i++) out[i] = joined(out[i], keep[i % 4 / 2], sum[i], add[i % 4 / 2]);
    };
    float score[32], next[32];
    begin_scores(begin_tile, score);
#pragma unroll 1
    for (u32 tile = begin_tile; tile + 1 < end_tile; tile++) {
        wide_wait<0>(score);
        begin_scores(tile + 1, next);
        finish_tile(tile, score);
#pragma unroll
        for (int i = 0; i < 32; i++) score[i] = next[i];
    }
    wide_wait<0>(score);
    finish_tile(end_tile - 1, score);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (position[i] < 0) continue;
        float* to = a.out + query[i];
        u32 head = first_head + (g + 8 * i) % padded;
        float sum = __fadd_rn(running[i].sum, sink_weight<true>(a, head, running[i].largest));
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
            *(float2*)(to + n * 8 + 2 * t) = make_float2(__fdiv_rn(out[4 * n + 2 * i], sum),
                __fdiv_rn(out[4 * n + 2 * i + 1], sum));
    }
}

#else

template <int S, int HS, bool CAPPED>
DEVICE void flash_wide(const Attention& a) {}

#endif

#define FLASH_WIDE(NAME, S, HS) \
    KERNEL void __launch_bounds__(384, 1) flash_wide_##NAME##_##HS(Attention a) { flash_wide<S, HS, false>(a); } \
    KERNEL void __launch_bounds__(384, 1) flash_wide_capped_##NAME##_##HS(Attention a) { flash_wide<S, HS, true>(a); }

FLASH_WIDE(f16, STORE_F16, 64)
FLASH_WIDE(f16, STORE_F16, 128)
FLASH_WIDE(bf16, STORE_BF16, 64)
FLASH_WIDE(bf16, STORE_BF16, 128)
