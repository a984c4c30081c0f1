// The formats of weights on the device, and how each becomes the operand of the tensor cores.
//
// A matrix [rows][cols] is cut into tiles of 16 rows, and its columns into groups of 256. A group is four units of 64
// columns, a unit
// four steps of 16: one mma each. A chunk is one, two or four units, some 2 KiB, that are stored together. The chunks
// of eight tiles are
// adjacent, then come those of the next columns: a block that takes 128 rows reads one stream. Within a unit the values
// are in the order in
// which the lanes of a warp need them: lane l holds rows g = l / 4 and g + 8, and of each step the
// columns 2t, 2t + 1, 2t + 8, 2t + 9 with t = l % 4. The four registers of a step are the pairs
//   0: row g, columns 2t, 2t + 1        1: row g + 8, the same columns
//   2: row g, columns 2t + 8, 2t + 9    3: row g + 8, the same columns
// One 16-byte load a lane is thus 512 consecutive bytes a warp. Rows and columns beyond the matrix are zeros, up to
// whole tiles; the tiles that pad the last
// eight are unused.
//
// Quantized values become f16: integers exactly, scale times sub-scale rounded once (when they are packed), their
// product (for Q4_K and Q5_K a fused product and difference) rounded once. All kernels use these functions, so a weight
// has the same f16 value in each of them.
//
// Bits of an integer within the mantissa of a half, under an exponent of zero, are that integer times a power of two
// (bit 0 is worth 2^-24). So for Q8_0, Q4_0 and Q4_K a mask and one fused product and sum make a weight: the scales are
// packed with the inverse power. They would not all fit into a half, so what comes out is 64 times too small, and sums
// are GROWTH times as large when they leave the registers. A matrix with a scale beyond what is left (a Q4 scale of 1,
// a Q8_0 scale of 1/4: upload.rs) is stored as F16 instead.

enum Format { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_K = 5, Q5_K = 6, Q6_K = 7, MXFP4 = 8 };

// Integers in the mantissa of a half: 0x6400 is 1024, whose last bit is worth one.
static const u32 HALF_1024 = 0x64006400u;
static const u32 HALF_MINUS_1024 = 0xe400e400u;
static const u32 HALF_SIXTEENTH = 0x2c002c00u;

// The memory that packed weights are read from. Those in device memory are read once.
struct FromDevice {
    DEVICE uint4 vector(const u8* p) { return load_streaming(p); }
};
struct FromShared {
    DEVICE uint4 vector(const u8* p) { return *(const uint4*)p; }
};

// The first, or the second, half of a pair twice: written so that the compiler makes it part of the instruction that
// uses it.
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

// Undoes the scaling of a sum of a product with weights of a format; exact, because it is a power of two.
template <class W>
DEVICE float grown(float sum) {
    return W::GROWTH == 1 ? sum : __fmul_rn(sum, (float)W::GROWTH);
}

struct PlainWeights {
    static const int GROWTH = 1;
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

// Two units. Bytes are q + 128. Two 16-byte loads of two steps each: [step 0: row g, row g + 8; step 1: the same], four
// bytes a row. Then, for each g, the scales [row g: block 0, block 1; row g + 8: block 0, block 1], times 2^18.
template <>
struct Weights<Q8_0> {
    static const int GROWTH = 64;
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
        // 128 scales less: times -2^-17.
        const u32 offset = 0x80808080u;
        u32 least_low = half2_mul(raw.d.x, offset), least_high = half2_mul(raw.d.y, offset);
        u32 d_low = s / 2 ? both_second(raw.d.x) : both_first(raw.d.x);
        u32 d_high = s / 2 ? both_second(raw.d.y) : both_first(raw.d.y);
        least_low = s / 2 ? both_second(least_low) : both_first(least_low);
        least_high = s / 2 ? both_second(least_high) : both_first(least_high);
        a[0] = half2_fma(__byte_perm(low, 0, 0x4140), d_low, least_low);
        a[1] = half2_fma(__byte_perm(high, 0, 0x4140), d_high, least_high);
        a[2] = half2_fma(__byte_perm(low, 0, 0x4342), d_low, least_low);
        a[3] = half2_fma(__byte_perm(high, 0, 0x4342), d_high, least_high);
    }
};

