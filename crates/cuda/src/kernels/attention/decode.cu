// Attention of single tokens (decode), keys and values in panels: the arithmetic of prefill.cu and prefill_wgmma.cu to
// the bit. out = sum over visible j of softmax_j(cap(scale * q.k_j)) v_j; queries and out are [rows][heads *
// head_size].
//
// A team of four warps works on a tile of keys. With one or two rows and few tiles a block has four teams, which merge
// their tiles in shared memory; with more tiles every tile has a block; with still more tiles or rows, the tiles of
// each row are distributed over as many blocks as run at once. The block that ends last merges them or, if they are
// many, merge_tiles.cu. With many rows a block takes all tiles of a row, one after the other. In a step the kernel also
// does what comes before attention: it rotates the token's query and key, and stores its key and value. All keys but
// the token's own are then older than the step, so they are loaded before the kernel before this one has ended.
//
// Each warp of a team scores a quarter of the keys of a tile, then sums a quarter of the dimensions.
//
// Bytes moved: every visible key and value once. Bound: memory bandwidth, with long contexts; latency, with short ones.

struct OneToken {
    Attention a;
    // The tokens to rotate and store; null if that was done before.
    const float* keys;    // [rows][kv heads * head_size]
    const float* values;
    const float* angles;  // [rows][cos of every pair, then sin]
    const u32* slots;
    // For each row and blockIdx.y: number of tiles that are done, 0 between launches; null if `merge_part` follows.
    u32* arrived;
    u32 pairs, interleaved, num_blocks;
    // Query heads that share a kv head; the number of them that a block takes (a divisor of 16), and the number of such
    // pieces.
    u32 group, piece_len, num_pieces;
};

// Value d of a head, rotated.
DEVICE float rotated(const float* x, u32 d, const float* angles, u32 pairs, bool interleaved) {
    if (d >= 2 * pairs) return x[d];
    bool is_second = interleaved ? d % 2 : d >= pairs;
    u32 distance = interleaved ? 1 : pairs, first = is_second ? d - distance : d,
        pair = interleaved ? first / 2 : first;
    float a = x[first], b = x[first + distance];
    rotate(a, b, angles[pair], angles[pairs + pair]);
    return is_second ? b : a;
}

DEVICE void store_shared(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
        "r"(v.w) : "memory");
}

