// Merges tiles of attention that different blocks computed: the arithmetic of prefill.cu and decode.cu to the bit.
// partial is [rows][heads][tiles][head_size + TILE_EXTRA], out [rows][heads * head_size].
//
// The factors of all tiles are computed at once, from the largest score so far, which is exact; the sums follow in
// ascending order. As many tiles are loaded at a time as shared memory holds. Bytes moved: the partial results once,
// from the L2 cache. Bound: latency.

// Bytes of shared memory for tiles, beside three values for each of the tiles that are counted.
DEVICE u32 room_for_tiles(u32 num_counted) {
    u32 shared_bytes;
    asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(shared_bytes));
    return shared_bytes - 3 * sizeof(float) * num_counted;
}

// Maximum tiles whose factors `attention_merge` holds at a time.
static const u32 MAX_COUNTED = 4096;

// Merges tiles of any kind, with 128 threads for a head of `hs` values; blockIdx: x = row, y = head. A thread has DIMS
// dimensions.
template <int DIMS>
DEVICE void merge_head(const Attention& a, u32 hs) {
    extern __shared__ uint4 shared_tiles[];
    u32 stage_bytes = room_for_tiles(min(a.max_tiles, MAX_COUNTED));
    float* stage = (float*)shared_tiles;
    float* counts = (float*)((u8*)shared_tiles + stage_bytes);  // [tiles][keep, add, sum]
    __shared__ float warp_largest[4];
    begin();
    u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 position = a.positions[row];
    u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    u32 begin_tile = first / a.tile_len, num_tiles = position / a.tile_len + 1 - begin_tile;
    u64 head = (u64)row * a.num_heads + blockIdx.y;
    const float* from = a.partial + (head * a.max_tiles + begin_tile) * (hs + TILE_EXTRA);
    u32 pitch = hs + TILE_EXTRA, stage_tiles = stage_bytes / 4 / pitch;
    auto bring = [&](u32 base, u32 end) {
        u32 len = min(stage_tiles, end - base) * pitch;
        const float* numbers = from + (u64)base * pitch;
        if (pitch % 4 == 0)
            for (u32 i = threadIdx.x; i < len / 4; i += 128) copy_async(shared_address(stage) + i * 16,
                numbers + i * 4, true);
        else
            for (u32 i = threadIdx.x; i < len; i += 128) stage[i] = numbers[i];
        copy_async_commit();
    };
    float before = __int_as_float(0xff800000), sum = 0.0f, value[DIMS];
#pragma unroll
    for (int i = 0; i < DIMS; i++) value[i] = 0.0f;
    for (u32 start = 0; start < num_tiles; start += MAX_COUNTED) {
        u32 end = min(num_tiles, start + MAX_COUNTED);
        if (start > 0) __syncthreads();
        bring(start, end);
        for (u32 base = start; base < end; base += 128) {
            u32 tile = base + threadIdx.x;
            float here = tile < end ? from[tile * (u64)pitch + hs] : __int_as_float(0xff800000);
            float tile_sum = tile < end ? from[tile * (u64)pitch + hs + 1] : 0.0f;
            float so_far = here;
            for (int i = 1; i < 32; i *= 2) {
                float other = __shfl_up_sync(FULL_WARP, so_far, i);
                if ((int)lane >= i) so_far = fmaxf(so_far, other);
            }
            if (lane == 31) warp_largest[warp] = so_far;
            __syncthreads();
            float earlier = before;
            for (u32 w = 0; w < warp; w++) earlier = fmaxf(earlier, warp_largest[w]);
            float neighbour = __shfl_up_sync(FULL_WARP, so_far, 1);
            float previous = lane == 0 ? earlier : fmaxf(earlier, neighbour);
            so_far = fmaxf(so_far, earlier);
            if (tile < end) {
                bool of_two = a.tile_len == FLASH_TILE;
                float* count = counts + 3 * (tile - start);
                count[0] = of_two ? share<true>(previous, so_far) : share<false>(previous, so_far);
                count[1] = of_two ? share<true>(here, so_far) : share<false>(here, so_far);
                count[2] = tile_sum;
            }
            for (u32 w = 0; w < 4; w++) before = fmaxf(before, warp_largest[w]);
            __syncthreads();
        }
        for (u32 base = start; base < end; base += stage_tiles) {
            if (base > start) {
                __syncthreads();
                bring(base, end);
            }
            copy_async_wait<0>();
            __syncthreads();
#pragma unroll 8
            for (u32 tile = base; tile < min(base + stage_tiles, end); tile++) {
                const float* count = counts + 3 * (tile - start);
                const float* numbers = stage + (tile - base) * pitch;
                sum = joined(sum, count[0], count[2], count[1]);
#pragma unroll
                for (u32 i = 0; i < DIMS; i++)
                    if (threadIdx.x + i * 128 < hs) value[i] = joined(value[i], count[0],
                        numbers[threadIdx.x + i * 128], count[1]);
            }
        }
    }
    sum = __fadd_rn(sum, a.tile_len == FLASH_TILE ? sink_weight<true>(a, blockIdx.y, before) :
        sink_weight<false>(a, blockIdx.y, before));
#pragma unroll
    for (u32 i = 0; i < DIMS; i++)
        if (threadIdx.x + i * 128 < hs) a.out[head * hs + threadIdx.x + i * 128] = __fdiv_rn(value[i], sum);
}