// Four-bit integers of a step in one word: pair p has its first number at bit 2 + 4p and its second 16 bits higher,
// around the end of the word. In bits 2 to 5 they are worth q 2^-22, in bits 6 to 9 q 2^-18: the former are of row g,
// the latter of row g + 8.
DEVICE void small_nibbles(u32 (&a)[4], u32 word) {
    u32 shifted = __funnelshift_r(word, word, 8);
    a[0] = word & 0x003c003cu;
    a[1] = word & 0x03c003c0u;
    a[2] = shifted & 0x003c003cu;
    a[3] = shifted & 0x03c003c0u;
}

// Four units, each one word a step and then the scales as for Q8_0, those of row g times 2^16, those of row g + 8 times
// 2^12.
template <>
struct Weights<Q4_0> {
    static const int GROWTH = 64;
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
        // Eight scales less: times -2^-19, and -2^-15.
        u32 least_low = half2_mul(raw.d.x, 0x80208020u), least_high = half2_mul(raw.d.y, 0x82008200u);
        u32 d_low = s / 2 ? both_second(raw.d.x) : both_first(raw.d.x);
        u32 d_high = s / 2 ? both_second(raw.d.y) : both_first(raw.d.y);
        least_low = s / 2 ? both_second(least_low) : both_first(least_low);
        least_high = s / 2 ? both_second(least_high) : both_first(least_high);
        small_nibbles(a, s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w);
        a[0] = half2_fma(a[0], d_low, least_low);
        a[1] = half2_fma(a[1], d_high, least_high);
        a[2] = half2_fma(a[2], d_low, least_low);
        a[3] = half2_fma(a[3], d_high, least_high);
    }
};

// Four-bit integers of a step in one word: pair p has its first number at bit 4p and its second at bit 16 + 4p. They
// become 1024 + q for the even pairs and 1024 + 16 q for the odd ones.
DEVICE void nibbles(u32 (&a)[4], u32 word) {
    u32 shifted = word >> 8, magic = in_register<HALF_1024>();
    a[0] = masked_or<0x000f000fu>(word, magic);
    a[1] = masked_or<0x00f000f0u>(word, magic);
    a[2] = masked_or<0x000f000fu>(shifted, magic);
    a[3] = masked_or<0x00f000f0u>(shifted, magic);
}

DEVICE u32 minus_second(u32 pair) {
    u32 d;
    asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(both_second(pair)));
    return d;
}

// The words of `nibbles` with the bits above them, which lie in one word for four steps (one bit each) or two (two
// bits): those of step s, `shift` bits higher, at bit 4 for pair 0, 8 for pair 1, 12 for pair 2 and 0 for pair 3, and
// 16 higher.
template <int BITS>
DEVICE void with_high_bits(u32 (&a)[4], u32 high, int shift) {
    const u32 mask = BITS == 1 ? 0x00010001u : 0x00030003u;
    u32 near = high >> shift;
    a[0] = masked_or<(mask << 4)>(near, a[0]);
    a[1] = masked_or<(mask << 8)>(near, a[1]);
    a[2] = masked_or<(mask << 4)>(high >> (8 + shift), a[2]);
    a[3] = masked_or<(mask << 8)>(high << (8 - shift), a[3]);
}

// The scales of a unit of a K format, multiplied with those of their blocks: sixteen bytes for each g.
struct UnitScales {
    uint4 of;
    // [row g: d sc, dmin m of columns 0 to 31; the same of columns 32 to 63; row g + 8: the same]
    __device__ __forceinline__ u32 low_pair(int s) const { return s / 2 ? of.y : of.x; }
    __device__ __forceinline__ u32 high_pair(int s) const { return s / 2 ? of.w : of.z; }
};

// q * d sc - dmin m for integers below 1024, as `nibbles` leaves them.
DEVICE void scaled_with_minimum(u32 (&a)[4], u32 low, u32 high) {
    const u32 minus_64 = 0xd400d400u;
    a[0] = half2_fma(half2_add(a[0], HALF_MINUS_1024), both_first(low), minus_second(low));
    a[1] = half2_fma(half2_fma(a[1], HALF_SIXTEENTH, minus_64), both_first(high), minus_second(high));
    a[2] = half2_fma(half2_add(a[2], HALF_MINUS_1024), both_first(low), minus_second(low));
    a[3] = half2_fma(half2_fma(a[3], HALF_SIXTEENTH, minus_64), both_first(high), minus_second(high));
}