DEVICE void store_shared(u32 to, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory"); }

DEVICE float2 load_fresh(const float2* p) { return __ldcg(p); }
DEVICE float4 load_fresh(const float4* p) { return __ldcg(p); }

// The part of a step that a block attends.
struct Place {
    u32 row, kv_head, heads;
    u64 first_place;  // offset of the first query head among those of all rows
    u32 position, first, slot;
    u32 first_block;  // index of the first block of the sequence in the table
    u32 lowest, num_tiles;
    bool rotates;

    // The first query head among those of the row.
    __device__ __forceinline__ u32 first_head(const Attention& a) const { return (u32)first_place - row * a.num_heads; }
};

// Merges the tiles of some heads of a row, by 128 threads. The factors of all tiles are computed at once, from the
// largest score so far, which is exact; the sums follow in ascending order.
template <int HS>
DEVICE void merge_tiles(const Attention& a, const Place& at, float* counts) {
    static const u32 PITCH = HS + TILE_EXTRA;
    const float nothing = __int_as_float(0xff800000);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 heads = at.heads, num_tiles = at.num_tiles;
    const float* partial = a.partial + (at.first_place * a.max_tiles + at.lowest) * PITCH;
    u64 head_stride = (u64)a.max_tiles * PITCH;
    // `counts` is [head][tile][keep, add, sum], then the weights of the heads' sinks.
    float* sinks = counts + 3 * heads * num_tiles;
    for (u32 head = warp; head < heads; head += 4) {
        float before = nothing;
        for (u32 base = 0; base < num_tiles; base += 32) {
            u32 tile = base + lane;
            float2 of_tile = tile < num_tiles ? load_fresh((const float2*)(partial +
                head * head_stride + tile * (u64)PITCH + HS)) : make_float2(nothing, 0.0f);
            float so_far = of_tile.x;
            for (int i = 1; i < 32; i *= 2) {
                float other = __shfl_up_sync(FULL_WARP, so_far, i);
                if ((int)lane >= i) so_far = fmaxf(so_far, other);
            }
            float neighbour = __shfl_up_sync(FULL_WARP, so_far, 1);
            float previous = lane == 0 ? before : fmaxf(before, neighbour);
            so_far = fmaxf(so_far, before);
            if (tile < num_tiles) {
                float* count = counts + 3 * (head * num_tiles + tile);
                count[0] = share<true>(previous, so_far);
                count[1] = share<true>(of_tile.x, so_far);
                count[2] = of_tile.y;
            }
            before = __shfl_sync(FULL_WARP, so_far, 31);
        }
        if (lane == 0) sinks[head] = sink_weight<true>(a, at.first_head(a) + head, before);
    }
    __syncthreads();
    for (u32 item = threadIdx.x; item < heads * (HS / 4); item += 128) {
        u32 head = item / (HS / 4), d = item % (HS / 4) * 4;
        const float* from = partial + head * head_stride + d;
        const float* count = counts + 3 * head * num_tiles;
        float sum = 0.0f;
        float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        // All loads are issued before the first use.
        static const u32 TOGETHER = 16;
#pragma unroll 1
        for (u32 base = 0; base < num_tiles; base += TOGETHER) {
            float4 next[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++)
                if (base + i < num_tiles) next[i] = load_fresh((const float4*)(from + (base + i) * (u64)PITCH));
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                if (base + i >= num_tiles) continue;
                float keep = count[3 * (base + i)], add = count[3 * (base + i) + 1];
                sum = joined(sum, keep, count[3 * (base + i) + 2], add);
                value = make_float4(joined(value.x, keep, next[i].x, add), joined(value.y, keep, next[i].y, add),
                                    joined(value.z, keep, next[i].z, add), joined(value.w, keep, next[i].w, add));
            }
        }
        sum = __fadd_rn(sum, sinks[head]);
        *(float4*)(a.out + (at.first_place + head) * HS + d) =
            make_float4(__fdiv_rn(value.x, sum), __fdiv_rn(value.y, sum), __fdiv_rn(value.z, sum), __fdiv_rn(value.w,
                sum));
    }
}

DEVICE Place place_of(const OneToken& p) {
    const Attention& a = p.a;
    Place at;
    at.rotates = p.keys != 0;
    at.row = blockIdx.x;
    // Loaded together: each may have to come from memory.
    at.position = a.positions[at.row];
    at.first_block = a.first_blocks[at.row];
    at.slot = at.rotates ? p.slots[at.row] : 0;
    at.first = a.window && at.position + 1 > a.window ? at.position + 1 - a.window : 0;
    at.lowest = at.first / FLASH_TILE;
    at.num_tiles = at.position / FLASH_TILE + 1 - at.lowest;
    at.kv_head = p.num_pieces == 1 ? blockIdx.y : blockIdx.y / p.num_pieces;
    u32 first_head = at.kv_head * p.group + (blockIdx.y - at.kv_head * p.num_pieces) * p.piece_len;
    at.heads = min(p.piece_len, (at.kv_head + 1) * p.group - first_head);
    at.first_place = (u64)at.row * a.num_heads + first_head;
    return at;
}

// Queries lie in shared memory as 16 rows of 16-bit values; the pitch of a row is no multiple of 128 bytes.
template <int HS>
struct Queries {
    static const u32 PITCH = HS * 2 + 16;
    __align__(16) u8 numbers[16 * PITCH];
};

// Rows without a head are zeros.
template <int HS>
DEVICE void clear_queries(Queries<HS>& queries, u32 heads) {
    const u32 pitch = Queries<HS>::PITCH;
    for (u32 i = threadIdx.x; i < (16 - heads) * pitch / 16; i += blockDim.x)
        store_shared(shared_address(queries.numbers) + heads * pitch + i * 16, make_uint4(0, 0, 0, 0));
}

