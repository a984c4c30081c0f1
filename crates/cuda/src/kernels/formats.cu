// The formats of weights on the device, and how the tensor core's operand is made from each.
//
// A matrix [rows][cols] is cut into tiles of 16 rows, and its columns into groups of 256. A group is four units of 64 columns, a unit
// four steps of 16: one mma each. What is stored together is a chunk: one, two or four units, some 2 KiB. The chunks of
// eight tiles lie side by side, then come those of the next columns: a block that takes 128 rows reads one stream. Within a unit the numbers lie in the order in which the lanes of a warp want them: lane l holds rows g = l / 4 and g + 8, and of each step the
// columns 2t, 2t + 1, 2t + 8, 2t + 9 with t = l % 4. The four registers of a step are the pairs
//   0: row g, columns 2t, 2t + 1    1: row g + 8, the same    2: row g, columns 2t + 8, 2t + 9    3: row g + 8, the same.
// One 16-byte load a lane is thus 512 consecutive bytes a warp. Rows and columns beyond the matrix are zeros.
//
// Quantized numbers become f16: integers exactly, scale times sub-scale rounded once, their product (for Q4_K and Q5_K a fused
// product and difference) rounded once. All kernels use these functions, so a weight has the same f16 value in each of them.

enum Format { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7 };

// Integers in the mantissa of a half: 0x6400 is 1024, whose last bit is worth one.
static const u32 HALF_1024 = 0x64006400u;
static const u32 HALF_MINUS_1024 = 0xe400e400u;
static const u32 HALF_SIXTEENTH = 0x2c002c00u;

// Where packed weights are read from. Those in device memory are read once and pass through.
struct FromDevice {
    DEVICE uint4 vector(const u8* p) { return load_streaming(p); }
};
struct FromShared {
    DEVICE uint4 vector(const u8* p) { return *(const uint4*)p; }
};

// Both halves of a pair like its first, or like its second: written so that the compiler makes it part of the instruction that uses it.
DEVICE u32 both_first(u32 pair) {
    u32 d;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};}" : "=r"(d) : "r"(pair));
    return d;
}

DEVICE u32 both_second(u32 pair) {
    u32 d;
    asm("{.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};}" : "=r"(d) : "r"(pair));
    return d;
}

template <int F>
struct Weights;

struct PlainWeights {
    static const u32 CHUNK_BYTES = 2048;
    static const u32 CHUNK_UNITS = 1;
    struct Raw {
        uint4 step[4];
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
#pragma unroll
        for (int s = 0; s < 4; s++) raw.step[s] = From::vector(chunk + s * 512 + lane * 16);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        a[0] = raw.step[s].x;
        a[1] = raw.step[s].y;
        a[2] = raw.step[s].z;
        a[3] = raw.step[s].w;
    }
};

template <>
struct Weights<F16> : PlainWeights {};
template <>
struct Weights<BF16> : PlainWeights {};

// Two units. Bytes are q + 128. Two 16-byte loads of two steps each: [step 0: row g, row g + 8; step 1: the same], four bytes a row.
// Then, for each g, the scales [row g: block 0, block 1; row g + 8: block 0, block 1].
template <>
struct Weights<Q8_0> {
    static const u32 UNIT_BYTES = 1088;
    static const u32 CHUNK_BYTES = 2 * UNIT_BYTES;
    static const u32 CHUNK_UNITS = 2;
    struct Raw {
        uint4 q[2];
        uint2 d;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        chunk += unit % CHUNK_UNITS * UNIT_BYTES;
        raw.q[0] = From::vector(chunk + lane * 16);
        raw.q[1] = From::vector(chunk + 512 + lane * 16);
        raw.d = *(const uint2*)(chunk + 1024 + lane / 4 * 8);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        const uint4& q = raw.q[s / 2];
        u32 low = s % 2 ? q.z : q.x, high = s % 2 ? q.w : q.y;
        const u32 minus_1152 = 0xe480e480u;
        u32 d_low = s / 2 ? both_second(raw.d.x) : both_first(raw.d.x);
        u32 d_high = s / 2 ? both_second(raw.d.y) : both_first(raw.d.y);
        a[0] = half2_mul(half2_add(__byte_perm(low, HALF_1024, 0x5150), minus_1152), d_low);
        a[1] = half2_mul(half2_add(__byte_perm(high, HALF_1024, 0x5150), minus_1152), d_high);
        a[2] = half2_mul(half2_add(__byte_perm(low, HALF_1024, 0x5352), minus_1152), d_low);
        a[3] = half2_mul(half2_add(__byte_perm(high, HALF_1024, 0x5352), minus_1152), d_high);
    }
};