// Four units: one word a step, then the scales: d sc times 2^16 (row g) or 2^12 (row g + 8), dmin m times -2^-6.
template <>
struct Weights<Q4_K> {
    static const int GROWTH = 64;
    static const u32 UNIT_BYTES = 640;
    static const u32 CHUNK_BYTES = 4 * UNIT_BYTES;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        UnitScales scales;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        chunk += unit * UNIT_BYTES;
        raw.q = From::vector(chunk + lane * 16);
        raw.scales.of = *(const uint4*)(chunk + 512 + lane / 4 * 16);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        small_nibbles(a, s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w);
        u32 low = raw.scales.low_pair(s), high = raw.scales.high_pair(s);
        a[0] = half2_fma(a[0], both_first(low), both_second(low));
        a[1] = half2_fma(a[1], both_first(high), both_second(high));
        a[2] = half2_fma(a[2], both_first(low), both_second(low));
        a[3] = half2_fma(a[3], both_first(high), both_second(high));
    }
};

// As Q4_K, with a word of fifth bits for each lane before the scales.
template <>
struct Weights<Q5_K> {
    static const int GROWTH = 1;
    static const u32 UNIT_BYTES = 768;
    static const u32 CHUNK_BYTES = 4 * UNIT_BYTES;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        u32 fifth;
        UnitScales scales;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        chunk += unit * UNIT_BYTES;
        raw.q = From::vector(chunk + lane * 16);
        raw.fifth = *(const u32*)(chunk + 512 + lane * 4);
        raw.scales.of = *(const uint4*)(chunk + 640 + lane / 4 * 16);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        nibbles(a, s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w);
        with_high_bits<1>(a, raw.fifth, s);
        scaled_with_minimum(a, raw.scales.low_pair(s), raw.scales.high_pair(s));
    }
};

// Low four bits as Q4_K; then for each lane two words of high bit pairs, for two steps each; then for each g the
// scales, d sc for each step: [row g: steps 0 to 3; row g + 8: the same].
template <>
struct Weights<Q6_K> {
    static const int GROWTH = 1;
    static const u32 UNIT_BYTES = 896;
    static const u32 CHUNK_BYTES = 4 * UNIT_BYTES;
    static const u32 CHUNK_UNITS = 4;
    struct Raw {
        uint4 q;
        uint2 high;
        UnitScales scales;
    };
    template <class From>
    DEVICE void load(Raw& raw, const u8* chunk, int unit, int lane) {
        chunk += unit * UNIT_BYTES;
        raw.q = From::vector(chunk + lane * 16);
        raw.high = *(const uint2*)(chunk + 512 + lane * 8);
        raw.scales.of = *(const uint4*)(chunk + 768 + lane / 4 * 16);
    }
    DEVICE void decode(u32 (&a)[4], const Raw& raw, int s) {
        const u32 minus_1056 = 0xe420e420u, minus_96 = 0xd600d600u;
        nibbles(a, s == 0 ? raw.q.x : s == 1 ? raw.q.y : s == 2 ? raw.q.z : raw.q.w);
        with_high_bits<2>(a, s / 2 ? raw.high.y : raw.high.x, s % 2 * 2);
        u32 low = raw.scales.low_pair(s), high = raw.scales.high_pair(s);
        u32 d_low = s % 2 ? both_second(low) : both_first(low), d_high = s % 2 ? both_second(high) : both_first(high);
        a[0] = half2_mul(half2_add(a[0], minus_1056), d_low);
        a[1] = half2_mul(half2_fma(a[1], HALF_SIXTEENTH, minus_96), d_high);
        a[2] = half2_mul(half2_add(a[2], minus_1056), d_low);
        a[3] = half2_mul(half2_fma(a[3], HALF_SIXTEENTH, minus_96), d_high);
    }
};

// Four-bit floats in the layout of Q4_0: the bits e e m of a float, under the top bits of a half's exponent, are its
// magnitude times 2^-14, and the scale, a power of two, is packed times 2^14. Weights are exact; upload.rs stores a
// matrix with a scale beyond 2^-23 to 2 as BF16. In a word, pair p has its magnitudes at bits 3p and 16 + 3p, its
// signs at bits 12 + p and 28 + p.
template <>
struct Weights<MXFP4> {
    static const int GROWTH = 1;
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
        u32 d_low = s / 2 ? both_second(raw.d.x) : both_first(raw.d.x);
        u32 d_high = s / 2 ? both_second(raw.d.y) : both_first(raw.d.y);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 bits = word << (9 - 3 * p) & 0x0e000e00u;
            bits |= word << (3 - p) & 0x80008000u;
            a[p] = half2_mul(bits, p % 2 ? d_high : d_low);
        }
    }
};