// All loads are issued before the first use.
template <int S, int HS, u32 TOGETHER>
DEVICE void put_queries(Queries<HS>& queries, const OneToken& p, const Place& at) {
    const float* angles = p.angles + (u64)at.row * 2 * p.pairs;
    u32 count = at.heads * HS;
    for (u32 base = threadIdx.x; base < count; base += TOGETHER * blockDim.x) {
        float number[TOGETHER];
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 i = base + j * blockDim.x;
            const float* x = p.a.queries + (at.first_place + i / HS) * HS;
            if (i < count) number[j] = at.rotates ? rotated(x, i % HS, angles, p.pairs, p.interleaved) : x[i % HS];
        }
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 i = base + j * blockDim.x;
            u32 to = shared_address(queries.numbers) + i / HS * Queries<HS>::PITCH + i % HS * 2;
            if (i < count) store_shared(to, (u16)pack_pair<S>(number[j], 0.0f));
        }
    }
}

// Values that the warps of a team exchange.
struct TeamShared {
    static const u32 WEIGHT_PITCH = 144;
    float maxima[4][16], sums[4][16];
    __align__(16) u8 weights[16 * WEIGHT_PITCH];
};

// Four warps that work on a tile. Keys and values of 8 bits are converted to f16 before they are written to shared
// memory.
template <int STORED, int HS>
struct Team {
    static const int S = STORED == STORE_Q8 ? STORE_F16 : STORED;
    static const u32 PANELS = HS / 64, PANEL_BYTES = FLASH_TILE * 128, STAGE_BYTES = PANELS * PANEL_BYTES;
    static const u32 OWN = (HS + 127) / 128;

    const OneToken& p;
    const Place& at;
    TeamShared& shared;
    u32 base;     // address of its stages
    u32 queries;  // address in shared memory
    u32 number;   // index among the teams of the block
    u32 end_tile;
    u32 thread, warp, lane, g, t;
    const u32* table;  // the blocks of the row's sequence
    u32 block_log;     // keys of a block are a power of two
    u16 own[2][OWN];   // the token's key and value

    __device__ __forceinline__ Team(const OneToken& p, const Place& at, TeamShared* all, const Queries<HS>& queries,
        u32 base)
        : p(p), at(at), shared(all[threadIdx.x / 128]), base(base), queries(shared_address(queries.numbers)),
            number(threadIdx.x / 128) {
        thread = threadIdx.x % 128;
        warp = thread / 32;
        lane = thread % 32;
        g = lane / 4;
        t = lane % 4;
        table = p.a.block_tables + at.first_block;
        block_log = logarithm(p.a.block_len);
    }

    __device__ __forceinline__ void wait_for_each_other()
        const { asm volatile("bar.sync %0, 128;" ::"r"(1 + number) : "memory"); }

    // The block that holds the key of this thread, which copies half a row of a panel.
    __device__ __forceinline__ u32 key_of(u32 tile) const { return tile * FLASH_TILE + thread / 2; }
    __device__ __forceinline__ u32 block_of(u32 tile) const {
        u32 key = key_of(tile);
        return tile < end_tile && key <= at.position ? table[key >> block_log] : 0;
    }

    // Starts to load the keys or values of a tile, which are in `block`, but for the token's own.
    __device__ __forceinline__ void fetch(u32 tile, u32 block, u32 values, u32 stage) const {
        const u8* blocks = (const u8*)(values ? p.a.value_blocks : p.a.key_blocks);
        if (STORED == STORE_Q8)
            fetch_bytes(tile, block, blocks, stage);
        else
            copy_rows(tile, block, blocks, stage);
        copy_async_commit();
    }

    __device__ __forceinline__ bool is_own(u32 key) const { return at.rotates && key == at.position; }