// Four-bit integers of a step in one word: pair p has its first number at bit 4p and its second at bit 16 + 4p. They become 1024 + q for
// the even pairs and 1024 + 16 q for the odd ones.
DEVICE void nibbles(u32 (&a)[4], u32 word) {
    u32 shifted = word >> 8, magic = in_register<HALF_1024>();
    a[0] = masked_or<0x000f000fu>(word, magic);
    a[1] = masked_or<0x00f000f0u>(word, magic);
    a[2] = masked_or<0x000f000fu>(shifted, magic);
    a[3] = masked_or<0x00f000f0u>(shifted, magic);
}

// Four units, each one word a step and then the scales as for Q8_0.
template <>
struct Weights<Q4_0> {
    static const u32 UNIT_BYTES = 576;
    static const u32 CHUNK_BYTES = 4 * UNIT_BYTES;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        uint2 d;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        chunk += unit * UNIT_BYTES;
        raw.q = From::vector(chunk + lane * 16);
        raw.d = *(const uint2*)(chunk + 512 + lane / 4 * 8);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        u32 word = s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w;
        const u32 minus_1032 = 0xe408e408u, minus_72 = 0xd480d480u;
        nibbles(a, word);
        u32 d_low = s / 2 ? both_second(raw.d.x) : both_first(raw.d.x);
        u32 d_high = s / 2 ? both_second(raw.d.y) : both_first(raw.d.y);
        a[0] = half2_mul(half2_add(a[0], minus_1032), d_low);
        a[1] = half2_mul(half2_fma(a[1], HALF_SIXTEENTH, minus_72), d_high);
        a[2] = half2_mul(half2_add(a[2], minus_1032), d_low);
        a[3] = half2_mul(half2_fma(a[3], HALF_SIXTEENTH, minus_72), d_high);
    }
};

// Scale and minimum of a sub-block, times those of the block: [d sc, dmin m] as two halves.
DEVICE u32 scaled_pair(u32 bytes, u32 d_and_min) {
    return half2_mul(half2_add(__byte_perm(bytes, HALF_1024, 0x5150), HALF_MINUS_1024), d_and_min);
}

DEVICE u32 minus_second(u32 pair) {
    u32 d;
    asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(both_second(pair)));
    return d;
}

// 4 units of one word a step; then for each unit and g eight bytes [row g: sc, m, sc, m; row g + 8: the same]; then for each g
// [row g: d, dmin; row g + 8: the same].
template <>
struct Weights<Q4_K> {
    static const u32 CHUNK_BYTES = 2368;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        uint2 scales;
        uint2 d;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        raw.q = From::vector(chunk + unit * 512 + lane * 16);
        raw.scales = *(const uint2*)(chunk + 2048 + unit * 64 + lane / 4 * 8);
        raw.d = *(const uint2*)(chunk + 2304 + lane / 4 * 8);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        u32 word = s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w;
        u32 low = scaled_pair(raw.scales.x >> (s / 2 * 16), raw.d.x);
        u32 high = scaled_pair(raw.scales.y >> (s / 2 * 16), raw.d.y);
        const u32 minus_64 = 0xd400d400u;
        nibbles(a, word);
        a[0] = half2_fma(half2_add(a[0], HALF_MINUS_1024), both_first(low), minus_second(low));
        a[1] = half2_fma(half2_fma(a[1], HALF_SIXTEENTH, minus_64), both_first(high), minus_second(high));
        a[2] = half2_fma(half2_add(a[2], HALF_MINUS_1024), both_first(low), minus_second(low));
        a[3] = half2_fma(half2_fma(a[3], HALF_SIXTEENTH, minus_64), both_first(high), minus_second(high));
    }
};