KERNEL void __launch_bounds__(128) attention_merge(Attention a) { merge_head<2>(a, a.head_size); }

// `WideAttention` of prefill.cu.
struct WideAttention {
    Attention attention;
    u32 first_value, value_size;
};

KERNEL void __launch_bounds__(128) attention_merge_wide(WideAttention w) { merge_head<5>(w.attention, w.value_size); }

// Merges tiles of the tensor-core kernels, with 128 threads for 32 dimensions of a head; blockIdx: x = row, y = head, z
// = dimensions.
//
// Tiles are held in registers until their factors are known. All threads multiply them in, so that only one fused
// operation a tile is left to be done in order: by one warp for the values, and by another for the weights.
static const u32 MERGED = 32;

template <int HS>
DEVICE void merge_part(const Attention& a) {
    static const u32 PITCH = HS + TILE_EXTRA, HELD = 16, SIDE_BY_SIDE = 16;
    extern __shared__ uint4 shared_tiles[];
    __shared__ float warp_largest[4], total;
    u32 stage_bytes = room_for_tiles(a.max_tiles);
    float* stage = (float*)shared_tiles;                       // [tile][dimension], as they are added
    float* keeps = (float*)((u8*)shared_tiles + stage_bytes);  // of each tile: the factor on the sums before it
    float* adds = keeps + a.max_tiles;
    float* sums = adds + a.max_tiles;
    let_next_start();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = a.positions[blockIdx.x];
    u32 first = a.window && position + 1 > a.window ? position + 1 - a.window : 0;
    u32 begin_tile = first / FLASH_TILE, num_tiles = position / FLASH_TILE + 1 - begin_tile;
    u32 at_once = min(stage_bytes / (MERGED * 4), HELD * SIDE_BY_SIDE) & ~(SIDE_BY_SIDE - 1);
    u64 head = (u64)blockIdx.x * a.num_heads + blockIdx.y;
    const float* from = a.partial + (head * a.max_tiles + begin_tile) * PITCH;
    // A thread has four dimensions of some tiles, and the factors of some adjacent tiles.
    u32 my_row = threadIdx.x / 8, my_dimension = threadIdx.x % 8 * 4;
    u32 each = (num_tiles + 127) / 128, my_first = min(threadIdx.x * each, num_tiles), my_end = min(my_first + each,
        num_tiles);
    const float* numbers = from + blockIdx.z * MERGED + my_dimension + my_row * PITCH;
    float4 held[HELD];
    auto hold = [&](u32 base) {
        u32 end = min(at_once, num_tiles - base);
#pragma unroll
        for (u32 k = 0; k < HELD; k++)
            if (my_row + k * SIDE_BY_SIDE < end) held[k] =
                __ldcg((const float4*)(numbers + (base + k * SIDE_BY_SIDE) * (u64)PITCH));
    };
    auto of_tile = [&](u32 tile) { return __ldcg((const float2*)(from + tile * (u64)PITCH + HS)); };
    const float nothing = __int_as_float(0xff800000);
    float2 near[2] = {make_float2(nothing, 0.0f), make_float2(nothing, 0.0f)};
    wait_for_previous();
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (my_first + i < my_end) near[i] = of_tile(my_first + i);
    hold(0);
    float largest = nothing;
    auto note = [&](u32 tile, float2 numbers) {
        keeps[tile] = numbers.x;
        sums[tile] = numbers.y;
        largest = fmaxf(largest, numbers.x);
    };
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        if (my_first + i < my_end) note(my_first + i, near[i]);
#pragma unroll 1
    for (u32 tile = my_first + 2; tile < my_end; tile++) note(tile, of_tile(tile));
    // The largest score of all tiles before them.
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        float other = __shfl_up_sync(FULL_WARP, largest, i);
        if ((int)lane >= i) largest = fmaxf(largest, other);
    }
    if (lane == 31) warp_largest[warp] = largest;
    float before = __shfl_up_sync(FULL_WARP, largest, 1);
    if (lane == 0) before = nothing;
    __syncthreads();