    // Keys or values of 16 bits have the same layout in shared memory as in the blocks. A warp copies whole lines: four
    // rows of a panel at a time, of its 16. Eight rows are in one block.
    __device__ __forceinline__ void copy_rows(u32 tile, u32 block, const u8* blocks, u32 stage) const {
        const Attention& a = p.a;
        if (tile >= end_tile) return;
        u32 r = warp * 16 + lane / 8, to = base + stage * STAGE_BYTES + r * 128 + lane % 8 * 16;
        u32 block_bytes = (a.num_kv_heads * PANELS * 128) << block_log;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 first = tile * FLASH_TILE + r + half * 8, offset = first & (a.block_len - 1);
            u32 within = (((at.kv_head * PANELS) << block_log) + offset) * 128 + lane % 8 * 16;
            const u8* from = blocks + (u64)__shfl_sync(FULL_WARP, block, half * 16) * block_bytes + within;
#pragma unroll
            for (u32 four = 0; four < 2; four++) {
                u32 key = first + four * 4;
                if (is_own(key)) continue;
#pragma unroll
                for (u32 panel = 0; panel < PANELS; panel++)
                    copy_async(to + panel * PANEL_BYTES + half * 1024 + four * 512,
                        from + (panel << block_log) * 128 + four * 512, key <= at.position);
            }
        }
    }

    // Keys or values of 8 bits become f16: a thread converts half a row of a panel, which is a group.
    __device__ __forceinline__ void fetch_bytes(u32 tile, u32 block, const u8* blocks, u32 stage) const {
        const Attention& a = p.a;
        u32 r = thread / 2, key = key_of(tile), offset = key & (a.block_len - 1);
        if (tile >= end_tile || is_own(key)) return;
#pragma unroll
        for (u32 panel = 0; panel < PANELS; panel++) {
            u32 to = base + stage * STAGE_BYTES + panel * PANEL_BYTES + r * 128;
            u64 place = ((((u64)block * a.num_kv_heads +
                at.kv_head) << block_log) + offset) * HS + panel * 64 + thread % 2 * 32;
            u16 scale = q8_scale(blocks, a.num_stored, place);
            uint4 bytes[2] = {((const uint4*)(blocks + place))[0], ((const uint4*)(blocks + place))[1]};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                uint4 pair = bytes[i / 2];
                uint4 halves = q8_to_halves(i % 2 ? make_uint2(pair.z, pair.w) : make_uint2(pair.x, pair.y), scale);
                if (key > at.position) halves = make_uint4(0, 0, 0, 0);
                store_shared(to + ((thread % 2 * 4 + i) ^ r % 8) * 16, halves);
            }
        }
    }

    // The token's rotated key and its value, for the team that has its tile.
    __device__ __forceinline__ void hold_own() {
        const float* angles = p.angles + (u64)at.row * 2 * p.pairs;
        u64 head = ((u64)at.row * p.a.num_kv_heads + at.kv_head) * HS;
#pragma unroll
        for (u32 k = 0; k < OWN; k++) {
            u32 d = thread + k * 128;
            if (d >= HS) continue;
            own[0][k] = kept(S, rotated(p.keys + head, d, angles, p.pairs, p.interleaved));
            own[1][k] = kept(S, p.values[head + d]);
        }
    }

    // Writes the token's key or value into its block, and into the stage of its tile.
    __device__ __forceinline__ void store_own(u32 values, u32 stage) const {
        const Attention& a = p.a;
        u32 r = at.position % FLASH_TILE;
        u16* blocks = (u16*)(values ? a.value_blocks : a.key_blocks);
#pragma unroll
        for (u32 k = 0; k < OWN; k++) {
            u32 d = thread + k * 128;
            if (d >= HS) continue;
            store_shared(base + stage * STAGE_BYTES +
                d / 64 * PANEL_BYTES + r * 128 + (d / 8 % 8 ^ r % 8) * 16 + d % 8 * 2, own[values][k]);
            if (at.slot >> block_log < p.num_blocks)
                blocks[kv_place((u64)(at.slot >> block_log) * a.num_kv_heads + at.kv_head,
                    at.slot & (a.block_len - 1), d, HS, a.block_len, true)] = own[values][k];
        }
    }

    // The scores of a warp, 16 heads by two times 8 keys; the other warps get their largest.
    __device__ __forceinline__ void score(float (&score)[2][4], u32 tile, u32 stage) const {
        // Pieces of 16 bytes are permuted by their row, as in `kv_place`: from here on they are at fixed distances.
        u32 row_at = base + stage * STAGE_BYTES + (warp * 16 + lane % 8) * 128, piece = (lane / 8 ^ lane % 8) * 16;
        u32 near = row_at + piece, far = row_at + (piece ^ 64);
#pragma unroll
        for (int n = 0; n < 2; n++) score[n][0] = score[n][1] = score[n][2] = score[n][3] = 0.0f;
#pragma unroll
        for (int s = 0; s < HS / 16; s += 2) {
            u32 q[2][4], from = queries + lane % 16 * Queries<HS>::PITCH + s * 32 + lane / 16 * 16;
            load_matrices(q[0], from);
            load_matrices(q[1], from + 32);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 k[4];
                load_matrices(k, (s % 4 ? far : near) + s / 4 * PANEL_BYTES + n * 8 * 128);
                multiply_pair<S>(score[n], q[0], k[0], k[1]);
                multiply_pair<S>(score[n], q[1], k[2], k[3]);
            }
        }
        const float nothing = __int_as_float(0xff800000);
        float largest[2] = {nothing, nothing};
        u32 first_key = tile * FLASH_TILE;
        if (p.a.cap != 0.0f || first_key < at.first || first_key + FLASH_TILE > at.position + 1)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    score[n][i] = seen_score(p.a, score[n][i], first_key + warp * 16 + n * 8 + 2 * t + i % 2,
                        at.first, at.position);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) largest[i / 2] = fmaxf(largest[i / 2], score[n][i]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 1));
            largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL_WARP, largest[i], 2));
            if (t == 0) shared.maxima[warp][g + 8 * i] = largest[i];
        }
    }

    // Turns scores into weights that all warps use. Returns the largest score of the tile.
    __device__ __forceinline__ void weigh(float (&score)[2][4], float (&largest)[2]) const {
        const float factor = exponent_factor(p.a);
        const float (*maxima)[16] = shared.maxima;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 m = g + 8 * i;
            largest[i] = __fmul_rn(fmaxf(fmaxf(maxima[0][m], maxima[1][m]), fmaxf(maxima[2][m], maxima[3][m])), factor);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) score[n][i] = weight_of(score[n][i], factor, exponent_offset(largest[i / 2]));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float quarter = quarter_sum(score[0][2 * i], score[0][2 * i + 1], score[1][2 * i], score[1][2 * i + 1]);
            if (t == 0) shared.sums[warp][g + 8 * i] = quarter;