// As Q4_K, with a word of fifth bits for each unit and lane before the scales: pair p of step s at bits 4s + p and 16 + 4s + p.
template <>
struct Weights<Q5_K> {
    static const u32 CHUNK_BYTES = 2880;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        u32 fifth;
        uint2 scales;
        uint2 d;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        raw.q = From::vector(chunk + unit * 512 + lane * 16);
        raw.fifth = *(const u32*)(chunk + 2048 + unit * 128 + lane * 4);
        raw.scales = *(const uint2*)(chunk + 2560 + unit * 64 + lane / 4 * 8);
        raw.d = *(const uint2*)(chunk + 2816 + lane / 4 * 8);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        u32 word = s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w;
        u32 low = scaled_pair(raw.scales.x >> (s / 2 * 16), raw.d.x);
        u32 high = scaled_pair(raw.scales.y >> (s / 2 * 16), raw.d.y);
        u32 fifth = raw.fifth >> (4 * s);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 q = ((word >> (4 * p)) & 0x000f000fu) | HALF_1024 | ((fifth >> p & 0x00010001u) << 4);
            u32 scale = p % 2 ? high : low;
            a[p] = half2_fma(half2_add(q, HALF_MINUS_1024), both_first(scale), minus_second(scale));
        }
    }
};

// Low four bits as Q4_K; then for each unit and lane two words of high bit pairs: pair p of step s in word s / 2 at bits
// 2 (4 (s % 2) + p) and 16 + that; then for each unit and g eight bytes of scales [row g: steps 0 to 3; row g + 8: the same]; then
// for each g [row g: d; row g + 8: d].
template <>
struct Weights<Q6_K> {
    static const u32 CHUNK_BYTES = 3360;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        uint2 high;
        uint2 scales;
        u32 d;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        raw.q = From::vector(chunk + unit * 512 + lane * 16);
        raw.high = *(const uint2*)(chunk + 2048 + unit * 256 + lane * 8);
        raw.scales = *(const uint2*)(chunk + 3072 + unit * 64 + lane / 4 * 8);
        raw.d = *(const u32*)(chunk + 3328 + lane / 4 * 4);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        u32 word = s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w;
        u32 bits = (s / 2 ? raw.high.y : raw.high.x) >> (8 * (s % 2));
        // A signed byte as a half: q ^ 0x80 is q + 128.
        const u32 minus_1152 = 0xe480e480u, minus_1056 = 0xe420e420u;
        u32 bytes = (raw.scales.x >> (8 * s) & 0xffu) | (raw.scales.y >> (8 * s) & 0xffu) << 8;
        u32 scales = half2_add(__byte_perm(bytes ^ 0x8080u, HALF_1024, 0x5150), minus_1152);
        scales = half2_mul(scales, raw.d);
        u32 low = both_first(scales), high = both_second(scales);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 q = ((word >> (4 * p)) & 0x000f000fu) | HALF_1024 | ((bits >> (2 * p) & 0x00030003u) << 4);
            a[p] = half2_mul(half2_add(q, minus_1056), p % 2 ? high : low);
        }
    }
};

// Tiles whose chunks lie side by side.
static const u32 SIDE = 8;

DEVICE u64 chunk_index(u64 tile, u32 chunk, u32 num_chunks) { return (tile / SIDE * num_chunks + chunk) * SIDE + tile % SIDE; }

// The chunk that holds a unit, given the chunk of the same tile that holds the first unit of a group.
template <class W>
DEVICE const u8* chunk_of(const u8* group, int unit) {
    return group + unit / W::CHUNK_UNITS * SIDE * W::CHUNK_BYTES;
}

template <int F>
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (F == BF16)
        mma_bf16(d, a, b0, b1);
    else
        mma_f16(d, a, b0, b1);
}