#pragma unroll
    for (u32 w = 0; w < 3; w++)
        if (w < warp) before = fmaxf(before, warp_largest[w]);
#pragma unroll 1
    for (u32 tile = my_first; tile < my_end; tile++) {
        float here = keeps[tile], so_far = fmaxf(before, here), add = share<true>(here, so_far);
        keeps[tile] = share<true>(before, so_far);
        adds[tile] = add;
        sums[tile] = __fmul_rn(sums[tile], add);
        before = so_far;
    }
    __syncthreads();
    float result = 0.0f;
#pragma unroll 1
    for (u32 base = 0;;) {
        u32 end = min(at_once, num_tiles - base);
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            u32 tile = my_row + k * SIDE_BY_SIDE;
            if (tile >= end) break;
            float add = adds[base + tile];
            *(float4*)(stage + tile * MERGED + my_dimension) =
                make_float4(__fmul_rn(held[k].x, add), __fmul_rn(held[k].y, add), __fmul_rn(held[k].z, add),
                    __fmul_rn(held[k].w, add));
        }
        __syncthreads();
        bool has_more = base + end < num_tiles;
        if (has_more) hold(base + end);
        // A warp for the values, and one for the weights.
        if (warp < 2) {
            const float* keep = keeps + base;
            const float* number = warp == 0 ? stage + lane : sums + base;
            u32 stride = warp == 0 ? MERGED : 1;
#pragma unroll 8
            for (u32 tile = 0; tile < end; tile++) result = __fmaf_rn(result, keep[tile], number[tile * stride]);
        }
        if (!has_more) break;
        base += end;
        __syncthreads();
    }
    if (threadIdx.x == 32) {
        float most = fmaxf(fmaxf(warp_largest[0], warp_largest[1]), fmaxf(warp_largest[2], warp_largest[3]));
        total = __fadd_rn(result, sink_weight<true>(a, blockIdx.y, most));
    }
    __syncthreads();
    if (warp == 0) a.out[head * HS + blockIdx.z * MERGED + lane] = __fdiv_rn(result, total);
}

#define MERGE_PART(HS) \
    KERNEL void __launch_bounds__(128, 1) merge_part_##HS(Attention a) { merge_part<HS>(a); }

MERGE_PART(64)
MERGE_PART(128)
MERGE_PART(256)