#pragma unroll
            for (int n = 0; n < 2; n++)
                *(u32*)(shared.weights + (g + 8 * i) * TeamShared::WEIGHT_PITCH +
                    (warp * 16 + n * 8 + 2 * t) * 2) = pack_pair<S>(score[n][2 * i], score[n][2 * i + 1]);
        }
    }

    // The sum of a head's weights.
    __device__ __forceinline__ float sum_of_weights(u32 head) const {
        const float (*sums)[16] = shared.sums;
        return __fadd_rn(__fadd_rn(__fadd_rn(sums[0][head], sums[1][head]), sums[2][head]), sums[3][head]);
    }

    // The weighted sums of values for the dimensions of a warp: `take(c, sum)` gets 16 heads by 8 dimensions.
    template <class TakeSums>
    __device__ __forceinline__ void sum_values(u32 stage, TakeSums take) const {
        u32 w[4][4];
#pragma unroll
        for (int s = 0; s < 4; s++)
            load_matrices(w[s], shared_address(shared.weights)
                + (lane % 16) * TeamShared::WEIGHT_PITCH + s * 32 + lane / 16 * 16);
        u32 first = warp * (HS / 32);  // pieces of 8 dimensions
        u32 row_at = base + stage * STAGE_BYTES + first / 8 * PANEL_BYTES + lane * 128,
            piece = (first % 8 ^ lane % 8) * 16;
#pragma unroll
        for (int c = 0; c < HS / 32; c++) {
            u32 at = row_at + (piece ^ c * 16);
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < 4; s += 2) {
                u32 v[4];
                load_transposed(v, at + s * 16 * 128);
                multiply_pair<S>(sum, w[s], v[0], v[1]);
                multiply_pair<S>(sum, w[s + 1], v[2], v[3]);
            }
            take(c, sum);
        }
    }

    // Offset of two adjacent sums of a head that a thread has.
    __device__ __forceinline__ u32 dimension(int c) const { return (warp * (HS / 32) + c) * 8 + 2 * t; }

    // The sums of a head that a thread has; `of(c)` gives two.
    template <class Of>
    __device__ __forceinline__ void put(float* head, Of of) const {
#pragma unroll
        for (int c = 0; c < HS / 32; c++) *(float2*)(head + dimension(c)) = of(c);
    }
};

