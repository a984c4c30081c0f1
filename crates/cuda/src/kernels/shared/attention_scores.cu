// Shared by the kernels of attention: their parameter, the layout of keys and values, and the merging of tiles.

// With 8 bits, values share a scale in groups of 32: first come the signed bytes of a whole tensor, then the scales as
// f16.
enum Storage { STORE_F32 = 0, STORE_F16 = 1, STORE_BF16 = 2, STORE_Q8 = 3 };

static const u32 Q8_GROUP = 32;

// Offset of a value of a key or value; `head` counts the heads of all blocks. In panels, a block of a head is panels of
// 64 columns; a row of a panel is 128 bytes, and its pieces of 16 bytes are permuted by the row's number, as the tensor
// cores read them without bank conflicts.
DEVICE u64 kv_place(u64 head, u32 offset, u32 d, u32 head_size, u32 block_len, bool in_panels) {
    if (!in_panels) return (head * block_len + offset) * head_size + d;
    return ((head * (head_size / 64) + d / 64) * block_len + offset) * 64 + ((d / 8 ^ offset) % 8) * 8 + d % 8;
}

// Maximum tokens of a run: consecutive tokens of one sequence.
static const u32 RUN = 8;

// Values after the sums of a tile: its largest score, the sum of weights, and padding to a multiple of four.
static const u32 TILE_EXTRA = 4;

struct Attention {
    const float* queries;      // [rows][heads * head_size]
    const void* key_blocks;
    const void* value_blocks;
    float* out;
    const u32* positions;      // of each row
    const u32* first_blocks;   // for each row, the start of its sequence's block table
    const u32* block_tables;
    float* partial;            // [rows][heads][tiles][head_size + TILE_EXTRA] when each tile has a block
    u32 num_rows, num_heads, num_kv_heads, head_size, block_len;
    u32 window;                // 0: none
    u32 max_tiles, tile_len;
    float scale, cap;          // cap 0: none
    const u32* first_rows;     // for each row, the first row of its sequence, and the end of its rows
    const u32* end_rows;
    const u32* runs;           // the first row of every run
    u32 num_runs, in_panels;
    // Values of key_blocks and of value_blocks: the offset in bytes of the scales of 8-bit storage.
    u64 num_stored;
    const float* sinks;        // a score of each head that takes part in its softmax and has no value; null: none
};

// A key or a value in 16 bits. A value that the format cannot hold becomes a NaN: an infinite key could get the weight
// zero and go unnoticed.
DEVICE u16 kept(u32 storage, float x) {
    u16 bits = storage == STORE_F16 ? float_to_half(x) : float_to_bf16(x);
    bool is_infinite = (bits & 0x7fff) == (storage == STORE_F16 ? 0x7c00 : 0x7f80);
    return bits | (u16)is_infinite;
}

// The scale of the group of value i, in a tensor with `num_stored` values.
DEVICE u16 q8_scale(const void* blocks, u64 num_stored, u64 i) {
    return ((const u16*)((const u8*)blocks + num_stored))[i / Q8_GROUP];
}

// Eight signed bytes times a scale, each product rounded to f16: the input of the tensor cores for 8-bit storage.
DEVICE uint4 q8_to_halves(uint2 bytes, u16 scale) {
    u32 both = (u32)scale << 16 | scale, out[4], from[2] = {bytes.x ^ 0x80808080u, bytes.y ^ 0x80808080u};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // A byte u below the exponent of 1024 is the half 1024 + u, and u is the signed byte plus 128.
        u32 wide = __byte_perm(from[i / 2], 0x64646464u, i % 2 ? 0x4342 : 0x4140);
        out[i] = half2_mul(half2_add(wide, 0xe480e480u), both);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

// A softmax over some keys. Merging with an empty one is exact.
struct Running {
    float largest, sum;
};

DEVICE float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The factor of a sum whose largest score is `here` when the largest of all is `largest`. Scores are exponents of e in
// the plain kernel, and of two on the tensor cores: one instruction instead of ten for each score, with an error far
// below that of weights of 16 bits.
template <bool OF_TWO>
DEVICE float share(float here, float largest) {
    if (here == largest) return 1.0f;
    float difference = __fsub_rn(here, largest);
    return OF_TWO ? power_of_two(difference) : expf(difference);
}

DEVICE float joined(float a, float keep, float b, float add) { return __fmaf_rn(a, keep, __fmul_rn(b, add)); }

// The factors of the sums of `a` and of `b` in their union.
template <bool OF_TWO>
DEVICE void merge(Running& a, const Running& b, float& keep, float& add) {
    float largest = fmaxf(a.largest, b.largest);
    keep = share<OF_TWO>(a.largest, largest);
    add = share<OF_TWO>(b.largest, largest);
    a.sum = joined(a.sum, keep, b.sum, add);
    a.largest = largest;
}

// The weight of a head's attention sink, relative to the largest score of its keys; 0 without sinks. Every kernel adds
// it to the sum of weights last, when all tiles are merged. It may be infinite: no key then has a weight.
template <bool OF_TWO>
DEVICE float sink_weight(const Attention& a, u32 head, float largest) {
    const float log2_e = 1.44269504088896340736f;
    if (a.sinks == 0) return 0.0f;
    float sink = a.sinks[head];
    return OF_TWO ? power_of_two(__fmaf_rn(sink, log2_e, -largest)) : expf(__fsub_rn(sink, largest));
}

static const int FLASH_TILE = 64;

template <int S>
DEVICE u32 pack_pair(float low, float high) {
    u32 d;
    if (S == STORE_F16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

template <int S>
DEVICE void multiply_pair(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (S == STORE_F16)
        mma_f16(d, a, b0, b1);
    else
        mma_bf16(d, a, b0, b1);
}

DEVICE void load_transposed(u32 (&m)[4], u32 shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address));
}

// Not inlined: its code is long, and most models have no cap.
static __device__ __noinline__ float capped(float x, float cap) { return __fmul_rn(cap, tanhf(__fdiv_rn(x, cap))); }

// Scores on the tensor cores are not scaled; times this factor they are exponents of two.
DEVICE float exponent_factor(const Attention& a) {
    const float log2_e = 1.44269504088896340736f;
    return a.cap != 0.0f ? log2_e : __fmul_rn(a.scale, log2_e);
}

// A score with its cap, negative infinity where the key is not visible.
DEVICE float seen_score(const Attention& a, float score, int key, int first, int position) {
    if (a.cap != 0.0f) score = capped(__fmul_rn(score, a.scale), a.cap);
    return key >= first && key <= position ? score : __int_as_float(0xff800000);
}

// Heads that share a kv head, rounded up to a divisor of 16.
DEVICE u32 padded_group(u32 group) { return group <= 1 ? 1 : group <= 2 ? 2 : group <= 4 ? 4 : group <= 8 ? 8 : 16; }

// The offset of the exponents of a row; 0 if no key is visible.
DEVICE float exponent_offset(float largest) { return largest == __int_as_float(0xff800000) ? 0.0f : -largest; }

DEVICE float weight_of(float score, float factor, float offset) { return power_of_two(__fmaf_rn(score, factor,
    offset)); }

// The sum of a quarter of a tile, 16 keys, of which a lane has two pairs: in its own order first, then over the four
// lanes of a row.
DEVICE float quarter_sum(float a, float b, float c, float d) {
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(a, b), c), d);
    sum = __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 1));
    return __fadd_rn(sum, __shfl_xor_sync(FULL_WARP, sum, 2));
}