// Where the number at (row, col) of a tile lies, for kernels that fetch single numbers.
struct Place {
    int unit, step, lane, pair, second;
};

DEVICE Place place(int row, int col) {
    Place p;
    p.unit = col / 64 % 4;
    p.step = col / 16 % 4;
    int k = col % 16;
    p.lane = row % 8 * 4 + k % 8 / 2;
    p.pair = k / 8 * 2 + row % 16 / 8;
    p.second = k % 2;
    return p;
}

DEVICE u32 nibble_at(const u8* unit, const Place& p) {
    u32 word = ((const u32*)(unit + p.lane * 16))[p.step];
    return word >> (4 * p.pair + 16 * p.second) & 15;
}

// The number at (row, col) of a packed matrix as f32, rounded as the plain decoder of the format rounds.
DEVICE float weight_at(int format, const u8* weights, u64 row, u32 col, u32 cols) {
    if (format == F32) return ((const float*)weights)[row * cols + col];
    u32 r = row % 16, groups = (cols + 255) / 256;
    u64 by_unit = chunk_index(row / 16, col / 64, 4 * groups), by_group = chunk_index(row / 16, col / 256, groups);
    Place p = place(r, col);
    u32 g = r % 8, half = r / 8;
    if (format == F16 || format == BF16) {
        const u8* chunk = weights + by_unit * 2048;
        u16 bits = ((const u16*)(chunk + p.step * 512 + p.lane * 16))[2 * p.pair + p.second];
        return format == F16 ? half_to_float(bits) : bf16_to_float(bits);
    }
    if (format == Q8_0) {
        const u8* chunk = weights + chunk_index(row / 16, col / 128, 2 * groups) * 2176 + p.unit % 2 * 1088;
        u8 q = chunk[p.step / 2 * 512 + p.lane * 16 + p.step % 2 * 8 + half * 4 + p.pair / 2 * 2 + p.second];
        float d = half_to_float(((const u16*)(chunk + 1024 + g * 8))[half * 2 + p.step / 2]);
        return __fmul_rn(d, (float)q - 128.0f);
    }
    if (format == Q4_0) {
        const u8* chunk = weights + by_group * 2304 + p.unit * 576;
        float d = half_to_float(((const u16*)(chunk + 512 + g * 8))[half * 2 + p.step / 2]);
        return __fmul_rn(d, (float)nibble_at(chunk, p) - 8.0f);
    }
    if (format == Q4_K || format == Q5_K) {
        bool fifth = format == Q5_K;
        const u8* chunk = weights + by_group * (fifth ? 2880 : 2368);
        const u8* scales = chunk + (fifth ? 2560 : 2048) + p.unit * 64 + g * 8 + half * 4 + p.step / 2 * 2;
        const u16* d = (const u16*)(chunk + (fifth ? 2816 : 2304) + g * 8) + half * 2;
        u32 q = nibble_at(chunk + p.unit * 512, p);
        if (fifth) {
            u32 word = *(const u32*)(chunk + 2048 + p.unit * 128 + p.lane * 4);
            q |= (word >> (4 * p.step + p.pair + 16 * p.second) & 1) << 4;
        }
        float ds = __fmul_rn(half_to_float(d[0]), (float)scales[0]);
        float ms = __fmul_rn(half_to_float(d[1]), (float)scales[1]);
        return __fsub_rn(__fmul_rn(ds, (float)q), ms);
    }
    const u8* chunk = weights + by_group * 3360;
    u32 q = nibble_at(chunk + p.unit * 512, p);
    u32 word = ((const u32*)(chunk + 2048 + p.unit * 256 + p.lane * 8))[p.step / 2];
    q |= (word >> (2 * (4 * (p.step % 2) + p.pair) + 16 * p.second) & 3) << 4;
    signed char scale = (signed char)chunk[3072 + p.unit * 64 + g * 8 + half * 4 + p.step];
    float d = half_to_float(((const u16*)(chunk + 3328 + g * 4))[half]);
    return __fmul_rn(__fmul_rn(d, (float)scale), (float)q - 32.0f);
}