// The tiles of a row that a block takes.
enum Take { ONE, SHARE, ALL };

// blockIdx: x = row, y = kv head and piece of its group, z = tile or share of the tiles.
template <int STORED, int HS, Take TAKE>
DEVICE void attend_one(const OneToken& p) {
    typedef Team<STORED, HS> T;
    // Keys and values alternate: keys, values, keys of the next tile, ... Loads are in flight for all stages that are
    // free.
    static const u32 STAGES = TAKE == ONE ? 2 : 3;
    extern __shared__ uint4 shared_panels[];
    __shared__ TeamShared shared;
    __shared__ Queries<HS> queries;
    const Attention& a = p.a;
    let_next_start();
    if (p.keys == 0) wait_for_previous();
    const Place at = place_of(p);
    u32 share = TAKE == ONE ? 1 : (at.num_tiles + gridDim.z - 1) / gridDim.z;
    u32 begin_tile = at.lowest + blockIdx.z * share, end_tile = min(begin_tile + share, at.lowest + at.num_tiles);
    if (begin_tile >= end_tile) return;

    T team(p, at, &shared, queries, shared_address(shared_panels));
    team.end_tile = end_tile;
    u32 block = team.block_of(begin_tile), next_block = TAKE != ONE ? team.block_of(begin_tile + 1) : 0;
    team.fetch(begin_tile, block, 0, 0);
    team.fetch(begin_tile, block, 1, 1);
    clear_queries(queries, at.heads);
    if (at.rotates) wait_for_previous();
    bool has_own = at.rotates && end_tile == at.lowest + at.num_tiles;
    if (has_own) team.hold_own();
    put_queries<T::S, HS, 4>(queries, p, at);

    const float nothing = __int_as_float(0xff800000);
    Running running[2] = {{nothing, 0.0f}, {nothing, 0.0f}};
    float out[HS / 32][4];
#pragma unroll
    for (int c = 0; c < HS / 32; c++) out[c][0] = out[c][1] = out[c][2] = out[c][3] = 0.0f;
    static const u32 PITCH = HS + TILE_EXTRA;
    float* tile_out = a.partial + ((at.first_place + team.g) * a.max_tiles + begin_tile) * PITCH;
    // The stages of the tile's keys, of its values, and of the next tile's keys.
    u32 key_stage = 0, value_stage = 1, next_stage = 2;
    for (u32 tile = begin_tile; tile < end_tile; tile++) {
        block = TAKE != ONE ? team.block_of(tile + 2) : 0;
        if (TAKE == SHARE) running[0] = running[1] = {nothing, 0.0f};
        copy_async_wait<1>();
        if (has_own && tile + 1 == end_tile) {
            team.store_own(0, key_stage);
            team.store_own(1, value_stage);
        }
        team.wait_for_each_other();
        // No warp reads the values of the tile before any more.
        if (TAKE != ONE) team.fetch(tile + 1, next_block, 0, next_stage);
        float score[2][4], largest[2];
        team.score(score, tile, key_stage);
        team.wait_for_each_other();
        // No warp reads the keys of this tile any more.
        if (TAKE != ONE) team.fetch(tile + 1, next_block, 1, key_stage);
        team.weigh(score, largest);
        copy_async_wait<TAKE == ONE ? 0 : 2>();
        team.wait_for_each_other();

        float keep[2], add[2];
#pragma unroll
        for (int i = 0; i < 2; i++) merge<true>(running[i], {largest[i], team.sum_of_weights(team.g + 8 * i)},
            keep[i], add[i]);
        team.sum_values(value_stage, [&](int c, const float (&sum)[4]) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[c][i] = TAKE == ALL ? joined(out[c][i], keep[i / 2], sum[i],
                add[i / 2]) : sum[i];
        });
        if (TAKE != ALL) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* to = tile_out + i * 8 * (u64)a.max_tiles * PITCH;
                if (team.g + 8 * i >= at.heads) continue;
                team.put(to, [&](int c) { return make_float2(out[c][2 * i], out[c][2 * i + 1]); });
                if (team.warp == 0 && team.t == 0) *(float2*)(to + HS) = make_float2(running[i].largest,
                    running[i].sum);
            }
            tile_out += PITCH;
        }
        // The values replace the keys.
        u32 freed = value_stage;
        value_stage = key_stage;
        key_stage = next_stage;
        next_stage = freed;
        next_block = block;
    }
    if (TAKE == ALL) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 head = team.g + 8 * i;
            if (head >= at.heads) continue;
            float sum = __fadd_rn(running[i].sum, sink_weight<true>(a, at.first_head(a) + head, running[i].largest));
            team.put(a.out + (at.first_place + head) * HS, [&](int c) {
                return make_float2(__fdiv_rn(out[c][2 * i], sum), __fdiv_rn(out[c][2 * i + 1], sum));
            });
        }
    }
    if (TAKE == ALL || p.arrived == 0) return;

    __shared__ bool is_last;
    u32* arrived = p.arrived + at.row * gridDim.y + blockIdx.y;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 mine = end_tile - begin_tile;
        is_last = atomicAdd(arrived, mine) == at.num_tiles - mine;
        if (is_last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) merge_tiles<HS>(a, at, (float*)shared_panels);
}