// Number of tiles whose chunks are adjacent.
static const u32 SIDE = 8;

DEVICE u64 chunk_index(u64 tile, u32 chunk,
    u32 num_chunks) { return (tile / SIDE * num_chunks + chunk) * SIDE + tile % SIDE; }

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

// Values as they are stored in a file: `at` is the bytes of a row.
DEVICE u16 two_bytes(const u8* p) { return p[0] | p[1] << 8; }

// The integer of a quantized value, not below zero.
DEVICE u32 raw_bits(int format, const u8* at, u32 col) {
    if (format == Q8_0) return (u8)(at[col / 32 * 34 + 2 + col % 32] + 128);
    if (format == Q4_0) {
        u32 j = col % 32;
        return at[col / 32 * 18 + 2 + j % 16] >> (j / 16 * 4) & 15;
    }
    if (format == MXFP4) return at[col / 32 * 17 + 1 + col % 16] >> (col / 16 % 2 * 4) & 15;
    u32 k = col % 256, s = k / 32, j = k % 32;
    if (format == Q4_K) return at[col / 256 * 144 + 16 + s / 2 * 32 + j] >> (s % 2 * 4) & 15;
    if (format == Q5_K) {
        const u8* block = at + col / 256 * 176;
        return (block[48 + s / 2 * 32 + j] >> (s % 2 * 4) & 15) | (block[16 + j] >> s & 1) << 4;
    }
    const u8* block = at + col / 256 * 210;
    u32 half = k / 128, run = k % 128 / 32;
    return (block[64 * half + 32 * (run % 2) + j] >> (run / 2 * 4) & 15) |
           (block[128 + 32 * half + j] >> (2 * run) & 3) << 4;
}

// The six-bit scale (which = 0) or minimum (which = 1) of sub-block s of a Q4_K or Q5_K block.
DEVICE u8 six_bits(const u8* block, int s, int which) {
    const u8* packed = block + 4;
    if (s < 4) return packed[s + 4 * which] & 0x3f;
    u8 low = packed[s + 4] >> (4 * which) & 0x0f;
    return low | (packed[s - 4 + 4 * which] >> 2 & 0x30);
}

// The scale (which = 0) or minimum (which = 1) of a value of a K format, in f32, where both factors' product is exact.
DEVICE float k_scale(int format, const u8* at, u32 col, int which) {
    if (format == Q6_K) {
        const u8* block = at + col / 256 * 210;
        return __fmul_rn(half_to_float(two_bytes(block + 208)), (float)(signed char)block[192 + col % 256 / 16]);
    }
    const u8* block = at + col / 256 * (format == Q4_K ? 144 : 176);
    return __fmul_rn(half_to_float(two_bytes(block + 2 * which)), (float)six_bits(block, col % 256 / 32, which));
}

// Twice the value of a four-bit float (sign, two bits of exponent, one of mantissa); minus zero is zero.
DEVICE float doubled_float4(u32 bits) {
    int m = bits & 7, magnitude = m < 2 ? m : (2 + m % 2) << (m / 2 - 1);
    return (float)(bits & 8 ? -magnitude : magnitude);
}

// A value as f32, rounded as the reference decoder of the format rounds.
DEVICE float stored_number(int format, const u8* at, u32 col) {
    if (format == F32) return ((const float*)at)[col];
    if (format == F16) return half_to_float(((const u16*)at)[col]);
    if (format == BF16) return bf16_to_float(((const u16*)at)[col]);
    if (format == MXFP4) return ldexpf(doubled_float4(raw_bits(format, at, col)), at[col / 32 * 17] - 128);
    float q = (float)raw_bits(format, at, col);
    if (format == Q8_0) return __fmul_rn(half_to_float(two_bytes(at + col / 32 * 34)), q - 128.0f);
    if (format == Q4_0) return __fmul_rn(half_to_float(two_bytes(at + col / 32 * 18)), q - 8.0f);
    if (format == Q6_K) return __fmul_rn(k_scale(format, at, col, 0), q - 32.0f);
    return __fsub_rn(__fmul_rn(k_scale(format, at, col, 0), q), k_scale(format, at, col, 1));
}