// The results of the tiles of all teams, to be merged.
static const u32 TEAMS = 4;

template <int HS>
struct TeamTiles {
    float values[TEAMS][16][HS + 8];  // the pitch of a head is no multiple of 32 values
    Running of_tile[TEAMS][16];
};

// All tiles of a row, one for each of four teams. Two stages a team.
template <int STORED, int HS>
DEVICE void attend_in_teams(const OneToken& p) {
    typedef Team<STORED, HS> T;
    extern __shared__ uint4 shared_panels[];
    __shared__ TeamShared shared[TEAMS];
    __shared__ Queries<HS> queries;
    TeamTiles<HS>& tiles = *(TeamTiles<HS>*)((u8*)shared_panels + TEAMS * 2 * T::STAGE_BYTES);
    let_next_start();
    if (p.keys == 0) wait_for_previous();
    const Place at = place_of(p);
    u32 team_number = threadIdx.x / 128, tile = at.lowest + team_number;
    T team(p, at, shared, queries, shared_address(shared_panels) + team_number * 2 * T::STAGE_BYTES);
    team.end_tile = at.lowest + at.num_tiles;
    u32 block = team.block_of(tile);
    team.fetch(tile, block, 0, 0);
    team.fetch(tile, block, 1, 1);
    clear_queries(queries, at.heads);
    if (at.rotates) wait_for_previous();
    bool has_own = at.rotates && tile + 1 == team.end_tile;
    if (has_own) team.hold_own();
    put_queries<T::S, HS, 1>(queries, p, at);
    __syncthreads();

    const float nothing = __int_as_float(0xff800000);
    if (tile < team.end_tile) {
        copy_async_wait<1>();
        if (has_own) {
            team.store_own(0, 0);
            team.store_own(1, 1);
        }
        team.wait_for_each_other();
        float score[2][4], largest[2];
        team.score(score, tile, 0);
        team.wait_for_each_other();
        team.weigh(score, largest);
        copy_async_wait<0>();
        team.wait_for_each_other();
        team.sum_values(1, [&](int c, const float (&sum)[4]) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (team.g + 8 * i < at.heads) *(float2*)(&tiles.values[team_number][team.g +
                    8 * i][team.dimension(c)]) = make_float2(sum[2 * i], sum[2 * i + 1]);
        });
        if (team.warp == 0 && team.t == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                Running of_tile = {nothing, 0.0f};
                float keep, add;
                merge<true>(of_tile, {largest[i], team.sum_of_weights(team.g + 8 * i)}, keep, add);
                tiles.of_tile[team_number][team.g + 8 * i] = of_tile;
            }
    }
    __syncthreads();
#pragma unroll 1
    for (u32 item = threadIdx.x; item < at.heads * HS; item += 128 * TEAMS) {
        u32 head = item / HS;
        Running running = {nothing, 0.0f};
        float total = 0.0f;
#pragma unroll
        for (u32 n = 0; n < TEAMS; n++) {
            if (n >= at.num_tiles) break;
            float keep, add;
            merge<true>(running, tiles.of_tile[n][head], keep, add);
            total = joined(total, keep, tiles.values[n][head][item % HS], add);
        }
        float sum = __fadd_rn(running.sum, sink_weight<true>(p.a, at.first_head(p.a) + head, running.largest));
        p.a.out[at.first_place * HS + item] = __fdiv_rn(total, sum);
    }
}

#define DECODE_TILE(NAME, S, HS) \
    KERNEL void __launch_bounds__(128, 4) decode_tile_##NAME##_##HS(OneToken p) { attend_one<S, HS, ONE>(p); } \
    KERNEL void __launch_bounds__(128, 4) decode_share_##NAME##_##HS(OneToken p) { attend_one<S, HS, SHARE>(p); }
#define DECODE_ALL(NAME, S, HS) \
    KERNEL void __launch_bounds__(128) decode_all_##NAME##_##HS(OneToken p) { attend_one<S, HS, ALL>(p); }
#define DECODE_TEAMS(NAME, S, HS) \
    KERNEL void __launch_bounds__(512, 1) decode_teams_##NAME##_##HS(OneToken p) { attend_in_teams<S, HS>(p); }

DECODE_TILE(f16, STORE_F16, 64)
DECODE_TILE(f16, STORE_F16, 128)
DECODE_TILE(f16, STORE_F16, 256)
DECODE_TILE(bf16, STORE_BF16, 64)
DECODE_TILE(bf16, STORE_BF16, 128)
DECODE_TILE(bf16, STORE_BF16, 256)
DECODE_TILE(q8, STORE_Q8, 64)
DECODE_TILE(q8, STORE_Q8, 128)
DECODE_TILE(q8, STORE_Q8, 256)

DECODE_ALL(f16, STORE_F16, 64)
DECODE_ALL(f16, STORE_F16, 128)
DECODE_ALL(f16, STORE_F16, 256)
DECODE_ALL(bf16, STORE_BF16, 64)
DECODE_ALL(bf16, STORE_BF16, 128)
DECODE_ALL(bf16, STORE_BF16, 256)

DECODE_TEAMS(f16, STORE_F16, 64)
DECODE_TEAMS(f16, STORE_F16, 128)
DECODE_TEAMS(bf16, STORE_BF16, 64)
DECODE_TEAMS(bf16, STORE_BF16, 128)
DECODE_TEAMS(q8, STORE_Q8, 64)
DECODE_TEAMS(q8, STORE_Q8, 128)
